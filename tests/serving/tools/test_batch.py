"""`zoo batch`: its files, its lines, and what an interrupted run leaves."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest
import shell
import soundfile
from models import directory
from shell import ROOT
from toy import Toy

from serving.audio.loudness import loudness_of
from serving.engine.engine import Engine
from serving.tools import batch
from serving.tools.batch import Batch, Item, Results, Tally, read_items
from zoo.text.pronunciations import Pronunciation


def lines(path, *items):
    path.write_text(
        "".join(f"{item if isinstance(item, str) else json.dumps(item)}\n" for item in items), "utf-8"
    )
    return path


def results(out):
    found = [json.loads(line) for line in (out / "results.jsonl").read_text("utf-8").splitlines()]
    return (
        {result["id"]: result for result in found} if len({r["id"] for r in found}) == len(found) else found
    )


class Run:
    """A batch with a toy model, run like the command runs it."""

    def __init__(self, tmp_path, **defaults):
        self.out, self.path = Results(tmp_path / "out"), tmp_path / "in.jsonl"
        self.defaults = {"max_new_tokens": 4} | defaults
        self.told: list[dict] = []

    def __call__(self, *items, engine=None):
        """Run the batch and return its tally."""
        read = read_items(lines(self.path, *items), self.defaults)
        good = [item for item in read if item.error is None]
        digests = {item.id: item.digest(self.path.parent, ["toy"]) for item in good}
        engine = engine or Engine(Toy(), max_slots=2, policy="throughput", compile=False, max_waiting=4)
        with self.out.held():
            done = self.out.finished({item.id for item in read}, digests, ".wav")
            tally = Tally(found=len(done))
            self.batch = Batch(
                engine,
                self.out,
                digests,
                "wav",
                pytest.fail,
                {},
                tally,
                lambda tally, result: self.told.append(result),
            )
            self.batch.run([item for item in good if item.id not in done])
        return tally


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


TEXTS = [
    {"text": f"Good morning, {name}.", "id": name}
    for name in ("ann", "ben", "cal", "dan", "eve", "fay", "gus")
]


def test_every_line_becomes_a_file(run):
    tally = run(*TEXTS)
    assert (tally.made, tally.failed, tally.found) == (7, 0, 0)
    found = results(run.out.directory)
    assert set(found) == {item["id"] for item in TEXTS} and len(run.told) == 7
    for id, result in found.items():
        samples, rate_hz = soundfile.read(run.out.directory / f"{id}.wav")
        assert len(samples) == round(result["audio_s"] * rate_hz) == 4 * result["frames"] > 0
    assert not list(run.out.directory.glob(".*"))  # no incomplete files


def test_finished_items_are_not_made_again(run):
    run(*TEXTS[:3])
    before = {path.name: path.stat().st_mtime_ns for path in run.out.directory.glob("*.wav")}
    (run.out.directory / "ben.wav").unlink()
    tally = run(TEXTS[0] | {"text": "Another text."}, *TEXTS[1:4])
    assert (tally.found, tally.made) == (1, 3)  # made: another text, a lost file and a new line
    assert (run.out.directory / "cal.wav").stat().st_mtime_ns == before["cal.wav"]
    assert set(results(run.out.directory)) == {"ann", "ben", "cal", "dan"}
    run.defaults["seed"] = 5
    assert run(*TEXTS[:4]).made == 4  # all items have another seed


def test_lines_have_pronunciations_of_their_own(run):
    entry = {"term": "sql", "say": "sequel"}
    assert run(TEXTS[0], TEXTS[1] | {"pronunciations": [entry]}).failed == 0
    fields = read_items(run.path, {})[1].fields
    run.batch.pronunciations = [Pronunciation("SQL", "S Q L"), Pronunciation("ok", "okay")]
    assert run.batch.words(msgspec.structs.replace(fields, text="SQL ok")) == "sequel okay"
    plain = msgspec.structs.replace(fields, text="SQL ok", pronunciations=None)
    assert run.batch.words(plain) == "S Q L okay"
    assert run(TEXTS[0], TEXTS[1] | {"pronunciations": [entry | {"say": "x"}]}).made == 1


def test_lines_of_other_files_stay(run):
    run(*TEXTS[:2])
    run(*TEXTS[2:4])
    assert set(results(run.out.directory)) == {"ann", "ben", "cal", "dan"}


@pytest.mark.parametrize(
    "content",
    [
        '{"text": "Hello."}\n{"text": "Bye."}',
        '{"id": "ann", "text": "a"}\n',
        "wer 3 %",
        '{"id": "ann", "text": "a"}',
    ],
)
def test_a_file_of_somebody_else_is_not_rewritten(run, content):
    """It may even be the input."""
    run.out.directory.mkdir(exist_ok=True)
    (run.out.directory / "results.jsonl").write_text(content)
    with pytest.raises(
        ValueError, match=r"results\.jsonl was not written by zoo batch; choose another directory"
    ):
        run(*TEXTS[:2])
    assert (run.out.directory / "results.jsonl").read_text() == content


def test_a_run_that_was_killed_in_its_first_line_is_continued(run):
    run.out.directory.mkdir(exist_ok=True)
    (run.out.directory / "results.jsonl").write_text('{"id": "ann", "li')
    assert run(*TEXTS[:2]).made == 2 and set(results(run.out.directory)) == {"ann", "ben"}


def test_an_incomplete_line_of_a_killed_run_is_not_a_result(run):
    run(*TEXTS[:2])
    whole = (run.out.directory / "results.jsonl").read_text()
    (run.out.directory / "results.jsonl").write_text(whole + '{"id": "cal", "line": 3, "fi')
    tally = run(*TEXTS[:3])
    assert (tally.found, tally.made) == (2, 1) and set(results(run.out.directory)) == {"ann", "ben", "cal"}


def test_a_line_that_was_cut_within_a_character_is_not_a_result(run):
    run(*TEXTS[:2])
    with (run.out.directory / "results.jsonl").open("ab") as file:
        file.write(b'{"id": ["cal"]}\n{"id": "cal", "error": "\xc3')
    tally = run(*TEXTS[:3])
    assert (tally.found, tally.made) == (2, 1) and set(results(run.out.directory)) == {"ann", "ben", "cal"}


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"text": "a", "seed": %s}' % ("9" * 5000)], ids=["deep", "long"]
)
def test_a_line_that_no_parser_takes_does_not_end_the_batch(run, line):
    tally = run(line, TEXTS[0])
    assert (tally.made, len(read_items(run.path, {}))) == (1, 2)
    assert "not JSON" in read_items(run.path, {})[0].error


def test_a_byte_order_mark_belongs_to_no_line(tmp_path):
    (tmp_path / "in").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    assert [item.fields.text for item in read_items(tmp_path / "in", {})] == ["a", "b"]


@pytest.mark.parametrize("path", ["a" * 300, "a\0b"])
def test_a_path_that_cannot_be_one_has_no_content(tmp_path, path):
    [item] = read_items(lines(tmp_path / "in", {"text": "a", "reference": path}), {})
    assert item.digest(tmp_path, []) != Item(1, "x").digest(tmp_path, [])


def test_unusable_lines_have_an_error(tmp_path):
    path = lines(
        tmp_path / "in",
        "{",
        '["a"]',
        {},
        {"text": 3},
        {"text": "a", "id": "../x"},
        {"text": "a", "id": "b"},
        "",
        {"text": "a", "id": "b"},
        {"text": "a", "seed": "x"},
        {"text": "a", "voice": None, "id": 4, "cfg_scale": 2},
    )
    items = read_items(path, {"voice": "v"})
    says = (
        "not JSON",
        "a JSON object",
        "no text",
        "Expected `str`",
        "cannot name a file",
        None,
        "also the id of line 6",
    )
    for item, said in zip(items, (*says, "Expected `int | null`", None), strict=True):
        assert item.error is None if said is None else said in item.error
    assert [item.line for item in items] == [1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert len({item.id for item in items}) == len(items)
    assert items[-1].id == "4" and items[-1].options == {"cfg_scale": 2} and items[-1].fields.voice == "v"
    for bad in (lines(tmp_path / "none"), tmp_path / "no such"):
        with pytest.raises(ValueError, match=r"has no lines|cannot be read"):
            read_items(bad, {})


def test_only_a_newline_ends_a_line(run):
    """Unicode's line separators do not."""
    assert run('{"text": "a\u2028b\x85c", "id": "a", "voice": "no\u2028body"}', *TEXTS[:2]).failed == 1
    assert set(results_by_line(run.out.directory)) == {"a", "ann", "ben"}
    assert run('{"text": "a\u2028b\x85c", "id": "a"}', *TEXTS[:2]).found == 2


def results_by_line(out):
    return [json.loads(line)["id"] for line in (out / "results.jsonl").read_text("utf-8").split("\n")[:-1]]


def test_items_that_the_model_refuses_fail(run):
    tally = run(
        TEXTS[0], {"text": "a", "id": "bad", "voice": "nobody"}, {"text": " ", "id": "empty"}, TEXTS[1]
    )
    assert (tally.made, tally.failed) == (2, 2)
    found = results(run.out.directory)
    assert "no voice 'nobody'" in found["bad"]["error"] and found["bad"]["line"] == 2
    assert "text is empty" in found["empty"]["error"]


def test_a_default_that_the_model_refuses_ends_the_command_unless_every_line_replaces_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("serving.cli.batch.opened", lambda *_: pytest.fail("work started"))
    out = tmp_path / "out"
    path = lines(tmp_path / "in.jsonl", {"text": "Hello."}, {"text": "Hello.", "voice": "slt"}, "{")
    for flags, says in (
        (["--voice", "nobody"], "no voice 'nobody'"),
        (["--instructions", "Whisper."], "no instructions"),
        (["-O", "no_option=1"], "no_option"),
    ):
        done = shell.zoo("batch", path, out, *flags)
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done
        assert not out.exists()
    spec = Toy().spec
    item = read_items(lines(path, {"text": "Hello.", "voice": "slt"}), {"voice": "nobody"})
    batch.check_defaults(item, {"voice": "nobody"}, {}, spec)


def test_an_item_without_audio_fails(run, with_end):
    engine = Engine(with_end(Toy(), 1e9), max_slots=2, policy="throughput", compile=False, max_waiting=4)
    tally = run(*TEXTS[:2], engine=engine)
    assert tally.failed == 2 and "no audio" in results(run.out.directory)["ann"]["error"]


def test_only_one_batch_at_a_time_writes_to_a_directory(run):
    with run.out.held(), pytest.raises(ValueError, match="another zoo batch writes to"):
        run(TEXTS[0])
    assert run(TEXTS[0]).made == 1


def test_a_new_directory_into_which_nothing_was_written_is_removed(tmp_path):
    results = Results(tmp_path / "out")
    with results.held():
        assert results.finished(set(), {}, ".wav") == set()
    assert not results.directory.exists()
    with results.held():
        results.add({"id": "a"})
    assert results.path.exists()


@pytest.mark.slow
def test_a_signal_keeps_the_finished_items(run, with_end, monkeypatch):
    """The signal comes when two items are made; the next run makes the rest."""

    def engine():
        return Engine(with_end(Toy(), -1e9), max_slots=2, policy="throughput", compile=False, max_waiting=4)

    keep, kept = Batch.keep, []

    def kept_until_two(self, *args):
        keep(self, *args)
        kept.append(args[0].id)
        if len(kept) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Batch, "keep", kept_until_two)
    handler = signal.getsignal(signal.SIGINT)
    run.defaults["max_new_tokens"] = 40
    many = [{"text": f"Number {i} is this.", "id": str(i)} for i in range(40)]
    tally = run(*many, engine=engine())
    assert tally.is_interrupted and 2 <= tally.made < 40 and tally.failed == 0
    assert signal.getsignal(signal.SIGINT) is handler and not run.batch.engine.num_requests
    monkeypatch.setattr(Batch, "keep", keep)
    again = run(*many, engine=engine())
    assert (again.found, again.made, again.is_interrupted) == (tally.made, 40 - tally.made, False)
    assert len(results(run.out.directory)) == 40


def test_an_unexpected_error_of_a_writer_ends_the_batch(run, monkeypatch):
    def broken(*_):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(batch, "pcm16", broken)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        run(*TEXTS)


def test_a_full_disk_fails_each_item(run, monkeypatch):
    write = Results.write

    def full(self, name, data):
        if name.endswith(".wav"):
            raise OSError(28, "No space left on device")
        write(self, name, data)

    monkeypatch.setattr(Results, "write", full)
    tally = run(*TEXTS[:3])
    assert tally.failed == 3 and "No space left" in results(run.out.directory)["ben"]["error"]


@pytest.mark.slow
def test_a_file_that_does_not_fit_takes_no_room(tmp_path):
    """Only a small disk is full; a limit on the size of a file fails in the same way."""
    script = (
        "import resource as r, signal; from pathlib import Path; from serving.tools.batch import Results\n"
    )
    script += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); r.setrlimit(r.RLIMIT_FSIZE, (1000, 1000))\n"
    script += "Results(Path.cwd()).write('ben.wav', bytes(2000))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, stderr=subprocess.PIPE)
    assert b"File too large" in done.stderr and not list(tmp_path.glob("*ben*"))


def test_equal_items_have_equal_digests(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"1")
    (tmp_path / "b.wav").write_bytes(b"1")
    (tmp_path / "c.wav").write_bytes(b"2")

    def digest(common=(), **fields):
        [item] = read_items(lines(tmp_path / "in", {"text": "a"} | fields), {})
        return item.digest(tmp_path, common)

    assert digest() == digest(id="x") != digest(seed=1) != digest(seed=2)
    assert digest(reference="a.wav") != digest(reference="c.wav") and digest(["m"]) != digest(["n"])
    assert Item(1, "x").digest(tmp_path, []) != digest()


@pytest.mark.slow
def test_a_file_is_made_again_with_other_weights(tmp_path):
    path, out = lines(tmp_path / "in.jsonl", {"text": "Hello."}), tmp_path / "out"
    model = directory("qwen3_tts", "tiny")
    how = "batch", path, out, "-m", model, "--no-compile", "--voice", "vivian", "--max-new-tokens", 2
    assert "1 made" in shell.zoo(*how).stdout
    assert "1 found" in shell.zoo(*how).stdout
    done = shell.zoo(*how, "--weights", "int8")  # it starts, and needs kernels
    assert done.returncode == 2 and "weights int8 are computed by compiled kernels" in done.stderr


@pytest.mark.slow
def test_the_command(tmp_path):
    """The first run has options for all lines and for one, and a bad line. The second finds everything."""
    out, model = tmp_path / "out", directory("qwen3_tts", "tiny")
    path = lines(
        tmp_path / "in.jsonl",
        {"text": "Hello."},
        {"text": "Hello.", "id": "b", "voice": "ryan", "seed": 3},
        "{",
    )
    how = (
        "batch",
        path,
        out,
        "-m",
        model,
        "--no-compile",
        "--device",
        "cpu",
        "--voice",
        "vivian",
        "--max-new-tokens",
        4,
    )
    done = shell.zoo(*how, "--format", "flac", "-O", "text_mode=full")
    assert done.returncode == 1 and "2 made" in done.stdout and "1 failed" in done.stdout, done
    assert "line 3 (000003): the line is not JSON" in done.stderr
    found = results(out)
    assert {found[id]["file"] for id in ("000001", "b")} == {"000001.flac", "b.flac"} and "error" in found[
        "000003"
    ]
    assert soundfile.info(io.BytesIO((out / "b.flac").read_bytes())).samplerate == 24000
    lines(path, {"text": "Hello."}, {"text": "Hello.", "id": "b", "voice": "ryan", "seed": 3})
    done = shell.zoo(*how, "--format", "flac", "-O", "text_mode=full")
    assert done.returncode == 0 and "0 made" in done.stdout and "2 found" in done.stdout
    assert shell.zoo("batch", tmp_path / "none", out, "-m", model).returncode == 2


def test_a_wrong_loudness_is_an_error_of_its_line(run):
    tally = run({"text": "Hello.", "loudness": 3}, {"text": "Hello."})
    assert (tally.failed, tally.made) == (0, 1)
    assert "`float` <= -8.0" in read_items(run.path, {})[0].error


@pytest.mark.slow
def test_the_small_voice_speaks_a_batch_at_the_given_speeds_and_loudness(tmp_path):
    """Double speed halves the length, and a speed out of range is an error of its line."""
    path = lines(
        tmp_path / "in.jsonl",
        {"text": "Good morning.", "id": "fast"},
        {"text": "Good morning.", "id": "plain", "speed": 1, "loudness": -30},
        {"text": "Good morning.", "id": "wrong", "speed": 9},
    )
    how = (
        "--no-compile",
        "--device",
        "cpu",
        "--max-new-tokens",
        25,
        "--seed",
        1,
        "--speed",
        2,
        "--loudness",
        -20,
    )
    done = shell.zoo("batch", path, tmp_path / "out", *how)
    assert done.returncode == 1 and "2 made" in done.stdout, done
    found = results(tmp_path / "out")
    assert found["fast"]["audio_s"] == pytest.approx(found["plain"]["audio_s"] / 2)
    for id, lufs in (("fast", -20), ("plain", -30)):
        samples, rate_hz = soundfile.read(tmp_path / "out" / f"{id}.wav", dtype="int16")
        assert loudness_of(samples.tobytes(), rate_hz) == pytest.approx(lufs, abs=0.2)
        heard_s = soundfile.info(tmp_path / "out" / f"{id}.wav").duration
        assert heard_s == pytest.approx(found[id]["audio_s"], abs=0.06)
    assert "speed" in found["000003"]["error"]


@pytest.mark.slow
def test_a_killed_batch_can_be_resumed(tmp_path):
    """The batch is killed after its first lines. Every file is complete, and the next run makes the rest."""
    out, model = tmp_path / "out", directory("qwen3_tts", "tiny")
    path = lines(
        tmp_path / "in.jsonl",
        *({"text": f"This is number {i}.", "voice": "ryan", "id": f"n{i}"} for i in range(12)),
    )
    how = (
        "batch",
        path,
        out,
        "-m",
        model,
        "--no-compile",
        "--device",
        "cpu",
        "--max-new-tokens",
        "12",
        "--max-slots",
        "2",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "serving", *map(str, how)], cwd=ROOT, env=dict(os.environ)
    )
    end_s = time.monotonic() + 120
    while not (out / "results.jsonl").exists() or (out / "results.jsonl").read_text().count("\n") < 2:
        assert process.poll() is None and time.monotonic() < end_s
        time.sleep(0.02)
    process.kill()
    process.wait()
    there = {file.stem for file in out.glob("*.wav")}
    assert all(soundfile.info(str(out / f"{name}.wav")).frames == 12 * 1920 for name in there)
    done = shell.zoo(*how)
    assert done.returncode == 0 and " 0 found" not in done.stdout, done
    assert set(results(out)) == {f"n{i}" for i in range(12)} == {file.stem for file in out.glob("*.wav")}
