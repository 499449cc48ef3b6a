"""The gateway in front of all replicas."""

from __future__ import annotations

from msgspec.structs import replace

from serving import protocol
from serving.cluster.dispatch import Dispatcher
from serving.gateway import Gateway
from serving.totals import total


class ClusterGateway(Gateway):
    """The engine's side of the protocol, in front of a dispatcher. num_wanted: how many replicas there are to
    be."""

    def __init__(self, dispatcher: Dispatcher, num_wanted: int):
        super().__init__(dispatcher)
        self.dispatcher = dispatcher
        self.num_wanted = num_wanted

    def state(self) -> tuple[protocol.Message, ...]:
        """In an update the old replicas are ready until the new ones are connected."""
        ready = [link for link in self.dispatcher.links.values() if link.status.state == "ready"]
        if ready:
            return protocol.Models(ready[0].models), protocol.Status("ready", 1.0)
        return (protocol.Status("loading", detail=f"none of {self.num_wanted} replicas is ready"),)

    def figures(self) -> tuple[protocol.Message, ...]:
        links = self.dispatcher.links.items()
        replicas = {name: link.stats for name, link in links if link.stats is not None}
        if not replicas:
            return ()
        return (replace(total(replicas), engine_restarts=self.dispatcher.num_restarts),)
