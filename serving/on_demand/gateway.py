"""The gateway in front of all models on demand."""

from __future__ import annotations

import msgspec

from serving import protocol
from serving.gateway import Gateway
from serving.on_demand.models import Models
from serving.totals import total

NONE_LOADED = protocol.Stats(
    pages=0, pages_free=0, pages_shared=0, pages_evicted=0, compiles_after_warmup=0, models={}
)


class OnDemandGateway(Gateway):
    """The engine's side of the protocol, in front of all models."""

    def __init__(self, models: Models):
        super().__init__(models)
        self.models = models

    def state(self) -> tuple[protocol.Message, ...]:
        """The server is ready even if no model is loaded."""
        if self.models.status.state != "ready":
            return (self.models.status,)
        models = self.models.models.values()
        states = protocol.ModelStates({model.name: model.state for model in models})
        return protocol.Models([model.info for model in models]), states, self.models.status

    def figures(self) -> tuple[protocol.Message, ...]:
        """Return the sum of the loaded models' figures. Those of a model begin again when it is loaded."""
        loaded = {
            model.name: model.client.stats
            for model in self.models.models.values()
            if model.client is not None and model.client.stats is not None
        }
        return (msgspec.structs.replace(total(loaded), replicas={}) if loaded else NONE_LOADED,)
