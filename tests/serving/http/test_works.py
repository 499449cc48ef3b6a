"""Long works over HTTP, with a fake engine (fake_engine.py): the first part of each chapter is a command for it."""

import asyncio
import base64
import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
import zipfile

import av
import httpx
import metrics
import msgspec
import pytest
from fake_engine import CLONER, RATE_HZ
from http_server import Server, error, until
from shell import ROOT
from structlog.testing import capture_logs
from uploads import recording
from works_server import TWO, WORKS, add, get, post, started, wait

from serving.books import process as books
from serving.books.manuscript import BOOK, TEXTS
from serving.http.errors import refusal
from serving.http.whole_file import WholeFile
from serving.http.works import process
from serving.http.works.store import Work
from serving.http.works.works import clean_name
from serving.settings import Limits, WorksSettings

RANDOM = msgspec.structs.replace(CLONER, id="random", modes=["clone"], keeps_voice=True)
KEYS = [{"name": "anna", "key": "sk-anna"}, {"name": "bert", "key": "sk-bert"}]


@pytest.fixture
def near(monkeypatch):
    """Read and join in this process, which takes no second to start."""

    async def run(*arguments):
        return await asyncio.to_thread(books.outcome_of, *arguments)

    monkeypatch.setattr(process, "_run", run)


@pytest.fixture
def where(tmp_path):
    return tmp_path / "works"


@pytest.fixture
def server(near, tmp_path, where):
    with started(tmp_path, where) as server:
        yield server


def files(where):
    return sorted(str(path.relative_to(where)) for path in where.rglob("*") if path.is_file())


def many(*commands):
    """Return a text with a part for each command."""
    return "\n\n".join(f"{command} {'x' * 700}" for command in commands)


# The whole way, with the processes that read and join


@pytest.mark.slow
def test_a_document_becomes_a_book_with_chapter_marks(tmp_path, where):
    with started(tmp_path, where) as server:
        id = add(server, TWO, "the old man.md", voice="ryan", options='{"seed": 7, "temperature": 0.5}')
        work = wait(server, id, "complete")
        chapters = work.pop("chapters")
        assert work.pop("created_at") > 1.7e9 and work.pop("num_bytes") > 1000
        assert work == {
            "id": id,
            "title": "the old man",
            "author": None,
            "document": "the old man.md",
            "model": "fake",
            "voice": "ryan",
            "seed": 7,
            "state": "complete",
            "progress": 1,
            "audio_s": pytest.approx(500 * 100 / RATE_HZ + 2),
            "error": None,
            "num_chapters": 2,
            "object": "audio.work",
        }
        assert [(each["number"], each["title"], each["progress"]) for each in chapters] == [
            (1, "frames 300 The sea", 1),
            (2, "frames 200 The door", 1),
        ]
        assert chapters[0]["audio_s"] == pytest.approx(300 * 100 / RATE_HZ + 1)
        asked = list(server.engine.messages.values())
        assert len(asked) == 2 and all(one.listener.is_flexible for one in asked)
        assert all(one.listener.is_reproducible and one.request.seed == 7 for one in asked)
        assert all((one.request.voice, one.request.temperature) == ("ryan", 0.5) for one in asked)
        answer = server.http.get(f"{WORKS}/{id}/book.m4b")
        assert "the%20old%20man.m4b" in answer.headers["content-disposition"]
        with av.open(io.BytesIO(answer.content)) as file:
            assert [mark["metadata"]["title"] for mark in file.chapters()] == [
                each["title"] for each in chapters
            ]
        answer = server.http.get(f"{WORKS}/{id}/chapters/2")
        assert answer.headers["content-type"] == "audio/mp4"
        with av.open(io.BytesIO(answer.content)) as file:
            samples = sum(frame.samples for frame in file.decode(audio=0))
        assert samples / 48_000 == pytest.approx(chapters[1]["audio_s"], abs=0.1)
        assert files(where / id) == ["0001.m4a", "0002.m4a", TEXTS, BOOK, "request.json", "work.json"]
        listed = server.http.get(WORKS).json()
        assert listed["accepts"] == [".epub", ".md", ".markdown", ".txt"]
        [found] = listed["data"]
        assert found["chapters"] is None and found["id"] == id
        assert server.http.delete(f"{WORKS}/{id}").json()["deleted"] and files(where) == []


@pytest.mark.slow
def test_the_process_says_in_one_line_what_it_cannot_read(tmp_path, where):
    with started(tmp_path, where) as server:
        refused = error(post(server, "no", "book.epub"), 400)
        assert refused == {
            "message": "book.epub is not an EPUB: it is not a ZIP file",
            "type": "invalid_request_error",
            "param": "document",
            "code": "invalid_document",
        }
        assert files(where) == []


def test_a_process_ends_with_the_task_that_waits_for_it(tmp_path, monkeypatch):
    """It would wait for the writer of the pipe forever."""
    os.mkfifo(tmp_path / "b.txt")
    started = []
    start = asyncio.create_subprocess_exec

    async def noted(*arguments, **more):
        started.append(await start(*arguments, **more))
        return started[-1]

    async def cancelled():
        reading = asyncio.create_task(process.read(tmp_path / "b.txt", tmp_path, 800))
        while not started:
            await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.wait([reading])
        return reading.cancelled()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    assert asyncio.run(cancelled()) and started[0].returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_process_ends_with_a_server_that_is_killed(tmp_path):
    os.mkfifo(tmp_path / "b.txt")
    command = [sys.executable, "-m", "serving.books.process", "read", tmp_path / "b.txt", tmp_path, "800"]
    reading = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)
    writers = []
    until(lambda: writers.extend(writers_of(tmp_path / "b.txt")) or writers, 10)
    reading.stdin.close()
    assert reading.wait(10) == -signal.SIGTERM
    os.close(writers[0])


def writers_of(pipe):
    """Open a pipe for writing, if a process reads it."""
    try:
        return [os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)]
    except OSError:
        return []


# Restarts


def test_a_restart_continues_where_the_server_stopped(near, tmp_path, where):
    with started(tmp_path, where) as first:
        id = add(first, many("frames 2", "hold 1", "frames 3"))
        until(lambda: get(first, id)["progress"] > 0.6)
        assert get(first, id)["state"] == "speaking" and len(first.engine.asked) == 3
    assert len(files(where)) == 5  # two parts, and what the work is
    (where / id / ".0001-002.flac.part").write_bytes(b"x")
    (where / ".zoo-new-1").mkdir()
    texts = where / id / TEXTS
    texts.write_text(texts.read_text().replace("hold 1", "frames 1"))
    (tmp_path / "again").mkdir()
    with started(tmp_path / "again", where) as second:
        work = wait(second, id, "complete")
        [asked] = second.engine.asked.values()
        assert asked["text"].startswith("frames 1") and asked["seed"] == work["seed"]
        assert work["audio_s"] == pytest.approx(6 * 100 / RATE_HZ + 1)
        assert files(where) == [
            f"{id}/{name}" for name in ("0001.m4a", TEXTS, BOOK, "request.json", "work.json")
        ]


def test_a_chapter_that_was_spoken_but_not_joined_is_joined_after_a_restart(
    near, tmp_path, where, monkeypatch
):
    run = process._run
    monkeypatch.setattr(process, "_run", lambda what, *more: hang() if what == "join" else run(what, *more))
    with started(tmp_path, where) as first:
        id = add(first, "frames 2")
        until(lambda: get(first, id)["progress"] == 1)
        assert get(first, id)["chapters"][0]["audio_s"] is None
    monkeypatch.setattr(process, "_run", run)
    (tmp_path / "again").mkdir()
    with started(tmp_path / "again", where) as second:
        wait(second, id, "complete")
        assert second.engine.asked == {}


async def hang():
    await asyncio.Event().wait()


def test_a_damaged_work_is_left_alone_and_the_others_go_on(near, tmp_path, where, capfd):
    (where / "work_1").mkdir(parents=True)
    (where / "work_1" / "work.json").write_text("{")
    with started(tmp_path, where) as server:
        wait(server, add(server, "frames 1"), "complete")
        assert len(server.http.get(WORKS).json()["data"]) == 1
    assert (where / "work_1" / "work.json").exists()
    assert f"{where / 'work_1'} is damaged" in capfd.readouterr().out


def test_only_one_server_uses_a_directory(server, near, tmp_path, where):
    (tmp_path / "other").mkdir()
    with started(tmp_path / "other", where) as other:
        refused = error(post(other, "frames 1"), 503)
        assert refused["code"] == "works_unavailable" and "another server" in refused["message"]


def test_a_server_takes_the_directory_over_when_the_other_one_ends(near, tmp_path, where, monkeypatch):
    monkeypatch.setattr("serving.http.works.works.OPEN_AGAIN_S", 0.1)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with contextlib.ExitStack() as first:
        id = add(first.enter_context(started(tmp_path / "first", where)), "frames 1")
        with started(tmp_path / "second", where) as second:
            assert error(post(second, "frames 1"), 503)["code"] == "works_unavailable"
            first.close()
            until(lambda: second.app.state.works.problem is None)
            wait(second, id, "complete")


def test_a_disk_that_refuses_is_logged_once_and_tried_again(near, tmp_path, where, monkeypatch):
    tries = []

    def refuse(dir):
        tries.append(dir)
        raise OSError(errno.EROFS, "Read-only file system", f"{dir}/tmp{len(tries)}")

    monkeypatch.setattr("serving.http.works.works.OPEN_AGAIN_S", 0.02)
    with monkeypatch.context() as readonly, capture_logs() as lines:
        readonly.setattr("serving.http.works.store.tempfile.TemporaryFile", refuse)
        with started(tmp_path, where) as server:
            until(lambda: len(tries) > 3)
            message = error(post(server, "frames 1"), 503)["message"]
            assert message == f"works cannot be kept in {where}: Read-only file system"
            readonly.undo()
            until(lambda: server.app.state.works.problem is None)
    assert [line["event"] for line in lines].count("works") == 1


def test_equal_works_give_equal_files(server):
    ids = [add(server, many("frames 9", "frames 3"), options='{"seed": 5}') for _ in range(2)]
    for id in ids:
        wait(server, id, "complete")
    first, second = (server.http.get(f"{WORKS}/{id}/book.m4b").content for id in ids)
    assert first == second and len(first) > 1000


# Deleting, failing and waiting


def test_a_work_is_deleted_in_the_middle_of_its_speech(server, where):
    id = add(server, many("hold 1", "hold 2"))
    after = add(server, "frames 1")
    until(lambda: len(server.engine.asked) == 2)
    assert get(server, after)["state"] == "waiting"
    held = set(server.engine.asked)
    assert server.app.state.server.memory.num_held > 0
    assert server.http.delete(f"{WORKS}/{id}").status_code == 200
    until(lambda: set(server.engine.cancelled) == held)
    wait(server, after, "complete")
    assert {name.split("/")[0] for name in files(where)} == {after}
    assert server.app.state.server.memory.num_held == 0
    assert error(server.http.get(f"{WORKS}/{id}"), 404)["code"] == "work_not_found"


def test_a_part_that_fails_is_named_and_can_be_tried_again(server, where):
    id = add(server, TWO.replace("frames 200", "fail 0"), "b.md")
    work = wait(server, id, "failed")
    assert work["error"] == {
        "message": "chapter 2 ('fail 0 The door'), part 1: the codec broke",
        "type": "server_error",
        "param": None,
        "code": "engine_failed",
    }
    texts = where / id / TEXTS
    texts.write_text(texts.read_text().replace("fail 0", "frames 2"))
    assert server.http.post(f"{WORKS}/{id}/resume").json()["error"] is None
    wait(server, id, "complete")
    num = len(server.engine.asked)
    assert server.http.post(f"{WORKS}/{id}/resume").json()["state"] == "complete"
    assert len(server.engine.asked) == num


def test_what_the_engine_refuses_fails_the_work(server):
    work = wait(server, add(server, "reject temperature"), "failed")
    assert "temperature is not possible" in work["error"]["message"]
    assert work["error"]["param"] == "temperature"


def test_a_part_that_ends_the_engine_twice_is_given_up(server):
    id = add(server, "die")
    until(lambda: server.http.get("/ready").status_code == 503)
    assert get(server, id)["state"] == "speaking"
    server.start_engine()
    work = wait(server, id, "failed")
    assert work["error"]["code"] == "engine_stopped"
    server.start_engine()
    wait(server, add(server, "frames 1"), "complete")


def test_a_work_waits_while_the_engine_is_full(server):
    id = add(server, "full")
    until(lambda: server.engine.asked)
    assert get(server, id)["state"] == "speaking" and get(server, id)["error"] is None
    assert server.http.delete(f"{WORKS}/{id}").status_code == 200


@pytest.mark.parametrize("code", ["model_too_large", "model_not_loaded"])
def test_a_model_that_cannot_be_loaded_fails_the_work(server, monkeypatch, code):
    async def refused(self):
        raise refusal(503, "it cannot be loaded", code=code, retry_after_s=0.001)

    monkeypatch.setattr(WholeFile, "spoken", refused)
    failed = wait(server, add(server, "frames 100"), "failed")
    assert failed["error"]["code"] == code and "part 1: it cannot be loaded" in failed["error"]["message"]


def test_a_full_disk_fails_the_work_and_refuses_new_ones(server, monkeypatch):
    id = add(server, "hold 1")
    until(lambda: server.engine.asked)
    with monkeypatch.context() as patch:
        patch.setattr(Work, "write", full)
        assert error(post(server, "frames 1"), 507)["message"] == "this server's disk is full"
        server.http.delete(f"{WORKS}/{id}")
        patch.setattr(Work, "write", write_but_not(".flac"))
        id = add(server, "frames 1")
        work = wait(server, id, "failed")
        assert "No space left on device" in work["error"]["message"]
    server.http.post(f"{WORKS}/{id}/resume")
    wait(server, id, "complete")


def test_a_join_that_is_killed_fails_the_work_and_does_not_blame_the_disk(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(process, "_run", killed_join(process._run))
        id = add(server, "frames 1")
        problem = wait(server, id, "failed")["error"]
    assert problem["code"] == "join_failed"
    assert "the process that joins speech was killed" in problem["message"]
    server.http.post(f"{WORKS}/{id}/resume")
    wait(server, id, "complete")


def killed_join(run):
    async def killed(what, *arguments):
        return None if what == "join" else await run(what, *arguments)

    return killed


WRITE = Work.write


def full(self, name, content):
    raise OSError(errno.ENOSPC, "No space left on device")


def write_but_not(ending):
    return lambda self, name, content: (full if name.endswith(ending) else WRITE)(self, name, content)


def test_the_limits_of_works(near, tmp_path, where):
    works = WorksSettings(str(where), num=2, document_bytes=50_000, disk_bytes=6000)
    with started(tmp_path, where, works=works, limits=Limits(reference_bytes=1000)) as server:
        assert error(post(server, "x" * 1_200_000), 413)["code"] == "body_too_large"
        assert error(post(server, "x" * 7000), 507)["code"] == "no_room"
        id = add(server, "frames 900 " + "x" * 900)
        work = wait(server, id, "failed")
        assert work["error"]["code"] == "no_room"
        add(server, "hold 1")
        assert error(post(server, "frames 1"), 400)["code"] == "too_many_works"
        server.http.delete(f"{WORKS}/{id}")
        add(server, "frames 1")


def test_a_document_that_is_too_long_is_refused(server, where, monkeypatch):
    monkeypatch.setattr(books, "MAX_CHAPTERS", 1)
    assert "has 2 chapters; a work has up to 1" in error(post(server, TWO, "b.md"), 400)["message"]
    monkeypatch.setattr(books, "MAX_CHARS", 40)
    assert "has 41 characters; a work has up to 40" in error(post(server, "x" * 41), 400)["message"]
    assert "is too long; a work has up to 40" in error(post(server, "x" * 161), 400)["message"]
    assert files(where) == []


def test_a_client_that_leaves_while_its_document_is_read_leaves_nothing(server, where, monkeypatch):
    monkeypatch.setattr(process, "_run", lambda *_: hang())
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(WORKS, files={"document": ("b.txt", b"frames 1")}, timeout=0.3)
    works = server.app.state.works
    until(lambda: works.reading.num_held == works.num_new == 0 and list(where.iterdir()) == [])


# What is refused


@pytest.mark.parametrize(
    ("text", "fields", "param", "says"),
    [
        ("x", {"name": "b.pdf"}, "document", "must end in .epub, .md, .markdown, .txt"),
        (b"\xff\xff", {}, "document", "cannot be read"),
        (" \n * * * \n", {}, "document", "book.txt has no text"),
        ("x", {"options": "{"}, "options", "must be a JSON object"),
        ("x", {"options": "[]"}, "options", "must be a JSON object"),
        ("x", {"options": '{"response_format": "mp3"}'}, "options", "response_format has no meaning"),
        ("x", {"options": '{"speed": 9}'}, "speed", "speed takes the speed"),
        ("x", {"options": '{"no": 9}'}, "no", "there is no field 'no'"),
        ("x", {"voice": "nobody"}, "voice", "nobody"),
        ("x", {"color": "red"}, "color", "there is no field 'color'; the fields are: document, model, voice"),
    ],
)
def test_a_wrong_form_is_refused_in_one_line(server, where, text, fields, param, says):
    refused = error(post(server, text, **fields), 400)
    assert refused["param"] == param and says in refused["message"]
    assert files(where) == [] and server.engine.asked == {}


def test_what_is_not_there_yet_is_refused(server):
    id = add(server, TWO.replace("frames 200", "hold 1"), "b.md")
    until(lambda: get(server, id)["chapters"][0]["audio_s"])
    assert server.http.get(f"{WORKS}/{id}/chapters/1").status_code == 200
    refused = error(server.http.get(f"{WORKS}/{id}/book.m4b"), 409)
    assert refused["code"] == "not_complete" and "% of it is spoken" in refused["message"]
    assert error(server.http.get(f"{WORKS}/{id}/chapters/2"), 409)["code"] == "not_complete"
    assert error(server.http.get(f"{WORKS}/{id}/chapters/3"), 404)["code"] == "chapter_not_found"
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/resume"), ("GET", "/book.m4b")):
        assert error(server.http.request(method, f"{WORKS}/..{path}"), 404)
        assert error(server.http.request(method, f"{WORKS}/no{path}"), 404)["code"] == "work_not_found"


# Metrics


def test_metrics_count_works_by_state(server, where):
    def counted():
        found = metrics.samples(server)
        return {key[1]: int(value) for key, value in found.items() if key[0] == "zoo_works" and value}

    assert counted() == {}
    done = add(server, "frames 3")
    wait(server, done, "complete")
    failing = add(server, "fail 0")
    wait(server, failing, "failed")
    add(server, "hold 1")
    until(lambda: counted() == {"complete": 1, "failed": 1, "speaking": 1})
    add(server, "frames 1")
    assert counted() == {"complete": 1, "failed": 1, "speaking": 1, "waiting": 1}
    [num_bytes] = [value for key, value in metrics.samples(server).items() if key[0] == "zoo_works_bytes"]
    assert num_bytes >= len(server.http.get(f"{WORKS}/{done}/book.m4b").content)
    server.http.delete(f"{WORKS}/{failing}")
    assert "failed" not in counted()


def test_without_beautifulsoup_an_epub_is_refused_with_the_extra(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "bs4", None)
    assert server.http.get(WORKS).json()["accepts"] == [".md", ".markdown", ".txt"]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as book:
        book.writestr("META-INF/container.xml", "<container/>")
    assert "pip install -e '.[books]'" in error(post(server, file.getvalue(), "b.epub"), 400)["message"]


def test_a_server_without_a_directory_keeps_no_works(tmp_path):
    with Server(tmp_path) as server:
        assert server.http.get(WORKS).json() == {"data": [], "accepts": [], "object": "list"}
        refused = error(post(server, "frames 1"), 404)
        assert refused["code"] == "works_off" and "--works-dir" in refused["message"]


def test_a_random_voice_is_refused_and_a_recording_is_spoken_with(near, tmp_path, where):
    with started(tmp_path, where, models=[RANDOM]) as server:
        assert "another voice for each part" in error(post(server, "frames 1"), 400)["message"]
        sample = base64.b64encode(recording()).decode()
        assert "ref_audio" in error(post(server, "x", options='{"ref_audio": "AAAA"}'), 400)["message"]
        id = add(server, "frames 1", options=json.dumps({"ref_audio": sample}))
        wait(server, id, "complete")
        [asked] = server.engine.messages.values()
        assert asked.references[0].clip.duration_s == pytest.approx(2)


def test_a_key_sees_its_own_works_alone(near, tmp_path, where):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(KEYS))
    anna, bert = ({"authorization": f"Bearer sk-{name}"} for name in ("anna", "bert"))
    with started(tmp_path, where, api_keys=str(path)) as server:
        id = post(server, "frames 240", headers=anna).json()["id"]
        assert error(server.http.get(WORKS), 401)
        assert len(server.http.get(WORKS, headers=anna).json()["data"]) == 1
        assert server.http.get(WORKS, headers=bert).json()["data"] == []
        for method in ("GET", "DELETE"):
            refused = error(server.http.request(method, f"{WORKS}/{id}", headers=bert), 404)
            assert refused["code"] == "work_not_found"
        until(lambda: server.http.get(f"{WORKS}/{id}", headers=anna).json()["state"] == "complete")
        key = server.app.state.server.keys.named("anna")
        assert (key.num_chars, round(key.audio_s, 3)) == (10, 1.0)


def test_a_key_without_quota_does_not_delay_the_works_of_others(near, tmp_path, where):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps([{**KEYS[0], "characters_per_day": 1000}, KEYS[1]]))
    anna, bert = ({"authorization": f"Bearer sk-{name}"} for name in ("anna", "bert"))
    with started(tmp_path, where, api_keys=str(path)) as server:
        first = post(server, many(*["frames 100"] * 8), headers=anna).json()["id"]
        second = post(server, "frames 240", headers=bert).json()["id"]
        until(lambda: server.http.get(f"{WORKS}/{second}", headers=bert).json()["state"] == "complete")
        left = server.http.get(f"{WORKS}/{first}", headers=anna).json()
        assert left["state"] == "waiting" and left["error"] is None and 0 < left["progress"] < 1


@pytest.mark.parametrize(
    ("given", "clean"),
    [
        ("../../etc/b.md", "b.md"),
        ("C:\\Books\\b.epub", "b.epub"),
        ("..md", "md"),
        ("", "document"),
        ("a\nb\x00.txt", "ab.txt"),
        ("ü" * 300 + ".txt", "ü" * 60 + ".txt"),
    ],
)
def test_names_of_documents_are_cleaned(given, clean):
    assert clean_name(given) == clean
