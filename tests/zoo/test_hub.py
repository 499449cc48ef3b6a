"""Models named by their repository on the Hugging Face Hub. These tests do not use the network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects
from models import directory

import zoo
from zoo.hub import (
    IGNORED,
    ONE_MODEL,
    ORIGINAL,
    TRANSFORMERS_INDEX,
    cached_directory,
    local_directory,
    name_of,
    repository_of,
    resolved,
    split_adapter,
)

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESPONSE = httpx2.Response(404, request=httpx2.Request("GET", "https://huggingface.co/api/models/org/name"))


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[tuple[str, str | None]]:
    """Return the list of requested repositories and revisions. Each download gives an empty directory."""
    calls = []

    def snapshot_download(repository: str, *, revision: str | None, **patterns: list[str]) -> str:
        if patterns != {"allow_patterns": [TRANSFORMERS_INDEX]}:
            assert patterns == {"ignore_patterns": IGNORED}
            calls.append((repository, revision))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_weights_that_a_repository_holds_twice_are_fetched_once(monkeypatch, tmp_path):
    asked = []

    def snapshot_download(repository: str, *, revision: str | None, **patterns: list[str]) -> str:
        asked.append(patterns)
        (tmp_path / TRANSFORMERS_INDEX).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert local_directory("sesame/csm-1b") == tmp_path
    last = {"ignore_patterns": [*IGNORED, "model.safetensors", "ckpt.pt"]}
    assert asked == [{"allow_patterns": [TRANSFORMERS_INDEX]}, last]


def test_of_a_repository_with_several_models_one_is_fetched(monkeypatch, tmp_path):
    """ResembleAI/chatterbox has Chatterbox Multilingual, too: gigabytes that the English model never reads."""
    asked = []

    def snapshot_download(repository: str, *, revision: str | None, **patterns: list[str]) -> str:
        asked.append((repository, revision, patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert local_directory("ResembleAI/chatterbox@v1") == tmp_path
    files = ONE_MODEL["ResembleAI/chatterbox"]
    assert asked == [("ResembleAI/chatterbox", "v1", {"allow_patterns": files})]


def test_the_files_that_are_fetched_of_one_model_are_all_that_it_reads(tmp_path):
    for name in ONE_MODEL["ResembleAI/chatterbox"]:
        shutil.copy(directory("chatterbox", "tiny") / name, tmp_path / name)
    spec = zoo.load(tmp_path, "cpu").spec
    assert (spec.variant, spec.voices) == ("english", ("default",))


def test_large_files_that_no_family_reads_are_not_fetched():
    """Their names are those of FunAudioLLM/CosyVoice2-0.5B, ResembleAI/chatterbox, and what a trainer saves."""
    read = ("llm.pt", "campplus.onnx", "CosyVoice-BlankEN/vocab.json", "t3_cfg.safetensors", "conds.pt")
    unread = (
        "CosyVoice-BlankEN/model.safetensors",
        "speech_tokenizer_v2.batch.onnx",
        "flow.decoder.estimator.fp32.onnx",
        "t3_cfg.pt",
        "optimizer.pt",
        "optimizer_0/__0_0.distcp",
        "rng_state_0.pth",
    )
    fetched = filter_repo_objects([*read, *unread], ignore_patterns=IGNORED)
    assert tuple(fetched) == read


def test_recordings_of_voices_are_fetched():
    """Of sesame/csm-1b, without the weights that it holds twice."""
    voices = ["prompts/conversational_a.wav", "prompts/read_speech_d.wav"]
    assert [*filter_repo_objects(voices, ignore_patterns=[*IGNORED, *ORIGINAL])] == voices


def refused(model: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        local_directory(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "repository", "revision"),
    [
        ("Qwen/Qwen3-TTS-12Hz-0.6B-Base", "Qwen/Qwen3-TTS-12Hz-0.6B-Base", None),
        ("openbmb/VoxCPM1.5@v1.0", "openbmb/VoxCPM1.5", "v1.0"),
        (f"org/name@{COMMIT}", "org/name", COMMIT),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
    ],
)
def test_a_repository_is_fetched(model, repository, revision, asked, tmp_path):
    assert local_directory(model) == tmp_path
    assert asked == [(repository, revision)]
    assert name_of(model) == repository.partition("/")[2] and repository_of(model) == repository


def test_a_directory_is_not_fetched(asked, tmp_path, monkeypatch):
    """A directory is not fetched even if its name looks like a repository."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name@main").mkdir(parents=True)
    for model in ("org/name@main", Path("org/name@main"), ".", str(tmp_path)):
        assert local_directory(model) == Path(model)
    assert name_of("org/name@main") == "name@main" and name_of(".") == tmp_path.name
    assert repository_of("org/name@main") is None and repository_of(".") is None
    assert asked == []


@pytest.mark.parametrize(
    "model",
    ["/no/such", "./org/name", "../name", "name", "a/b/c", "org/name@", "org/na me", "org/näme", "~/x"],
)
def test_a_name_that_is_neither_directory_nor_repository_is_refused(model, asked):
    refused(
        model,
        "is not a directory; a model is a directory, or a repository ORG/NAME or ORG/NAME@REVISION of the",
    )
    assert asked == []


def test_a_file_is_not_a_repository(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model.safetensors").write_bytes(b"")
    refused("org/model.safetensors", "'org/model.safetensors' is not a directory; a model is")
    assert asked == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            errors.RepositoryNotFoundError("404\nmore", response=RESPONSE),
            "'org/name' is neither a directory nor a repository of the",
        ),
        (
            errors.GatedRepoError("403\nmore", response=RESPONSE),
            r"org/name is gated: accept its terms at huggingface.co/org/name, then run `hf",
        ),
        (
            errors.RevisionNotFoundError("404\nmore", response=RESPONSE),
            "org/name has no revision 'v2' on the Hugging Face Hub",
        ),
        (
            errors.LocalEntryNotFoundError("no snapshot\nmore"),
            "and is not complete in the Hugging Face cache, and .* fetched: no snapshot$",
        ),
        (
            errors.HfHubHTTPError("500 Server Error\nmore", response=RESPONSE),
            "'org/name' cannot be fetched: 500 Server Error$",
        ),
        (
            httpx2.ReadTimeout("The read operation timed out"),
            "'org/name' cannot be fetched: The read operation timed out$",
        ),
        (
            OSError(28, "No space left on device"),
            r"'org/name' cannot be fetched: \[Errno 28\] No space left on device$",
        ),
        (RuntimeError(""), "'org/name' cannot be fetched: RuntimeError$"),
        (
            errors.HFValidationError("Cannot have -- or .. in repo_id: 'org/na--me'."),
            "Cannot have -- or .. in repo_id",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_a_failed_download_gives_a_one_line_error(error, message, monkeypatch):
    def snapshot_download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    refused("org/name@v2", message)


def test_every_entry_point_accepts_a_repository(asked, tmp_path):
    shutil.copytree(directory("qwen3_tts", "tiny"), tmp_path, dirs_exist_ok=True)
    assert zoo.find("org/name") == (zoo.families()["qwen3_tts"], tmp_path)
    assert zoo.inspect("org/name@v1")["family"] == "qwen3_tts"
    assert zoo.load("org/name", "cpu").spec.family == "qwen3_tts"
    assert asked == [("org/name", None), ("org/name", "v1"), ("org/name", None)]


def cached(home: Path) -> Path:
    """Write a snapshot in the layout of huggingface_hub: `main` is a file with the commit's name."""
    repository = home / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return shutil.copytree(directory("qwen3_tts", "tiny"), repository / "snapshots" / COMMIT)


def test_a_cached_repository_is_found_and_another_one_is_not_fetched(tmp_path, monkeypatch):
    """OpusLM uses a copy of XEUS, which has another licence, only if the user downloaded it."""
    real = huggingface_hub.snapshot_download

    def snapshot_download(repository: str, **how: bool) -> str:
        assert how == {"local_files_only": True}
        return real(repository, cache_dir=tmp_path / "hub", **how)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert cached_directory("org/name") is None
    snapshot = cached(tmp_path)
    assert cached_directory("org/name") == snapshot and cached_directory("org/other") is None


def offline(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a new process, because huggingface_hub reads its variables on import."""
    env = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        env.pop(name, None)
    command = [sys.executable, "-m", "serving", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=60)


@pytest.mark.parametrize("model", ["org/name", "org/name@main", f"org/name@{COMMIT}"])
def test_offline_from_the_cache(model, tmp_path, monkeypatch):
    snapshot = cached(tmp_path)
    script = f"from zoo.hub import local_directory; print(local_directory({model!r}))"
    env = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=env, timeout=60
    )
    assert done.stdout == f"{snapshot}\n", done.stderr


@pytest.mark.slow
def test_offline_by_the_command_line(tmp_path):
    cached(tmp_path)
    done = offline(tmp_path, "inspect", "org/name", "--json")
    assert done.returncode == 0 and '"family": "qwen3_tts"' in done.stdout, done.stderr
    for model in ("org/other", "org/name@v2"):
        done = offline(tmp_path, "serve", model)
        repository = model.partition("@")[0]
        expected = f"zoo: '{repository}' is not a directory and is not complete in the Hugging Face cache"
        assert done.returncode == 2 and done.stderr.startswith(expected) and done.stderr.count("\n") == 1, (
            done.stderr
        )
        assert "HF_HUB_OFFLINE" in done.stderr


def test_the_package_is_imported_without_torch_and_without_the_hub():
    script = "import sys, zoo; zoo.families(); print({'torch', 'huggingface_hub'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == "set()\n"


def test_a_server_names_a_repository_by_its_own_name(asked):
    from serving.cli.common import named_directories

    assert list(named_directories(["org/name@v1", "other=org/name"])) == ["name", "other"]


def test_a_model_may_have_an_adapter(tmp_path):
    model, adapter = tmp_path / "model", tmp_path / "anna"
    both = f"{model}+{adapter}"
    for path in (model, adapter):
        path.mkdir()
    assert split_adapter(both) == (str(model), adapter)
    assert resolved(both) == both and name_of(both) == "model+anna"
    assert split_adapter(model) == (str(model), None)
    with pytest.raises(ValueError, match="'nobody' is not a directory; a model with an adapter is MODEL"):
        resolved(f"{model}+nobody")


def test_a_directory_with_a_plus_in_its_name_is_a_model(tmp_path):
    model = tmp_path / "c++"
    model.mkdir()
    assert split_adapter(model) == (str(model), None) and name_of(str(model)) == "c++"
