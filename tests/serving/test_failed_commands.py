"""Commands that fail leave nothing that looks complete, and print nothing but why."""

import shell

import zoo
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
