"""Ray Serve's request router for our replicas. It runs in the gateway's process, on a thread of Serve's."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serving.cluster import table
from serving.cluster.link import Address


class SoonestRouter(RequestRouter):
    """Sends each request to the replica that speaks soonest. Serve's queue lengths play no part."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # If none takes it, Serve asks again after a pause, and not at once for ever.
        pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        [ask] = pending_request.args
        return [[by_name[name]] for name in table.TABLE.route(ask) if name in by_name]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        table.TABLE.update(
            {replica.replica_id.unique_id: Address.of(replica.replica_metadata) for replica in replicas}
        )
