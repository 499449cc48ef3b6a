"""Commands that fail leave nothing that looks complete, and print nothing but why."""

import json
import os
import shutil

import numpy as np
import pytest
import shell

import zoo
from serving.cli.chat import Growing
from serving.cli.common import progress_bar


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
