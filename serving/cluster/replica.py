"""The actor that Ray Serve runs, with an engine process. Its methods are Serve's hooks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
import ray

from serving import logs
from serving.cluster.engine_host import EngineHost
from serving.cluster.scaling import load_of
from serving.settings import Settings


class Replica:
    """An engine. It is ready once its models are warm, and it ends with its actor, however that ends."""

    def __init__(self, settings: bytes):
        """settings: as JSON. Raises ValueError if the engine cannot serve its models."""
        logs.configure("replica")
        asked = msgspec.json.decode(settings, type=Settings)
        is_local = asked.replicas.address is None
        self.host = EngineHost(asked, "127.0.0.1" if is_local else ray.util.get_node_ip_address())
        self.address = self.host.start()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Tell routers where the engine is."""
        return asdict(self.address)

    def check_health(self) -> None:
        """Raises RuntimeError if the engine has ended for good, so that Serve replaces the replica."""
        if not self.host.is_alive:
            raise RuntimeError("the engine has ended, and starting it again did not help")

    def record_autoscaling_stats(self) -> dict[str, float]:
        return load_of(self.host.stats)

    def __del__(self) -> None:
        if hasattr(self, "host"):  # Python calls this too if `__init__` has failed
            self.host.stop()
