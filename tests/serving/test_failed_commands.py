"""Commands that fail leave nothing that looks complete, and print nothing but why."""

import json
import os
import shutil

import numpy as np
import pytest
import shell

import zoo
from compile_cache.artifacts import place, write_manifest
from serving.__main__ import main
from serving.cli.chat import Growing
from serving.cli.common import progress_bar
from serving.cli.serve_flags import Security


def test_a_demo_checkpoint_on_a_full_disk_leaves_no_part(tmp_path, monkeypatch):
    def full(directory, **_):
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text("{}")
        raise OSError("128 requested and 0 written")  # numpy's, which has no number

    monkeypatch.setattr(zoo.families()["qwen3_tts"], "write_demo", full)
    (empty := tmp_path / "empty").mkdir()
    for directory in (tmp_path / "new", empty):
        done = shell.zoo("demo-checkpoint", "qwen3_tts", directory)
        says = f"zoo: {directory} cannot be written: 128 requested and 0 written\n"
        assert (done.returncode, done.stderr) == (2, says)
    assert list(tmp_path.iterdir()) == [empty] and not list(empty.iterdir())


def test_a_log_gets_no_line_of_a_progress_bar(capsys):
    with progress_bar("a model") as advance:
        advance(0.5, "warming")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--reference-text", "Hello."], "--reference-text needs the recording"),
        (["--aligner", "."], "--aligner finds the words of subtitles"),
    ],
)
def test_a_flag_without_effect_is_refused(tmp_path, flags, says):
    done = shell.zoo("say", "Hello.", "-o", tmp_path / "out.wav", *flags)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-unread", "inf"], "--max-unread must be a finite number of seconds"),
        (["--max-stall", "inf"], "--max-stall must be"),
        (["--max-text-idle", "inf"], "--max-text-idle must be"),
        (["--max-session-idle", "inf"], "--max-session-idle must be"),
        (["--model-dir", "zoo", "--load-wait", "inf"], "--load-wait must be a finite number of seconds"),
        (["--cors-origin", "a.example"], "'a.example' is not an origin; use https://HOST"),
        (["--cors-origin", "https://a.example/"], "without a path"),
        (["--allowed-host", "https://a.example"], "is not a host name; use a name such as zoo.example.com"),
        (["--allowed-host", "a.example:8000"], "without a scheme or a port"),
        (["--allowed-host", ""], "'' is not a host name"),
        (["--aligner-device", "cuda"], "--aligner-device needs --aligner"),
        (["--http-memory", "1"], "--http-memory 1 holds no recording; give 12MiB or more"),
        (["--ray-address", "foo"], "--ray-address 'foo' is not the address of a cluster; use HOST:PORT"),
        (["--ray-address", ""], "use HOST:PORT, such as 10.0.0.1:6379, or auto"),
    ],
)
def test_a_server_refuses_a_flag_that_could_not_work(flags, says, monkeypatch):
    monkeypatch.setattr("serving.supervisor.serve", lambda *_: 0)
    done = shell.zoo("serve", *flags)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done


def test_sites_and_host_names_are_compared_without_case():
    security = Security(
        cors_origins=["HTTPS://A.Example:1", "*", "null"], allowed_hosts=["Zoo", "*"]
    ).settings()
    assert security.cors_origins == ("https://a.example:1", "*", "null")
    assert security.allowed_hosts == ("zoo", "*")


def test_an_interrupt_while_a_package_defines_a_class_is_quiet(monkeypatch):
    """Python 3.11 raises RuntimeError for any error in `__set_name__`."""

    def interrupted(*_):
        raise RuntimeError("Error calling __set_name__ on 'Field' instance") from KeyboardInterrupt()

    monkeypatch.setattr("zoo.inspect", interrupted)
    done = shell.zoo("inspect")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")

    def wrong(*_):
        raise RuntimeError("a mistake of ours") from OSError()

    monkeypatch.setattr("zoo.inspect", wrong)
    monkeypatch.setattr("sys.argv", ["zoo", "inspect"])
    with shell.same_log(), pytest.raises(RuntimeError, match="a mistake of ours"):
        main()


@pytest.mark.parametrize("is_foreign", [True, False])
def test_an_import_of_another_machines_code_says_so(tmp_path, is_foreign):
    *_, versions, target, name = place("model", "1").parts
    target = "x86_64-of-another-machine" if is_foreign else target
    made = tmp_path / "there" / "compiled" / versions / target / name
    made.mkdir(parents=True)
    write_manifest(made)
    archive = tmp_path / "compiled.tar"
    shell.zoo("cache", "export", archive, "--cache-dir", tmp_path / "there")
    done = shell.zoo("cache", "import", archive, "--cache-dir", tmp_path / "here")
    assert done.returncode == 0 and "1 new entry" in done.stdout
    assert ("none of them is for this machine" in done.stderr) == is_foreign


def test_a_full_disk_ends_a_chat_with_one_line_and_without_a_half_answer(tmp_path, capsys):
    answer = Growing(tmp_path / "answer-1.wav", "wav", 16_000)
    answer.write(np.zeros(100, np.float32))
    answer.file.close()
    with open("/dev/full", "wb", buffering=0) as answer.file, pytest.raises(SystemExit) as end:
        answer.write(np.zeros(100, np.float32))
    says = f"zoo: {tmp_path}/answer-1.wav cannot be written: No space left on device\n"
    assert (end.value.code, capsys.readouterr().err) == (1, says)
    assert not list(tmp_path.iterdir())


def test_inspect_says_that_a_file_is_damaged_and_still_shows_the_rest(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(zoo.SMALL_VOICE, model)
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    done = shell.zoo("inspect", model, "--json")
    problem = f"{weights} is not a whole safetensors file"
    assert done.returncode == 1 and done.stderr.startswith(f"zoo: {problem}"), done
    facts = json.loads(done.stdout)
    assert facts["family"] == "qwen3_tts" and facts["memory"]["unknown"].startswith(problem)
