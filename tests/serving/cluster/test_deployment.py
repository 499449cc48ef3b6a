"""The replicas' settings for Ray Serve, without a cluster."""

import asyncio
import socket
from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")

from serving.cluster import deployment, gateway_process
from serving.cluster.router import SoonestRouter
from serving.cluster.scaling import BUSY, FIRST_AUDIO, by_first_audio
from serving.settings import ModelOptions, Replicas, Settings

pytestmark = pytest.mark.ray


@pytest.fixture
def cluster(monkeypatch):
    """cluster(CPU=..., GPU=...) sets what the cluster has."""
    return lambda **there: monkeypatch.setattr(deployment.ray, "cluster_resources", lambda: there)


def test_each_replica_has_a_gpu_where_there_are_some(cluster):
    cluster(CPU=64.0, GPU=8.0)
    assert deployment.resources(Settings(), 4) == {"num_gpus": 1, "num_cpus": 1}
    on_cpu = Settings(model=ModelOptions(device="cpu"))
    assert deployment.resources(on_cpu, 4) == {"num_cpus": 16}


@pytest.mark.parametrize(("count", "share"), [(1, 2), (2, 1), (3, 0.67)])
def test_replicas_without_a_gpu_share_the_processors(cluster, count, share):
    cluster(CPU=2.0)
    assert deployment.resources(Settings(), count) == {"num_cpus": share}


def test_auto_means_one_to_as_many_as_there_are_gpus():
    assert deployment.bounded(1, 0, num_gpus=8) == (1, 8)
    assert deployment.bounded(2, 3, num_gpus=8) == (2, 3)
    with pytest.raises(ValueError, match="has none"):
        deployment.bounded(1, 0, num_gpus=0)


def test_a_range_scales_by_first_audio_within_its_bounds():
    assert deployment.number_of(3, 3) == {"num_replicas": 3}
    scaling = deployment.number_of(1, 4)["autoscaling_config"]
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)
    assert scaling.policy.get_policy().__name__ == by_first_audio.__name__
    figures = {FIRST_AUDIO: {"a": 3.0, "b": 2.0}, BUSY: {"a": 1.0, "b": 1.0}}
    context = SimpleNamespace(target_num_replicas=2, aggregated_metrics=figures)
    assert by_first_audio(context)[0] == 3
    assert by_first_audio(SimpleNamespace(target_num_replicas=2, aggregated_metrics=None))[0] == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_cluster_that_cannot_be_reached_is_an_error_at_once(host, monkeypatch):
    monkeypatch.setattr(deployment.ray, "init", lambda *_, **__: pytest.fail("Ray would try for minutes"))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # no other process gets the port, and none listens there
        port = closed.getsockname()[1]
        with pytest.raises(ConnectionError, match=f"no Ray cluster can be reached at {host}:{port}: "):
            deployment.join(f"{host}:{port}")


def test_a_cluster_that_listens_is_joined(monkeypatch):
    joined = []
    monkeypatch.setattr(deployment.ray, "init", lambda address, **_: joined.append(address))
    monkeypatch.setattr(deployment.serve, "start", lambda **_: None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        deployment.join(address)
    assert joined == [address]


def test_a_gateway_ends_when_its_own_cluster_has_no_node_left(monkeypatch, capfd):
    nodes = [[{"Alive": True}], [{"Alive": True}, {"Alive": False}], [{"Alive": False}]]
    ended = []
    monkeypatch.setattr(deployment, "LOOK_S", 0)
    monkeypatch.setattr(deployment.ray, "nodes", lambda: nodes.pop(0))
    monkeypatch.setattr(gateway_process.os, "_exit", ended.append)
    asyncio.run(gateway_process.end_if_lost())
    assert (ended, nodes) == ([1], []) and "zoo: Ray's process for this machine" in capfd.readouterr().err


def test_a_configuration_file_has_the_fields_of_the_settings(cluster):
    cluster(CPU=2.0)
    application = deployment.build({"voices_dir": "/voices", "replicas": {"counts": [2, 2]}})
    bound = application._bound_deployment
    [given] = bound.init_args
    settings = msgspec.json.decode(given, type=Settings)
    # Gateways are elsewhere in the cluster, so replicas listen on the network.
    assert settings == Settings(voices_dir="/voices", replicas=Replicas((2, 2), "auto"))
    assert bound.num_replicas == 2
    with pytest.raises(msgspec.ValidationError, match="voice_dir"):
        deployment.build({"voice_dir": "/voices"})


def test_serve_gets_our_router(cluster):
    """Serve copies it; the copy must find the gateway's table, which is in a module that is not copied."""
    cluster(CPU=2.0)
    application = deployment.application(Settings(replicas=Replicas((2, 2))))
    config = application._bound_deployment._deployment_config.request_router_config
    copied = config.get_request_router_class()
    assert copied.__name__ == SoonestRouter.__name__
    from serving.cluster import table

    assert copied.choose_replicas.__globals__["table"] is table
