"""The soak finds what it is for: wrong answers, and resources that are not given back. A short one passes."""

import base64
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import soundfile
from models import family

from serving.http.objects import VoiceObject
from tests.attack.target import ROOT, command_line, until
from tests.soak import answers, judge, report
from tests.soak.answers import Wrong
from tests.soak.cases import NEED_WORDS, requests_of, speaks
from tests.soak.conversations import KEEPS_ANSWERS, Answer, check_answer, streamed_answer, talk, talks_of
from tests.soak.kinds import KINDS
from tests.soak.plan import LEVELS, Plan
from tests.soak.run import Ended, Run, Strike, is_uploaded
from tests.soak.server import MODELS, Process, Sample, summed
from tests.soak.watched import alive, is_error

SPEECH = np.random.default_rng(0).normal(0, 3000, 8000).astype("<i2")
PLAN = Plan(0, 600.0)
LOAD_S = round(sum(duration_s for _, duration_s in PLAN.rungs))
ERROR = {"message": "full", "type": "server_error", "param": None, "code": "engine_full"}


def file(samples, form="WAV", subtype="PCM_16"):
    out = io.BytesIO()
    soundfile.write(out, samples, 16000, format=form, subtype=subtype)
    return out.getvalue()


def sample(at_s, resident_mib=100.0, threads=5, pages=0.0, descriptors=12):
    held = Process(resident_mib, descriptors, 4, threads)
    processes = dict.fromkeys(judge.PROCESSES, held) | {"others": Process()}
    return Sample(at_s, 1.0, processes, {"running": 0.0}, pages=pages, files=2)


def growing(mib_per_s):
    """Return a run during whose load memory grows, and after which the server is as before."""
    samples = [sample(at_s, 100 + mib_per_s * at_s) for at_s in range(LOAD_S)]
    idle = dict.fromkeys(("warm-up", "load", "kills"), sample(0))
    run = Run(PLAN, samples=samples, parts={"load": (0.0, LOAD_S)}, idle=idle, is_complete=True)
    run.num_errors = {"warm-up": 0, "load": 0, "kills": 3}
    return run


# --- answers ---


def test_a_stream_may_differ_from_the_file_by_rounding_only():
    near = SPEECH.copy()
    near[5:50] += answers.MAX_STEPS
    for form, write in (("pcm", bytes), ("wav", file), ("flac", lambda of: file(of, "FLAC"))):
        answers.check_stream(form, write(near), write(SPEECH))
        far = SPEECH.copy()
        far[77] += answers.MAX_STEPS + 1
        with pytest.raises(Wrong, match="sample 77 differs"):
            answers.check_stream(form, write(far), write(SPEECH))


@pytest.mark.parametrize("form", ["pcm", "wav"])
def test_a_short_stream_is_wrong(form):
    write = bytes if form == "pcm" else file
    with pytest.raises(Wrong, match="7999 samples"):
        answers.check_stream(form, write(SPEECH[:-1]), write(SPEECH))
    with pytest.raises(Wrong):
        answers.check_stream(form, b"", write(SPEECH))


def test_another_speech_in_a_lossy_format_is_wrong():
    first = file(SPEECH, "OGG", "OPUS")
    answers.check_stream("opus", file(SPEECH + 1, "OGG", "OPUS"), first)
    with pytest.raises(Wrong, match="differs from the first answer by"):
        answers.check_stream("opus", file(SPEECH[::-1], "OGG", "OPUS"), first)


def test_a_file_of_a_model_of_codes_is_equal_byte_by_byte():
    near = SPEECH.copy()
    near[5] += 1
    answers.check_file("pcm", bytes(near), bytes(SPEECH), is_exact=False)
    with pytest.raises(Wrong, match="differs from the first"):
        answers.check_file("pcm", bytes(near), bytes(SPEECH), is_exact=True)


def test_what_a_client_heard_before_it_left_is_the_beginning():
    answers.check_beginning(bytes(SPEECH[:100]) + b"\0", bytes(SPEECH))
    with pytest.raises(Wrong):
        answers.check_beginning(bytes(SPEECH[1:100]), bytes(SPEECH))


@pytest.mark.parametrize(
    ("status", "data", "retry_after"),
    [
        (500, b"Internal Server Error", None),
        (400, b'{"detail": "no"}', None),
        (503, json.dumps({"error": ERROR}).encode(), None),
        (400, json.dumps({"error": ERROR}).encode(), None),
        (503, json.dumps({"error": ERROR | {"message": ""}}).encode(), "3"),
    ],
)
def test_an_error_without_its_shape_is_wrong(status, data, retry_after):
    with pytest.raises(Wrong):
        raise answers.refusal_of(status, data, retry_after)


def test_a_busy_server_is_not_wrong():
    refused = answers.refusal_of(503, json.dumps({"error": ERROR}).encode(), "3")
    assert refused.is_busy and not refused.is_stopped


# --- the plan ---


def test_a_request_depends_on_the_seed_and_its_number_alone():
    def kinds(seed):
        return [Plan(seed, 60).request(index)[0] for index in range(200)]

    assert kinds(1) == kinds(1) != kinds(2)
    assert len(set(kinds(1))) > 10


@pytest.mark.parametrize("minutes", [1, 2, 60])
def test_every_third_of_the_load_is_alike(minutes):
    rungs = Plan(0, 60.0 * minutes).rungs
    third = len(rungs) // 3
    assert rungs[:third] == rungs[third : 2 * third] == rungs[2 * third :]
    assert {level for level, _ in rungs} == set(LEVELS)


def test_kills_have_the_time_that_is_left():
    plan = Plan(0, 3600.0)
    load_s = plan.warmup_s + sum(duration_s for _, duration_s in plan.rungs)
    assert load_s + plan.kills_s(load_s) < plan.duration_s


def test_recordings_without_their_words_go_only_to_families_that_take_them():
    needing = [name for name, (of, size) in MODELS.items() if family(of, size=size).spec.needs_transcript]
    assert sorted(needing) == sorted(NEED_WORDS)
    clones = {"modes": ["clone"], "options": [], "mixes": False, "voices": []}
    names = [[name for name, *_ in requests_of(clones | {"family": of})] for of in ("csm", "higgs_v3")]
    assert ["cloned without words" in of for of in names] == [False, True]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_cases(name):
    """Models that answer have questions with and without a clip, streams and whole files among them."""
    of, size = MODELS[name]
    spec = family(of, size=size).spec
    info = {"id": name, "family": of, "modes": [], "options": [], "mixes": False, "voices": []}
    info |= {"answers": spec.answers, "performs": spec.performs}
    assert speaks(info) or spec.answers
    assert spec.keeps_answers == (of in KEEPS_ANSWERS)
    if spec.performs:
        assert not any({"ref_audio", "voice"} & set(fields) for _, _, fields in requests_of(info))
    if spec.answers:
        talks = list(talks_of(info))
        assert {each.form for each in talks if each.may_stream} == {"none", "pcm16"}
        assert any("mp3" in each.name for each in talks) and any("clip" in each.name for each in talks)


def test_kinds_that_need_more_come_only_where_it_is():
    def kinds(*abilities):
        plan = Plan(0, 60.0, frozenset(abilities))
        return {plan.request(index)[0] for index in range(2000)}

    plain = {name for name, kind in KINDS.items() if not kind.needs}
    assert kinds() == plain
    assert kinds("answers", "works", "on demand") == set(KINDS)
    assert [name for name, _ in Plan(0, 60.0, frozenset(["works"])).strikes][-1] == "process of a work"


# --- conversations ---

TALK = talk({"id": "m"}, "text to pcm16", "Hello.", seed=1, audio={"format": "pcm16", "voice": "any"})


def chunks(*deltas, reason="stop", end="data: [DONE]"):
    lines = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    lines.append({"choices": [{"delta": {}, "finish_reason": reason}]})
    return "\n\n".join(["data: " + json.dumps(line) for line in lines] + [end]).encode()


def spoken_in_chunks(*samples):
    data = [base64.b64encode(bytes(part)).decode() for part in samples]
    first = {"role": "assistant", "audio": {"id": "a", "transcript": "Good "}}
    return [first, *({"audio": {"data": each, "transcript": "day"}} for each in data)]


def test_an_answer_in_chunks_is_joined():
    heard = streamed_answer(chunks(*spoken_in_chunks(SPEECH[:50], SPEECH[50:])), TALK)
    assert heard == ("Good dayday", bytes(SPEECH), "stop", "a")


@pytest.mark.parametrize("end", ["", 'data: {"choices": []}'])
def test_chunks_without_an_end_are_wrong(end):
    with pytest.raises(Wrong, match="without an end"):
        streamed_answer(chunks(*spoken_in_chunks(SPEECH), end=end), TALK)


def test_an_error_in_chunks_is_a_refusal():
    with pytest.raises(answers.Refused, match="full"):
        streamed_answer(b"data: " + json.dumps({"type": "error", "error": ERROR}).encode(), TALK)


def test_an_answer_with_other_words_another_reason_or_other_audio_is_wrong():
    first = Answer("Good day", bytes(SPEECH), "stop", "a")
    near = SPEECH.copy()
    near[5] += 1
    check_answer(first._replace(audio=bytes(near), audio_id="b"), first, TALK, is_stream=True)
    for other in (
        {"text": "Good"},
        {"reason": "length"},
        {"audio": bytes(SPEECH[:-1])},
        {"audio": None},
        {"audio": b""},
    ):
        with pytest.raises(Wrong):
            check_answer(first._replace(**other), first, TALK, is_stream=True)
    with pytest.raises(Wrong, match="differs"):
        check_answer(first._replace(audio=bytes(near)), first, TALK)


def test_uploaded_voices_are_those_that_the_server_lists_as_recordings():
    kinds = get_args(get_type_hints(VoiceObject)["type"])
    assert [kind for kind in kinds if is_uploaded({"type": kind})] == ["audio_sample"]


# --- the verdict ---


def test_memory_that_grows_fails_the_soak():
    assert not judge.failed(growing(0.0))
    assert not judge.failed(growing(0.02))
    run = growing(0.3)
    assert {row.attack for row in judge.rows(run) if row.failed} >= {"engine: memory", "http: memory"}


@pytest.mark.parametrize(
    ("part", "left"),
    [("load", {"pages": 1.0}), ("kills", {"descriptors": 13}), ("load", {"resident_mib": 400.0})],
)
def test_an_idle_server_that_holds_more_than_before_fails_the_soak(part, left):
    run = growing(0.0)
    run.idle[part] = sample(0, **left)
    [row] = [row for row in judge.rows(run) if row.failed]
    assert row.attack == f"idle after the {part}"


def test_files_that_are_left_are_named():
    run = growing(0.0)
    run.idle["kills"] = replace(sample(0), files=3)
    run.files = {"warm-up": ["voices/a"], "kills": ["tmp/left", "voices/a"]}
    [row] = [row for row in judge.rows(run) if row.failed]
    assert "files 2, then 3 (tmp/left)" in row.seen


def test_a_wrong_answer_an_error_in_the_log_and_a_lost_process_fail_the_soak():
    wrong = growing(0.0)
    wrong.ended.append(Ended("file", 7, "load", 1.0, 5.0, "wrong", "Wrong: short"))
    logged = growing(0.0)
    logged.num_errors["load"] = 1
    lost = growing(0.0)
    lost.strikes.append(Strike("SIGKILL to http", 9.0, None))
    interrupted = replace(growing(0.0), is_complete=False)
    assert all(map(judge.failed, (wrong, logged, lost, interrupted)))


def test_first_audio_that_gets_later_fails_the_soak():
    run = growing(0.0)
    for at_s in range(LOAD_S):
        run.ended.append(Ended("stream", at_s, "load", 0.5, float(at_s), "whole", ttfa_s=0.1 + at_s / 100))
    [row] = [row for row in judge.rows(run) if row.failed]
    assert row.attack.startswith("first audio")


def test_a_traceback_in_the_log_is_an_error():
    assert is_error('{"level": "error", "event": "x"}') and is_error("Traceback (most recent call last):")
    assert not is_error('{"level": "info", "event": "x"}')


def test_metrics_are_summed_over_the_models():
    text = '# HELP\nzoo_slots{model="a"} 8.0\nzoo_slots{model="b"} 4.0\nzoo_x_bucket{le="1"} 3.0\n'
    assert summed(text) == {"zoo_slots": 12.0}


def test_the_report_has_one_table_and_says_how_it_was_made(tmp_path):
    said = report.About("python -m tests.soak --minutes 1", ["tiny"], datetime.now(UTC))
    report.write(tmp_path, said, growing(0.0), [])
    text = (tmp_path / "soak.md").read_text()
    assert text.count("\n|---|") == 1 and "python -m tests.soak --minutes 1" in text and "torch" in text
    assert json.loads((tmp_path / "soak.json").read_text())["has_failed"] is False
    assert (tmp_path / "soak.png").stat().st_size > 10_000


# --- all of it ---


def command(directory, *options):
    return [sys.executable, "-m", "tests.soak", "--output", str(directory / "report"), *options]


@pytest.mark.slow
def test_a_short_soak_finds_nothing(tmp_path):
    done = subprocess.run(command(tmp_path, "--minutes", "1"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "report" / "soak.json").read_text())
    assert result["is_complete"] and result["requests"] > 100
    assert len(result["strikes"]) >= 3


@pytest.mark.slow
def test_an_interrupted_soak_stops_its_server_and_still_reports(tmp_path):
    temporary = Path(tempfile.mkdtemp(prefix="zoo-"))  # a path short enough for the server's socket
    options = ("--minutes", "5", "--models", "higgs_v3")
    env = os.environ | {"TMPDIR": str(temporary)}
    soak = subprocess.Popen(command(tmp_path, *options), cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env)
    assert soak.stderr is not None
    assert any("warm-up" in line for line in soak.stderr)
    processes = alive(soak.pid)
    assert len(processes) >= 4  # the soak, the supervisor, the engine and HTTP
    soak.send_signal(signal.SIGINT)
    soak.stderr.read()
    assert soak.wait(60) == 130
    assert until(lambda: not any(map(command_line, processes)), 10)
    assert not list(temporary.glob("zoo-*"))
    shutil.rmtree(temporary)
    result = json.loads((tmp_path / "report" / "soak.json").read_text())
    assert not result["is_complete"] and result["has_failed"]
