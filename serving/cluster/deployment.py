"""The replicas as an application of Ray Serve.

`build` is also the import path for Serve's configuration files: serving.cluster.deployment:build, whose arguments are
the fields of `Settings`.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from functools import cache
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from serving.cluster.replica import Replica
from serving.settings import Settings

APPLICATION = DEPLOYMENT = "zoo"
# Of a replica: the engine's own admission refuses earlier. Serve counts a place for each open request, and
# waits for them when a replica is to end.
MAX_OPEN = 10_000
DRAIN_S = 300.0  # for the open answers of a replica that is to end
CONNECT_S = 10.0  # to reach a cluster
LOOK_S = 1.0  # how often a gateway looks for replicas that another server starts, and whether nodes are alive
QUIET = {"log_level": "WARNING", "enable_access_log": False}
PASSED_ON = ("ZOO_LOG", "ZOO_CACHE_DIR", "PYTHONPATH")  # variables of the gateway that replicas need


def build(arguments: dict[str, Any]) -> serve.Application:
    """Return the application for a configuration file, whose gateways are elsewhere in the cluster. Raises
    msgspec.ValidationError, ValueError."""
    settings = msgspec.convert(arguments, Settings)
    replicas = msgspec.structs.replace(settings.replicas, address=settings.replicas.address or "auto")
    return application(msgspec.structs.replace(settings, replicas=replicas))


def application(settings: Settings) -> serve.Application:
    """Return the application of all replicas. Each has an engine, with its own GPU if there are GPUs. Needs a
    connection to the cluster. Raises ValueError."""
    counts = bounded(*settings.replicas.counts, int(ray.cluster_resources().get("GPU", 0)))
    router = RequestRouterConfig(request_router_class="serving.cluster.router.SoonestRouter")
    deployment = serve.deployment(Replica).options(
        name=DEPLOYMENT,
        **number_of(*counts),
        ray_actor_options={**resources(settings, max(counts)), "runtime_env": {"env_vars": passed_on()}},
        max_ongoing_requests=MAX_OPEN,
        request_router_config=router,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        max_constructor_retry_count=2,
    )
    return deployment.bind(msgspec.json.encode(settings))


def bounded(least: int, most: int, num_gpus: int) -> tuple[int, int]:
    """Return the least and the most replicas, the latter known. Raises ValueError."""
    if most > 0:
        return least, most
    if num_gpus == 0:
        raise ValueError(
            "--replicas auto starts a replica for each GPU, and this cluster has none; give a range"
        )
    return least, num_gpus


def number_of(least: int, most: int) -> dict[str, Any]:
    """Return Serve's options for the number of replicas."""
    if least == most:
        return {"num_replicas": most}
    policy = AutoscalingPolicy(policy_function="serving.cluster.scaling:by_first_audio")
    # A replica takes a minute or two to be warm, so one that is not needed now ends late.
    scaling = AutoscalingConfig(
        min_replicas=least, max_replicas=most, policy=policy, upscale_delay_s=5.0, downscale_delay_s=600.0
    )
    return {"autoscaling_config": scaling}


def resources(settings: Settings, count: int) -> dict[str, float]:
    """Return the resources of one of `count` replicas: a GPU, or its share of all processors."""
    there = ray.cluster_resources()
    device = settings.model.device or ("cuda" if there.get("GPU", 0) else "cpu")
    if device.startswith("cuda"):
        return {"num_gpus": 1, "num_cpus": 1}
    share = there.get("CPU", 1) / count
    return {"num_cpus": int(share) if share >= 1 else round(share, 2)}


def passed_on() -> dict[str, str]:
    given = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {"GRPC_ENABLE_FORK_SUPPORT": "0", **given}  # otherwise it logs a line when the engine starts


def join(address: str | None) -> None:
    """Connect to a cluster and start Ray Serve there, without its HTTP proxies. None: start one on this
    machine, which ends with this process. Raises ConnectionError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a server does not report that it runs
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    if address not in (None, "auto"):
        check_listens(address)
    # On one machine nothing listens on the network.
    own = {"_node_ip_address": "127.0.0.1", "include_dashboard": False} if address is None else {}
    ray.init(address or "local", namespace="zoo", logging_level="WARNING", **own)
    serves_log = logging.getLogger("ray.serve")
    serves_log.setLevel(logging.WARNING)
    serves_log.addFilter(is_unexpected)
    serve.start(proxy_location="Disabled", logging_config=QUIET)


def check_listens(address: str) -> None:
    """Raises ConnectionError if nothing listens at HOST:PORT. Ray would try for minutes, with a warning each time."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConnectionError(f"no Ray cluster can be reached at {address}: {why}") from None


def is_unexpected(record: logging.LogRecord) -> bool:
    """Return False for Serve's error that a lost replica's places cannot be given back."""
    return record.msg != "Failed to release reserved replica slot."


def has_node() -> bool:
    """Return whether any node of the cluster is alive."""
    return any(node["Alive"] for node in ray.nodes())


def deploy(settings: Settings) -> bool:
    """Start the replicas unless they run already, and wait until they are ready. Return whether they were
    started. Raises RuntimeError, ValueError."""
    while settings.replicas.counts == (0, 0) and APPLICATION not in serve.status().applications:
        time.sleep(LOOK_S)
    if APPLICATION in serve.status().applications:
        return False
    serve.run(application(settings), name=APPLICATION, route_prefix=None, logging_config=QUIET)
    return True


@cache
def handle() -> DeploymentHandle[Replica]:
    """Return the handle of this process, whose router has the replicas from now on."""
    return serve.get_deployment_handle(DEPLOYMENT, APPLICATION).options()


def leave(is_ours: bool, is_local: bool) -> None:
    """Disconnect. A local cluster ends with that; in another one, replicas that this process started end."""
    if is_ours and not is_local:
        serve.delete(APPLICATION, _blocking=False)
    ray.shutdown()
