"""The manifests in ops/kubernetes/ fit together, and agree with the server's settings and flags."""

import shutil
import subprocess

import msgspec
import pytest
import yaml
from shell import ROOT, zoo

from serving import supervisor
from serving.cli import serve_flags
from serving.settings import Settings

FOLDER = ROOT / "ops" / "kubernetes"


def documents():
    """Return all resources by kind and name."""
    files = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert {*files, "kustomization.yaml"} == {path.name for path in FOLDER.iterdir()}
    found = [each for name in files for each in yaml.safe_load_all((FOLDER / name).read_text())]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def application():
    config = yaml.safe_load(documents()["RayService", "zoo"]["spec"]["serveConfigV2"])
    [application] = config["applications"]
    return application


def pods():
    """Return the pod templates by what they run."""
    cluster = documents()["RayService", "zoo"]["spec"]["rayClusterConfig"]
    [workers] = cluster["workerGroupSpecs"]
    gateway = documents()["Deployment", "zoo-gateway"]["spec"]
    found = {
        "head": cluster["headGroupSpec"]["template"],
        "worker": workers["template"],
        "gateway": gateway["template"],
    }
    assert gateway["selector"]["matchLabels"].items() <= gateway["template"]["metadata"]["labels"].items()
    return found


@pytest.mark.parametrize("name", ["head", "worker", "gateway"])
def test_pods_are_not_root_and_are_members_of_the_network_policy(name):
    pod = pods()[name]
    assert pod["metadata"]["labels"]["app.kubernetes.io/part-of"] == "speechzoo"
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    for container in pod["spec"]["containers"]:
        assert container["image"] == "speechzoo"
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("name", ["worker", "gateway"])
def test_volumes_that_are_mounted_exist(name):
    spec = pods()[name]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    [container] = spec["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in volumes.values()
        if "emptyDir" not in volume
    }
    assert claims <= {name for kind, name in documents() if kind == "PersistentVolumeClaim"}


def test_replicas_are_given_settings_that_exist():
    arguments = application()["args"]
    settings = msgspec.convert(arguments, Settings)
    mounts = [mount["mountPath"] for mount in pods()["worker"]["spec"]["containers"][0]["volumeMounts"]]
    assert settings.voices_dir in mounts
    assert all(any(path.startswith(f"{mount}/") for mount in mounts) for path in settings.models.values())
    [workers] = documents()["RayService", "zoo"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert settings.replicas.counts == (workers["minReplicas"], workers["maxReplicas"])


def test_the_import_path_is_the_applications():
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
    from serving.cluster import deployment

    assert application()["import_path"] == f"{deployment.__name__}:{deployment.build.__name__}"
    assert application()["name"] == deployment.APPLICATION
    grace_s = pods()["worker"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > deployment.DRAIN_S


@pytest.mark.parametrize("name", ["head", "worker"])
def test_members_of_the_cluster_are_probed_where_they_answer_without_a_token(name):
    agent = pytest.importorskip(
        "ray.dashboard.http_server_agent", reason="needs Ray: pip install -e '.[ray]'"
    )
    from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT

    [container] = pods()[name]["spec"]["containers"]
    for probe in ("readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert (
            asked["path"] in agent.PUBLIC_EXACT_PATHS and asked["port"] == DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
        )


def test_the_head_sends_no_statistics():
    [container] = pods()["head"]["spec"]["containers"]
    assert {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"} in container["env"]


def test_gateways_join_the_cluster_with_flags_that_exist(monkeypatch):
    """They start no replicas of their own, and find the voices where the replicas do."""
    [container] = pods()["gateway"]["spec"]["containers"]
    [script] = container["args"]
    _, start, line = script.strip().splitlines()
    assert start.split()[:3] == ["ray", "start", "--address=zoo-head-svc:6379"]
    calls = []
    monkeypatch.setattr(supervisor, "serve", lambda settings, *_: calls.append(settings) or 0)
    monkeypatch.setattr(serve_flags, "find_spec", lambda name: "is installed")
    done = zoo(*line.split()[2:])
    assert done.returncode == 0, done.stderr
    [settings] = calls
    assert settings.replicas.counts == (0, 0) and settings.voices_dir == application()["args"]["voices_dir"]
    assert pods()["gateway"]["spec"]["terminationGracePeriodSeconds"] > settings.grace_s
    routes = [container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("readiness", "liveness")]
    assert routes == ["/ready", "/health"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_accepts_the_folder():
    done = subprocess.run(["kubectl", "kustomize", FOLDER], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
