"""The gateway in front of all models on demand."""

from __future__ import annotations

import msgspec

from serving import protocol
from serving.engine_client import EngineClient
from serving.gateway import Gateway
from serving.on_demand.models import Models
from serving.totals import sum_of, total

NONE_LOADED = protocol.Stats(
    pages=0, pages_free=0, pages_shared=0, pages_evicted=0, compiles_after_warmup=0, models={}
)
# of all models together: Prometheus would take a smaller figure for a restart
COUNTERS = "pages_shared", "pages_evicted", "compiles_after_warmup", "pauses", "turn_times"


class OnDemandGateway(Gateway):
    """The engine's side of the protocol, in front of all models."""

    def __init__(self, models: Models):
        super().__init__(models)
        self.models = models
        self.seen: dict[EngineClient, protocol.Stats] = {}  # the last figures of each loaded model's engine
        self.past = NONE_LOADED  # counters of engines that have ended

    def state(self) -> tuple[protocol.Message, ...]:
        """The server is ready even if no model is loaded."""
        if self.models.status.state != "ready":
            return (self.models.status,)
        models = self.models.models.values()
        states = protocol.ModelStates({model.name: model.state for model in models})
        return protocol.Models([model.info for model in models]), states, self.models.status

    def figures(self) -> tuple[protocol.Message, ...]:
        """Return the sum of the loaded models' figures. Counters of all models together go on when a model is
        unloaded. Those of one model begin again when it is loaded."""
        loaded = {
            model.client: model.name for model in self.models.models.values() if model.client is not None
        }
        for client in self.seen.keys() - loaded.keys():
            self.past = with_counters(self.past, self.seen.pop(client))
        self.seen |= {client: client.stats for client in loaded if client.stats is not None}
        stats = {loaded[client]: each for client, each in self.seen.items()}
        whole = msgspec.structs.replace(total(stats), replicas={}) if stats else NONE_LOADED
        return (with_counters(whole, self.past),)


def with_counters(stats: protocol.Stats, past: protocol.Stats) -> protocol.Stats:
    """Return figures with the counters of past ones added."""
    counters = {name: sum_of([getattr(stats, name), getattr(past, name)]) for name in COUNTERS}
    return msgspec.structs.replace(stats, **counters)
