"""An entry of the compile cache is complete, or it is made again."""

from __future__ import annotations

import ast
import fcntl
import gzip
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from compile_cache import artifacts, ownership, processor, store
from compile_cache.artifacts import MANIFEST, opened
from compile_cache.saved import taken
from compile_cache.source import meaning


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
    return tmp_path / "compiled" / "torch-2-python-3" / "cpu" / "model-1234"


def test_an_entry_is_made_once_and_found_after_that(place, capfd):
    assert [make(place), make(place)] == [False, True]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    assert [file.name for file in place.parent.iterdir() if file.is_dir()] == [place.name]
    assert place.stat().st_mode & 0o077 == 0 and capfd.readouterr().err == ""


def test_the_cache_lies_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("ZOO_CACHE_DIR", str(tmp_path / "variable"))
    assert artifacts.root_directory() == tmp_path / "variable" / "compiled"
    assert artifacts.root_directory(tmp_path / "flag") == tmp_path / "flag" / "compiled"
    monkeypatch.setenv("ZOO_CACHE_DIR", "")
    assert artifacts.root_directory() == Path.home() / ".cache" / "speechzoo" / "compiled"


def test_a_cpu_has_an_entry_for_each_environment(monkeypatch):
    """The key of a library has the paths of the headers, so it is not found from another environment."""

    def places(device: str) -> set[Path]:
        here = artifacts.place("model", "1234", device)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "__file__", "/another/torch/__init__.py")
            return {here, artifacts.place("model", "1234", device)}

    assert len(places("cpu")) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert len(places("cuda")) == 1


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
    assert said.startswith(f"zoo: compiled code in {place} cannot be used (") and said.count("\n") == 1
    assert make(place, b"new") and capfd.readouterr().err == ""


def test_a_library_that_is_not_in_the_manifest_is_removed(place):
    make(place)
    (place / "late.so").write_bytes(b"half")
    assert make(place) and not (place / "late.so").exists()


def test_a_library_that_another_process_compiles_in_the_entry_stays(place):
    make(place)
    with opened(place) as entry:
        (entry.directory / "late.so").write_bytes(b"machine code")
        assert make(place) and (place / "late.so").exists()
    assert make(place) and not (place / "late.so").exists()


def test_a_file_of_an_entry_is_complete_or_absent(place):
    def half(file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError("the compiler failed")

    def whole(file: Path) -> bool:
        file.write_bytes(b"whole")
        return (place / "more.saved").exists()

    make(place)
    with opened(place) as entry:
        assert taken(entry, "more.saved", Path.read_bytes, half) is None
        assert {file.name for file in place.iterdir()} == {"a", "step.saved", MANIFEST}
        assert taken(entry, "more.saved", Path.read_bytes, whole) is False
    with opened(place) as entry:
        assert taken(entry, "more.saved", Path.read_bytes, half) == b"whole"


def test_an_unfinished_file_is_removed(place):
    make(place)
    (place / f"step.saved.7{artifacts.MAKING}").write_bytes(b"half")
    assert make(place) and not list(place.glob(f"*{artifacts.MAKING}"))


def test_an_entry_is_sealed_while_other_processes_remove_their_files(tmp_path, monkeypatch):
    (tmp_path / "kept").write_bytes(b"")
    monkeypatch.setattr(ownership, "walked", lambda directory: [directory / "gone", directory / "kept"])
    ownership.seal(tmp_path)
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o600


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


def test_others_wait_for_the_process_that_makes_an_entry_and_say_so(place, capfd):
    begun, found, said = threading.Event(), [], ""

    def second() -> None:
        begun.wait()
        found.append(make(place))

    waiting = threading.Thread(target=second)
    waiting.start()
    with opened(place) as entry:
        begun.set()
        while not said and waiting.is_alive():
            said = capfd.readouterr().err
        (entry.directory / "a").mkdir()
        (entry.directory / "a" / "kernel.so").write_bytes(b"machine code")
    waiting.join()
    assert found == [True] and said == f"zoo: waiting for another process, which compiles {place}\n"


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match="is not a directory; set ZOO_CACHE_DIR to"),
        opened(tmp_path / "file" / "e"),
    ):
        pass


def test_comments_do_not_change_the_meaning_of_a_file_and_numbers_do():
    plain = meaning(b"class A:\n    y = 2\n\ndef f(x):\n    return x + 1\n")
    commented = b"class A:\n    y = (2)  # why\n\n# what\n\ndef f(x):  # how\n\n    return x + 1\n"
    assert meaning(commented) == plain != meaning(b"class A:\n    y = 2\n\ndef f(x):\n    return x + 2\n")
    assert meaning(b'def f():\n    "one"\n    return 1\n') == meaning(b'def f():\n    "two"\n    return 1\n')
    names = [b"f", b"x=1", b"*x", b"x, /", b"x, *, y"]
    assert len({meaning(b"def f(%s):\n    pass\n" % name) for name in names}) == len(names)
    assert meaning(b"def f(x):\n    return g(x)\n") != meaning(b"def f(x):\n    return h(x)\n")


def test_each_process_finds_the_same_meaning():
    source = b"def f(x):\n    return x in {'one', 'two', 'three', 'four', 'five'}, x[1:]\n"
    program = f"from compile_cache.source import meaning; print(meaning({source!r}).hex())"
    found = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1] != b""


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


def test_pruning_leaves_the_directories_of_others_alone(place):
    """The operator may have chosen a directory that has other contents in `compiled`."""
    make(place)
    own = place.parents[2] / "apps" / "web" / "src" / "main.js"
    own.parent.mkdir(parents=True)
    own.write_text("")
    os.utime(own.parent, (0, 0))
    assert [entry.place for entry in store.prune(place.parents[2], max_bytes=0)] == [place] and own.exists()


def test_an_entry_that_is_read_is_not_old(place):
    root = root_with(place, 100)
    assert make(place.with_name("model-100")) and store.prune(root) == []


def test_a_lock_that_prune_removed_is_taken_anew(place, monkeypatch):
    place.parent.mkdir(parents=True)
    lock = place.with_name(f".{place.name}.lock")
    flock = fcntl.flock
    removed = []

    def removed_while_waiting(handle, operation):
        flock(handle, operation)
        if not removed:
            lock.unlink()
            removed.append(lock)

    monkeypatch.setattr(artifacts.fcntl, "flock", removed_while_waiting)
    with artifacts.locked(place, fcntl.LOCK_EX):
        assert removed and lock.exists()  # otherwise another process could take it, too


def test_an_exported_cache_can_be_imported_elsewhere(place, tmp_path):
    root = root_with(place, 1, 2)
    os.truncate(place.with_name("model-2") / "step.saved", 1)
    (place.with_name("model-1") / "planted.so").write_bytes(b"not listed")
    there = tmp_path / "there" / "compiled"
    assert len(store.export(root, tmp_path / "cache.tar")) == 1
    assert [name.name for name in store.take_in(there, tmp_path / "cache.tar")] == ["model-1"]
    assert not list(there.rglob("planted.so")) and make(there / "torch-2-python-3" / "cpu" / "model-1")
    assert store.take_in(there, tmp_path / "cache.tar") == []
    assert {path.name for path in there.iterdir()} == {"torch-2-python-3"}


def test_an_imported_entry_counts_as_read_when_it_was_imported(place, tmp_path):
    store.export(root_with(place, 100), tmp_path / "cache.tar")
    there = tmp_path / "there" / "compiled"
    store.take_in(there, tmp_path / "cache.tar")
    assert store.prune(there) == [] and names(store.stored(there)) == ["model-100"]


def test_an_export_leaves_the_remains_of_killed_processes_alone(place, tmp_path):
    root = root_with(place, 1)
    place.with_name(".model-2.making").mkdir()
    before = sorted(place.parent.iterdir())
    store.export(root, tmp_path / "cache.tar")
    assert sorted(place.parent.iterdir()) == before


def test_a_tar_of_other_files_is_refused(tmp_path):
    (tmp_path / "notes").write_text("no cache")
    with tarfile.open(tmp_path / "cache.tar", "w") as tar:
        tar.add(tmp_path / "notes", "notes")
    with pytest.raises(ValueError, match="is not an exported cache: it has other files and no entry"):
        store.take_in(tmp_path / "there", tmp_path / "cache.tar")
    assert list(tmp_path.glob("there/*")) == []


def test_an_import_removes_what_a_killed_one_left(place, tmp_path):
    store.export(root_with(place, 1), tmp_path / "cache.tar")
    there = tmp_path / "there" / "compiled"
    (there / ".import-killed" / "torch").mkdir(parents=True)
    store.take_in(there, tmp_path / "cache.tar")
    assert {path.name for path in there.iterdir()} == {"torch-2-python-3"}


def test_a_tar_with_a_damaged_entry_is_refused_whole(place, tmp_path):
    make(place)
    with tarfile.open(tmp_path / "cache.tar", "w") as tar:
        tar.add(place, "torch-2-python-3/cpu/model-1")
        os.truncate(place / "step.saved", 1)
        tar.add(place, "torch-2-python-3/cpu/model-1234")
    there = tmp_path / "there" / "compiled"
    with pytest.raises(ValueError, match=r"model-1234, step\.saved has changed"):
        store.take_in(there, tmp_path / "cache.tar")
    assert store.stored(there) == []


def test_a_file_that_is_not_an_exported_cache_is_refused(place, tmp_path):
    (tmp_path / "cache.tar").write_bytes(b"no tar")
    with pytest.raises(ValueError, match="is not an exported cache") as refused:
        store.take_in(tmp_path / "there", tmp_path / "cache.tar")
    assert "\n" not in str(refused.value)
    root = root_with(place, 1)
    manifest = place.with_name("model-1") / MANIFEST
    listed = json.loads(manifest.read_text())
    store.export(root, tmp_path / "cache.tar")
    packed = gzip.compress((tmp_path / "cache.tar").read_bytes())
    for damaged in (packed[:-50], packed[:90] + bytes(9) + packed[99:]):
        (tmp_path / "cache.tar.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match="is not an exported cache"):
            store.take_in(tmp_path / "there", tmp_path / "cache.tar.gz")
    assert listed["files"].keys() == {"a/kernel.so", "step.saved"}
    assert list(tmp_path.glob("there/*")) == []


# kinds of machines


def target_of(monkeypatch: pytest.MonkeyPatch, **facts: str) -> str:
    """Return the target on a processor of which the system says this."""
    monkeypatch.setattr(processor, "facts", lambda: facts)
    return artifacts.target("cpu")


def test_code_is_kept_apart_by_the_instructions_that_compilers_use(monkeypatch):
    """-march=native takes AVX512_BF16 where there is one. Elsewhere such code ends the process."""
    plain = target_of(monkeypatch, flags="fpu avx2 avx512f")
    assert plain == target_of(monkeypatch, flags="avx512f avx2 fpu constant_tsc md_clear")
    assert plain != target_of(monkeypatch, flags="fpu avx2 avx512f avx512_bf16")
    assert target_of(monkeypatch, Features="asimd") != target_of(monkeypatch, Features="asimd bf16")


def test_code_for_a_cpu_is_kept_apart_from_code_for_the_gpu_of_its_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    cpu, gpu = (artifacts.place("model", "1234", device).parent.name for device in ("cpu", "cuda"))
    assert gpu == "sm_90" and cpu.startswith(platform.machine())


def test_the_first_processor_is_described_as_the_system_does(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text("model name\t: A: 7\nflags\t\t: avx2 fpu\n\nmodel name\t: B\n")
    monkeypatch.setattr(processor, "FACTS", tmp_path / "cpuinfo")
    monkeypatch.setattr(processor, "facts", processor.facts.__wrapped__)
    assert (processor.model(), processor.instruction_sets()) == ("A: 7", ["avx2"])
    monkeypatch.setattr(processor, "FACTS", tmp_path / "none")
    assert processor.model() and processor.instruction_sets() == []


# owners


def levels(place: Path) -> list[Path]:
    """Return an entry's directory and those above it, up to the cache's root."""
    return [place, *place.parents][:4]


def test_every_level_is_private_whatever_the_umask(place):
    before = os.umask(0o002)
    try:
        assert not make(place) and make(place)
    finally:
        os.umask(before)
    assert all(level.stat().st_mode & 0o077 == 0 for level in (*levels(place), *place.rglob("*")))


def test_a_file_that_is_added_is_private_whatever_the_umask(place):
    make(place)
    before = os.umask(0)
    try:
        with opened(place) as entry:
            (entry.directory / "more.saved").write_bytes(b"more")
            entry.add("more.saved")
    finally:
        os.umask(before)
    assert artifacts.damage(place) is None and artifacts.listed_files(place).keys() >= {
        "more.saved",
        "step.saved",
    }


def test_processes_that_extend_an_entry_at_once_keep_each_others_lines(place, monkeypatch):
    make(place)
    read, both_read = artifacts.listed_files, threading.Barrier(2)

    def listed_files(place: Path) -> dict[str, str]:
        found = read(place)
        with suppress(threading.BrokenBarrierError):  # the other one waits for its turn
            both_read.wait(0.2)
        return found

    def extend(name: str) -> None:
        (place / name).write_bytes(b"more")
        artifacts.extend_manifest(place, [name])

    monkeypatch.setattr(artifacts, "listed_files", listed_files)
    extending = [threading.Thread(target=extend, args=[name]) for name in ("one.saved", "two.saved")]
    for thread in extending:
        thread.start()
    for thread in extending:
        thread.join()
    assert read(place).keys() >= {"step.saved", "one.saved", "two.saved"} and artifacts.damage(place) is None


@pytest.mark.parametrize("name", ["", "a", "a/kernel.so", "step.saved", MANIFEST])
@pytest.mark.parametrize("how", ["owned", "writable"])
def test_an_entry_that_others_may_have_written_is_made_again(place, capfd, monkeypatch, name, how):
    make(place)
    given_to_others(place / name, how, monkeypatch)
    assert not make(place, b"new")
    assert str(place / name) in capfd.readouterr().err
    assert make(place, b"new")


@pytest.mark.parametrize("how", ["owned", "writable"])
@pytest.mark.parametrize("level", range(1, 4))
def test_a_cache_below_a_directory_of_others_is_refused(place, monkeypatch, how, level):
    make(place)
    given_to_others(levels(place)[level], how, monkeypatch)
    with pytest.raises(ValueError, match=f"cannot hold compiled code.*{levels(place)[level].name}"):
        make(place)


def test_a_cache_that_is_a_link_into_a_directory_of_others_is_refused(place, tmp_path, monkeypatch):
    (tmp_path / "others" / "mine").mkdir(parents=True)
    place.parents[2].symlink_to(tmp_path / "others" / "mine")
    given_to_others(tmp_path / "others", "writable", monkeypatch)
    with pytest.raises(ValueError, match=r"others may write to .*others"):
        make(place)


def given_to_others(path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let others own or write a path. Only root can give it away; other users pretend to be somebody
    else's."""
    if how == "writable":
        path.chmod(path.stat().st_mode | 0o022)
    elif os.getuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        pytest.skip("only root can give a file away")


def test_a_group_of_one_user_may_write(place, monkeypatch):
    make(place)
    place.parent.chmod(0o770)
    monkeypatch.setattr("compile_cache.ownership._is_own_group", lambda gid: False)
    with pytest.raises(ValueError, match="others may write"):
        make(place)
    monkeypatch.setattr("compile_cache.ownership._is_own_group", lambda gid: True)
    assert make(place)


def test_a_sticky_directory_may_be_shared(place):
    make(place)
    place.parents[2].chmod(0o1777)
    assert make(place)


def test_a_link_to_an_entry_is_replaced(place, tmp_path):
    make(place)
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert not make(place) and not place.is_symlink() and make(place)


# a cache that can only be read


@pytest.fixture(name="read_only")
def _read_only(place, monkeypatch):
    """Make an entry that is found in a cache without room for a file: root can write in spite of the mode."""
    make(place)
    (place / "late.so").write_bytes(b"half")
    access = os.access

    def reads(path, mode):
        return access(path, mode) and not (mode == os.W_OK and Path(path).is_relative_to(place.parents[2]))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(os, "access", reads)
    monkeypatch.setattr("compile_cache.artifacts.locked", refuse)
    monkeypatch.setattr("compile_cache.store.locked", refuse)
    return place


def test_a_full_cache_is_read_where_nothing_can_be_written(read_only):
    with opened(read_only) as entry:
        assert entry.is_found and not entry.directory.is_relative_to(read_only.parents[2])
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(entry.directory)
        assert (entry.directory / "a" / "kernel.so").read_bytes() == b"machine code"
        assert not (entry.directory / "late.so").exists()
        (entry.directory / "a" / "lock").write_text("")  # compilers write next to what they read
    assert not entry.directory.exists() and (read_only / "late.so").exists()


def test_a_full_cache_is_exported_where_nothing_can_be_written(read_only, tmp_path):
    names = store.export(read_only.parents[2], tmp_path / "cache.tar")
    assert [name.name for name in names] == [read_only.name]


def test_a_missing_entry_is_an_error_where_nothing_can_be_written(read_only):
    with pytest.raises(ValueError, match="cannot be written, and it does not exist"):
        make(read_only.with_name("model-5678"))


def test_no_other_pickle_is_loaded():
    """torch.load reads tensors alone. Beside it, the step's own loader reads pickles, and joblib_files.py
    interprets their instructions without calling what they name."""
    root = Path(__file__).parents[2]
    files = [file for room in ("zoo", "serving", "compile_cache") for file in (root / room).rglob("*.py")]
    ours = [file for file in files if file.name != "reference.py"]  # those run the references' own programs
    text = {str(file.relative_to(root)): file.read_text() for file in ours}
    assert [name for name, code in text.items() if "load_compiled_function" in code] == [
        "compile_cache/saved.py"
    ]
    assert [
        name
        for name, code in text.items()
        if re.search(r"^\s*(import|from) (pickle|dill|joblib)", code, re.M)
    ] == ["zoo/checkpoint/joblib_files.py"]
    for name, code in text.items():
        calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
        for call in calls:
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if ast.unparse(call.func) == "torch.load":
                assert given.get("weights_only") == "True", name
            assert given.get("allow_pickle", "False") == "False", name
