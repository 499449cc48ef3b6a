"""The example clients work with a server of the small voice and stand-ins for chat and transcription."""

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest
import soundfile
from metrics import outcomes
from served import serving

from examples import batch, live_llm, speaking, voice_agent

pytestmark = pytest.mark.slow
RATE_HZ = 24000


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), key=None) as url:
        yield url


class Services(BaseHTTPRequestHandler):
    """A chat server with prepared answers, word by word, and a transcriber with a prepared text."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path.endswith("/transcriptions"):
            return self.answer(json.dumps({"text": self.server.heard}).encode())
        self.server.asked.append(json.loads(body)["messages"])
        words = self.server.answers.pop(0)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client was interrupted
            for word in words.split(" "):
                delta = {"choices": [{"index": 0, "delta": {"content": word + " "}}]}
                self.wfile.write(f"data: {json.dumps(delta)}\n\n".encode())
                time.sleep(0.005)
            self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def answer(self, body):
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def services():
    with ThreadingHTTPServer(("127.0.0.1", 0), Services) as server:
        server.asked, server.answers, server.heard = [], [], ""
        server.url = f"http://127.0.0.1:{server.server_port}/v1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def run(main, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["example", *map(str, arguments)])
    main()


async def said(*parts):
    for part in parts:
        yield part


def collected(parts):
    async def all_of():
        return [one async for one in speaking.sentences(said(*parts))]

    return asyncio.run(all_of())


def test_sentences_come_when_the_next_one_begins():
    assert collected(["Good mor", "ning, Mr. ", "Smith. It ", "is 3.", "5 degrees", ". Yes"]) == [
        "Good morning, Mr. Smith. ",
        "It is 3.5 degrees. ",
        "Yes",
    ]
    assert collected([]) == [] and collected([" "]) == []


def test_letters_that_arrive_in_two_parts_are_read_whole(monkeypatch):
    told = "a" * 4095 + "ö. Gut. ö"

    async def read():
        return "".join([part async for part in live_llm.read()])

    read_end, write_end = os.pipe()
    os.write(write_end, told.encode())
    os.close(write_end)
    with os.fdopen(read_end) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert asyncio.run(read()) == told


def test_a_model_may_be_named_by_an_alias_and_an_unknown_one_is_refused():
    models = {"data": [{"id": "small", "aliases": ["tiny"], "sample_rate_hz": RATE_HZ}]}

    async def rate_hz(name):
        answers = httpx.MockTransport(lambda _: httpx.Response(200, json=models))
        async with httpx.AsyncClient(transport=answers, base_url="http://x") as client:
            return await speaking.sample_rate_hz(client, name)

    assert {asyncio.run(rate_hz(name)) for name in (None, "small", "tiny")} == {RATE_HZ}
    with pytest.raises(SystemExit, match="no model 'large'; possible: small"):
        speaking.run(rate_hz("large"))


def test_an_answer_is_spoken_while_it_is_written(tmp_path, url, services, monkeypatch, capsys):
    services.answers = ["The sea is wide. It has no end."]
    given = [
        "Tell me.",
        "--chat",
        services.url,
        "--server",
        url,
        "--voice",
        "slt",
        "--out",
        tmp_path / "told.wav",
    ]
    run(live_llm.main, monkeypatch, *given)
    samples, rate_hz = soundfile.read(tmp_path / "told.wav")
    assert rate_hz == RATE_HZ and len(samples) > RATE_HZ and np.abs(samples).max() > 0.05
    assert capsys.readouterr().out.strip() == "The sea is wide. It has no end."
    assert services.asked == [[{"role": "user", "content": "Tell me."}]]


def test_the_answer_equals_its_sentences_spoken_one_by_one(tmp_path, url, monkeypatch):
    read_end, write_end = os.pipe()
    os.write(write_end, b"The sea is wide. It has no end.")
    os.close(write_end)
    with os.fdopen(read_end) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        run(
            live_llm.main, monkeypatch, "-", "--server", url, "--voice", "slt", "--out", tmp_path / "told.wav"
        )
    asked = {"voice": "slt", "seed": 1, "response_format": "pcm"}
    alone = b"".join(
        httpx.post(url + "/v1/audio/speech", json={"input": text, **asked}, timeout=60).content
        for text in ("The sea is wide.", "It has no end.")
    )
    told, _ = soundfile.read(tmp_path / "told.wav", dtype="int16")
    assert len(told) == len(alone) // 2


def test_ffplay_gets_the_same_samples_as_a_file(tmp_path, url, services, monkeypatch):
    """A stand-in for ffplay keeps the samples that it is given."""
    player = tmp_path / "ffplay"
    player.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/how\nexec cat > {tmp_path}/played\n')
    player.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    services.answers = ["Good morning."]
    run(live_llm.main, monkeypatch, "Hm?", "--chat", services.url, "--server", url, "--voice", "slt")
    assert f"-f s16le -ar {RATE_HZ}" in (tmp_path / "how").read_text()
    assert (tmp_path / "played").stat().st_size > RATE_HZ


def test_every_line_is_a_file_and_errors_are_reported(tmp_path, url, monkeypatch):
    (tmp_path / "lines.txt").write_text("Good morning.\n\nGood night.\n" + "x" * 9000)
    given = [tmp_path / "lines.txt", tmp_path / "out", "--server", url, "--voice", "slt", "--format", "wav"]
    with pytest.raises(SystemExit, match=r"line 4: .*input has 9000 characters"):
        run(batch.main, monkeypatch, *given)
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["0001.wav", "0003.wav"]
    assert all(soundfile.info(file).duration > 0.3 for file in files)


def test_a_full_server_is_obeyed(tmp_path, monkeypatch):
    answers = [httpx.Response(503, headers={"retry-after": "2"}), httpx.Response(200, content=b"sound")]
    waited = []

    async def sleep(seconds):
        waited.append(seconds)

    monkeypatch.setattr(batch.asyncio, "sleep", sleep)
    client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answers.pop(0)), base_url="http://x")
    asyncio.run(batch.speak(client, "Good morning.", tmp_path / "a.mp3", {}))
    assert waited == [2.0] and (tmp_path / "a.mp3").read_bytes() == b"sound"


def test_an_unreachable_server_is_reported_in_one_line(tmp_path, monkeypatch):
    given = ["Hm?", "--server", "http://127.0.0.1:9", "--out", tmp_path / "told.wav"]
    with pytest.raises(SystemExit, match="ConnectError: All connection attempts failed"):
        run(live_llm.main, monkeypatch, *given)


def test_an_agent_answers_and_is_interrupted(tmp_path, url, services):
    """The second turn is a recording that arrives while the first answer is spoken."""
    services.answers = ["This is a very long answer. " * 12, "Well, good night."]
    services.heard = "Please stop."
    soundfile.write(tmp_path / "turn.wav", np.zeros(RATE_HZ, np.float32), RATE_HZ)
    given = ["--stt", services.url, "--chat", services.url, "--server", url, "--voice", "slt"]
    given = voice_agent.parser().parse_args([*given, "--out", str(tmp_path / "heard.wav")])
    before = outcomes_of(url)

    async def turns():
        yield "Tell me something."
        while not (tmp_path / "heard.wav").stat().st_size > 2 * RATE_HZ:  # some of it was played
            await asyncio.sleep(0.05)
        yield str(tmp_path / "turn.wav")

    agent = asyncio.run(voice_agent.converse(turns(), given))
    system, first, cut, second, last = agent.history
    assert system["role"] == "system" and first["content"] == "Tell me something."
    assert 1 <= cut["content"].count("long answer") < 12  # the part that was not spoken is not remembered
    assert second == {"role": "user", "content": "Please stop."}
    assert last["content"].strip() == "Well, good night."
    assert services.asked[1] == [system, first, cut, second]
    after = outcomes_of(url)
    assert after["cancelled"] > before["cancelled"] and after["failed"] == before["failed"] == 0
    assert soundfile.info(tmp_path / "heard.wav").duration > 1.5


def outcomes_of(url):
    class Asked:
        http = httpx.Client(base_url=url)

    return outcomes(Asked, "small_voice")
