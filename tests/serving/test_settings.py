"""Every flag of `zoo serve` becomes a setting, and both processes get all settings."""

import msgspec
import pytest
from shell import zoo
from tiny_aligner import write

from serving import supervisor
from serving.cli import common, serve_flags
from serving.settings import EngineArguments, HTTPArguments, OnDemand, Settings

FLAGS = {
    "--host": "0.0.0.0",
    "--port": "0",
    "--no-playground": None,
    "--grace-s": "1",
    "--sentence-gap-s": "0.5",
    "--aligner-device": "cuda",
    "--otel": None,
    "--device": "cpu",
    "--dtype": "bfloat16",
    "--codec": "tf32",
    "--attention": "triton",
    "--depth": "whole",
    "--deterministic": None,
    "--no-compile": None,
    "--no-warm": None,
    "--alias": "other=m",
    "--alias-voice": "me=anna",
    "--strict": None,
    "--max-slots": "3",
    "--kv-memory": "1MiB",
    "--swap-memory": "2MiB",
    "--http-memory": "2GiB",
    "--reference-memory": "3MiB",
    "--policy": "fifo",
    "--max-ttfa": "7",
    "--no-async": None,
    "--replicas": "2-4",
    "--ray-address": "head:6379",
    "--max-waiting": "11",
    "--max-flex-wait": "10",
    "--max-unread": "12",
    "--max-stall": "13",
    "--max-text": "14",
    "--max-voices": "15",
    "--max-reference-bytes": "4MiB",
    "--max-reference-s": "16",
    "--max-reading": "17",
    "--max-sessions": "18",
    "--max-text-idle": "19",
    "--max-session-idle": "20",
    "--max-works": "21",
    "--max-document-bytes": "5MiB",
    "--max-works-bytes": "6GiB",
    "--api-key": "sk-a",
    "--weights": "int8",
    "--chunked": None,
    "--device-map": "auto",
    "--private-metrics": None,
    "--speech-urls": None,
    "--allow-url-references": None,
    "--reference-dir": ".",
    "--cors-origin": "https://a.example",
    "--allowed-host": "a.example",
}


@pytest.fixture
def started(monkeypatch):
    """started(*arguments) returns the settings and the environment that a command starts a server with."""

    def started(*arguments):
        calls = []
        monkeypatch.setattr(supervisor, "serve", lambda *given: calls.append(given) or 0)
        done = zoo("serve", *arguments)
        assert done.returncode == 0, done.stderr
        [(settings, env, _)] = calls
        return settings, env

    return started


def flat(settings):
    """Return the value of each setting by panel and name. Models on demand exclude other settings."""
    values = {}
    for name, value in msgspec.structs.asdict(settings).items():
        if name == "on_demand":
            continue
        if isinstance(value, msgspec.Struct):
            values |= {f"{name}.{inner}": v for inner, v in msgspec.structs.asdict(value).items()}
        else:
            values[name] = value
    return values


def test_each_flag_sets_one_setting_and_each_setting_has_a_flag(started, tmp_path, monkeypatch):
    monkeypatch.setattr(serve_flags, "find_spec", lambda name: "is installed")
    given = [part for flag, value in FLAGS.items() for part in (flag, value) if part is not None]
    words = tmp_path / "words.json"
    words.write_text("[]")
    keys = tmp_path / "keys.json"
    keys.write_text('[{"name": "a", "key": "b"}]')
    paths = ("--voices-dir", tmp_path / "v", "--pronunciations", words, "--api-keys", keys)
    paths += ("--works-dir", tmp_path / "w")
    paths += ("--aligner", write(tmp_path / "aligner"))
    settings, env = started(f"m={tmp_path}", *given, *paths)
    same = {name for name, value in flat(settings).items() if flat(Settings())[name] == value}
    assert not same, f"no flag has changed {same}"
    assert settings.models == {"m": str(tmp_path)} and env["ZOO_API_KEY"] == "sk-a"
    assert "sk-a" not in msgspec.json.encode(settings).decode()
    without_key = {name: value for name, value in FLAGS.items() if name != "--api-key"}
    assert len(flat(settings)) == len(without_key) + 1 + len(paths) // 2  # and the models


@pytest.mark.parametrize(
    ("flags", "on_demand"),
    [
        ([], OnDemand(300.0, 300.0, None)),
        (["--keep-alive", "0"], OnDemand(0.0)),
        (["--keep-alive", "0s"], OnDemand(0.0)),
        (["--keep-alive", "90"], OnDemand(90.0)),
        (["--keep-alive", "1h30m"], OnDemand(5400.0)),
        (["--keep-alive", "1.5m"], OnDemand(90.0)),
        (["--keep-alive", "250ms"], OnDemand(0.25)),
        (["--keep-alive", "-1"], OnDemand(None)),
        (["--keep-alive", "-1m"], OnDemand(None)),
        (["--keep-alive", "always"], OnDemand(None)),
        (["--load-wait", "20", "--model-memory", "4GiB"], OnDemand(300.0, 20.0, 4 << 30)),
    ],
)
def test_models_on_demand_are_the_directories_in_one(started, tmp_path, flags, on_demand):
    for name in ("b", "a", ".hidden"):
        (tmp_path / "models" / name).mkdir(parents=True)
    (tmp_path / "models" / "README.md").write_text("not a model")
    settings, _ = started("--model-dir", tmp_path / "models", *flags)
    assert settings.on_demand == on_demand
    assert settings.models == {name: str(tmp_path / "models" / name) for name in "ab"}
    assert supervisor.engine_process(settings) == ("gateway", "serving.on_demand.gateway_process")


def test_a_directory_without_directories_is_refused(tmp_path):
    done = zoo("serve", "--model-dir", tmp_path)
    assert done.returncode == 2 and "each model is a directory in it" in done.stderr


def test_two_amounts_of_reference_audio_are_not_mixed_up(started, tmp_path):
    settings, _ = started(tmp_path, "--reference-memory", "3MiB", "--max-reference-bytes", "4MiB")
    assert settings.memory.reference_memory_bytes == 3 << 20  # of all recordings that wait for their encoder
    assert settings.limits.reference_bytes == 4 << 20  # of one recording, as it is sent


@pytest.mark.parametrize(
    ("flags", "max_ttfa_s"),
    [
        ([], 10.0),
        (["--policy", "throughput"], None),
        (["--max-ttfa", "0"], None),
        (["--policy", "throughput", "--max-ttfa", "3"], 3.0),
    ],
)
def test_throughput_accepts_requests_however_long_they_wait(started, tmp_path, flags, max_ttfa_s):
    settings, _ = started(tmp_path, *flags)
    assert settings.latency.max_ttfa_s == max_ttfa_s


def test_host_names_are_those_that_were_given(started, tmp_path):
    """The guard adds localhost and IP addresses on every address."""
    settings, _ = started(tmp_path, "--allowed-host", "a")
    assert settings.security.allowed_hosts == ("a",)


def test_a_model_from_the_hub_is_also_served_under_its_whole_name(started, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "resolved", lambda model: str(tmp_path))
    settings, _ = started("org/name@main", "b=org/other", tmp_path, "--alias", "org/other=name")
    assert settings.aliases.models == {"org/name": "name", "org/other": "name"}  # an alias goes first
    assert list(settings.models) == ["name", "b", tmp_path.name]


def test_swap_memory_may_be_zero(started, tmp_path):
    assert started(tmp_path, "--swap-memory", "0")[0].memory.swap_memory_bytes == 0


@pytest.mark.parametrize(
    "arguments", [EngineArguments(Settings(), "s", 3), HTTPArguments(Settings(), "s", 4, 3)]
)
def test_a_child_reads_the_arguments_that_the_supervisor_wrote(arguments):
    *_, text = supervisor.command("m", arguments)
    assert msgspec.json.decode(text, type=type(arguments)) == arguments


@pytest.mark.parametrize(
    ("given", "counts"), [("1", (1, 1)), ("3", (3, 3)), ("1-4", (1, 4)), ("auto", (1, 0)), ("1-1", (1, 1))]
)
def test_replicas_are_a_number_or_a_range(started, tmp_path, monkeypatch, given, counts):
    monkeypatch.setattr(serve_flags, "find_spec", lambda name: "is installed")
    settings, _ = started(tmp_path, "--replicas", given)
    assert settings.replicas.counts == counts and settings.replicas.are_on_ray == (counts != (1, 1))


@pytest.mark.parametrize("given", ["0", "-1", "4-2", "0-2", "2-0", "1-", "x", "٣"])
def test_a_wrong_number_of_replicas_is_refused(tmp_path, given):
    done = zoo("serve", tmp_path, f"--replicas={given}")
    assert done.returncode == 2 and "--replicas" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("flags", [["--replicas", "2"], ["--ray-address", "auto"]])
def test_without_ray_several_replicas_are_refused_with_what_to_install(tmp_path, monkeypatch, flags):
    monkeypatch.setattr(serve_flags, "find_spec", lambda name: None)
    done = zoo("serve", tmp_path, *flags)
    assert done.returncode == 2 and "pip install -e '.[ray]'" in done.stderr
