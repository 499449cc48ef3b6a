"""An entry of the compile cache is complete, or it is made again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from compile_cache import store
from compile_cache.artifacts import MANIFEST, meaning, opened


def make(place: Path, content: bytes = b"machine code") -> bool:
    """Open the entry, and make it if needed. Returns whether it already existed."""
    with opened(place) as entry:
        if not entry.is_found:
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(entry.directory)
            (entry.directory / "a").mkdir()
            (entry.directory / "a" / "kernel.so").write_bytes(content)
            (entry.directory / "step.saved").write_bytes(content)
        assert (entry.directory / "a" / "kernel.so").read_bytes() == content
        return entry.is_found


@pytest.fixture(name="place")
def _place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    return tmp_path / "compiled" / "torch" / "cpu" / "model-1234"


def test_an_entry_is_made_once_and_found_after_that(place, capfd):
    assert [make(place), make(place)] == [False, True]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    assert [file.name for file in place.parent.iterdir() if file.is_dir()] == [place.name]
    assert place.stat().st_mode & 0o077 == 0 and capfd.readouterr().err == ""


DAMAGE = {
    "a library is cut off": lambda place: os.truncate(place / "a" / "kernel.so", 3),
    "a library is empty": lambda place: os.truncate(place / "a" / "kernel.so", 0),
    "a byte has changed": lambda place: (place / "a" / "kernel.so").write_bytes(b"machine cope"),
    "a library is missing": lambda place: (place / "a" / "kernel.so").unlink(),
    "the step is missing": lambda place: (place / "step.saved").unlink(),
    "the step is a directory": lambda place: (
        (place / "step.saved").unlink(),
        (place / "step.saved").mkdir(),
    ),
    "the manifest is missing": lambda place: (place / MANIFEST).unlink(),
    "the manifest is empty": lambda place: os.truncate(place / MANIFEST, 0),
    "the manifest is cut off": lambda place: os.truncate(place / MANIFEST, 30),
    "the manifest is not text": lambda place: (place / MANIFEST).write_bytes(b"\xff\xfe{"),
    "the manifest is a list": lambda place: (place / MANIFEST).write_text("[]"),
    "the manifest lists numbers": lambda place: (place / MANIFEST).write_text('{"files": [1]}'),
    "the entry is a file": lambda place: (store.remove(place), place.write_text("")),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_entry_is_made_again_with_a_warning(kind, place, capfd):
    make(place)
    DAMAGE[kind](place)
    assert not make(place, b"new")
    said = capfd.readouterr().err
    assert said.startswith(f"zoo: compiled code in {place} is damaged (") and said.count("\n") == 1
    assert make(place, b"new") and capfd.readouterr().err == ""


def test_a_library_that_is_not_in_the_manifest_is_removed(place):
    make(place)
    (place / "late.so").write_bytes(b"half")
    assert make(place) and not (place / "late.so").exists()


def test_an_entry_whose_making_fails_does_not_exist(place):
    with pytest.raises(RuntimeError), opened(place):
        raise RuntimeError("the compiler failed")
    assert not place.exists() and not make(place) and make(place)


KILLED = """
import sys, time
from pathlib import Path
from compile_cache.artifacts import opened
with opened(Path(sys.argv[1])) as entry:
    (entry.directory / "half.so").write_bytes(b"half")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_the_remains_of_a_killed_process_are_dropped(place, capfd):
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(place)], stdout=subprocess.PIPE)
    assert killed.stdout is not None and killed.stdout.readline() == b"ready\n"
    assert store.prune(place.parents[2], max_bytes=0) == []  # the process still makes it
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not make(place) and make(place) and not list(place.rglob("half.so"))


def test_others_wait_for_the_process_that_makes_an_entry(place):
    begun, found = threading.Event(), []

    def second() -> None:
        begun.wait()
        found.append(make(place))

    waiting = threading.Thread(target=second)
    waiting.start()
    with opened(place) as entry:
        begun.set()
        (entry.directory / "a").mkdir()
        (entry.directory / "a" / "kernel.so").write_bytes(b"machine code")
    waiting.join()
    assert found == [True]


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot hold compiled code"), opened(tmp_path / "file" / "entry"):
        pass


def test_comments_do_not_change_the_meaning_of_a_file_and_numbers_do():
    plain = meaning(b"def f(x):\n    return x + 1\n\nclass A:\n    y = 2\n")
    commented = b"# why\n\ndef f(x):  # what\n\n    return x + 1\n\n\nclass A:\n    y = (2)\n"
    assert meaning(commented) == plain != meaning(b"def f(x):\n    return x + 2\n\nclass A:\n    y = 2\n")
    assert meaning(b'def f():\n    "one"\n    return 1\n') == meaning(b'def f():\n    "two"\n    return 1\n')


def root_with(place: Path, *ages_days: float) -> Path:
    """Make entries of about 200 bytes each that were last read this many days ago. Returns the root."""
    now_s = place.parents[3].stat().st_mtime
    for days in ages_days:
        make(place.with_name(f"model-{days}"))
        os.utime(place.with_name(f"model-{days}"), (now_s - days * store.DAY_S,) * 2)
    return place.parents[2]


def names(entries: list[store.Stored]) -> list[str]:
    return [entry.place.name for entry in entries]


def test_pruning_drops_old_entries_and_then_the_oldest_until_the_rest_fits(place):
    root = root_with(place, 1, 5, 30, 100)
    assert names(store.stored(root)) == ["model-1", "model-5", "model-30", "model-100"]
    assert names(store.prune(root)) == ["model-100"]
    size = store.stored(root)[0].num_bytes
    assert names(store.prune(root, max_bytes=2 * size + 1)) == ["model-30"]
    with opened(place.with_name("model-1")):
        assert names(store.prune(root, max_bytes=0)) == ["model-5"]  # the other one is being read
    assert names(store.stored(root)) == ["model-1"]


def test_an_exported_cache_can_be_imported_elsewhere(place, tmp_path):
    root = root_with(place, 1, 2)
    os.truncate(place.with_name("model-2") / "step.saved", 1)
    there = tmp_path / "there" / "compiled"
    assert len(store.export(root, tmp_path / "cache.tar")) == 1
    assert [name.name for name in store.take_in(there, tmp_path / "cache.tar")] == ["model-1"]
    assert make(there / "torch" / "cpu" / "model-1")
    assert store.take_in(there, tmp_path / "cache.tar") == []
    assert {path.name for path in there.iterdir()} == {"torch"}


def test_a_file_that_is_not_an_exported_cache_is_refused(place, tmp_path):
    (tmp_path / "cache.tar").write_bytes(b"no tar")
    with pytest.raises(ValueError, match="is not an exported cache"):
        store.take_in(tmp_path / "there", tmp_path / "cache.tar")
    root = root_with(place, 1)
    manifest = place.with_name("model-1") / MANIFEST
    listed = json.loads(manifest.read_text())
    store.export(root, tmp_path / "cache.tar")
    assert listed["files"].keys() == {"a/kernel.so", "step.saved"}
    assert list(tmp_path.glob("there/*")) == []
