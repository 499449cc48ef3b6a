"""`zoo wyoming` with wyoming's own client, the HTTP process, and an engine without a model."""

import asyncio
import gc
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest
from fake_engine import CLONER, FEEDER, MODEL, RATE_HZ, frame
from http_server import Server, until
from shell import zoo
from uploads import upload

pytest.importorskip("wyoming", reason="needs wyoming: pip install -e '.[wyoming]'")

from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncClient
from wyoming.error import Error
from wyoming.event import Event
from wyoming.info import Describe, Info, SelectProgram
from wyoming.ping import Ping, Pong
from wyoming.server import AsyncServer
from wyoming.tts import (
    Synthesize,
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeStopped,
    SynthesizeVoice,
)

from serving.tools.wyoming import Handler, Upstream

DEAF = msgspec.structs.replace(MODEL, id="deaf", voices=[], languages=["auto"], modes=["design"])
SLOW_S = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), models=[MODEL, FEEDER, CLONER, DEAF]) as server:
        upload(server, "anna")
        yield server


@asynccontextmanager
async def bridge(server, path, **options):
    """Run a bridge to the server and yield a client of it."""
    uri = f"unix://{path}/wyoming.sock"
    wyoming = AsyncServer.from_uri(uri)
    await wyoming.start(partial(Handler, Upstream(server.url, options.get("api_key"), ["en"])))
    try:
        async with asyncio.timeout(SLOW_S), AsyncClient.from_uri(uri) as client:
            yield client
    finally:
        await wyoming.stop()


def told(server, path, *events, **options):
    """Send events and return the answers, up to the end of the last synthesis or of the connection."""

    async def ask():
        heard = []
        async with bridge(server, path, **options) as client:
            for event in events:
                await client.write_event(event.event())
            ends = [
                isinstance(event, SynthesizeStop)
                for event in events
                if isinstance(event, Synthesize | SynthesizeStop)
            ]
            last = SynthesizeStopped if any(ends) else AudioStop
            num = sum(ends) if any(ends) else len(ends)
            while num and (event := await client.read_event()) is not None:
                heard.append(event)
                num -= last.is_type(event.type)
        return heard

    return asyncio.run(ask())


def audio(events):
    return b"".join(AudioChunk.from_event(event).audio for event in events if AudioChunk.is_type(event.type))


def types(events):
    """Return the types of events in order, with equal neighbours as one."""
    found = [event.type for event in events]
    return [kind for i, kind in enumerate(found) if i == 0 or found[i - 1] != kind]


def failure(events):
    assert events, "the connection ended without an error"
    return Error.from_event(events[-1]).text


def test_describe(server, tmp_path):
    async def ask():
        async with bridge(server, tmp_path) as client:
            await client.write_event(Describe().event())
            return Info.from_event(await client.read_event())

    programs = {program.name: program for program in asyncio.run(ask()).tts}
    assert list(programs) == ["fake", "feeder", "cloner", "deaf"]
    assert {name: [voice.name for voice in program.voices] for name, program in programs.items()} == {
        "fake": ["vivian", "ryan"],
        "feeder": ["vivian", "ryan"],
        "cloner": ["anna"],
        "deaf": ["default"],
    }
    assert all(program.installed and program.supports_synthesize_streaming for program in programs.values())
    assert {name: program.voices[0].languages for name, program in programs.items()} == {
        name: ["en"] for name in programs
    }


def test_synthesize(server, tmp_path):
    heard = told(server, tmp_path, Synthesize("frames 3", SynthesizeVoice("ryan")))
    assert types(heard) == ["audio-start", "audio-chunk", "audio-stop"]
    start = AudioStart.from_event(heard[0])
    assert (start.rate, start.width, start.channels) == (RATE_HZ, 2, 1)
    assert audio(heard) == frame(0) + frame(1) + frame(2)
    asked = list(server.engine.asked.values())[-1]
    assert asked["voice"] == "ryan" and asked["text"] == "frames 3"


def test_a_connection_can_synthesize_several_texts(server, tmp_path):
    heard = told(server, tmp_path, Synthesize("frames 1"), Synthesize("frames 2", SynthesizeVoice("ryan")))
    assert types(heard) == 2 * ["audio-start", "audio-chunk", "audio-stop"]
    assert audio(heard) == frame(0) + frame(0) + frame(1)
    assert [asked["voice"] for asked in list(server.engine.asked.values())[-2:]] == ["vivian", "ryan"]


def test_the_whole_text_after_chunks_is_ignored(server, tmp_path):
    """Home Assistant sends both. The fake engine speaks a frame for each word that it is fed."""
    chunks = [SynthesizeChunk(text) for text in ("one ", "two ", "three")]
    whole = Synthesize("one two three")  # for programs that do not stream
    program, start = SelectProgram("feeder"), SynthesizeStart(SynthesizeVoice("ryan"))
    heard = told(server, tmp_path, program, start, *chunks, whole, SynthesizeStop())
    assert types(heard) == ["audio-start", "audio-chunk", "audio-stop", "synthesize-stopped"]
    assert audio(heard) == frame(0) + frame(1) + frame(2)


def test_a_model_that_needs_whole_sentences_speaks_chunks_by_sentence(server, tmp_path):
    start, chunks = SynthesizeStart(), [SynthesizeChunk("frames"), SynthesizeChunk(" 2")]
    heard = told(server, tmp_path, start, *chunks, SynthesizeStop())
    assert types(heard) == ["audio-start", "audio-chunk", "audio-stop", "synthesize-stopped"]
    assert audio(heard) == frame(0) + frame(1)


def test_audio_comes_before_the_text_is_complete(server, tmp_path):
    async def ask():
        async with bridge(server, tmp_path) as client:
            for event in (SelectProgram("feeder"), SynthesizeStart(), SynthesizeChunk("one two ")):
                await client.write_event(event.event())
            first = [await client.read_event() for _ in range(2)]
            await client.write_event(SynthesizeStop().event())
            return first

    assert types(asyncio.run(ask())) == ["audio-start", "audio-chunk"]


def test_chunks_without_text_give_no_audio(server, tmp_path):
    heard = told(server, tmp_path, SynthesizeStart(), SynthesizeChunk(" "), SynthesizeStop())
    assert types(heard) == ["synthesize-stopped"]


def test_a_voice_chooses_its_model(server, tmp_path):
    told(server, tmp_path, Synthesize("frames 1", SynthesizeVoice("anna")))
    message = list(server.engine.messages.values())[-1]
    assert message.model == "cloner" and len(message.references) == 1
    told(server, tmp_path, Synthesize("frames 1", SynthesizeVoice("default")))
    message = list(server.engine.messages.values())[-1]
    assert message.model == "deaf" and message.request.voice is None


WRONG = [
    ([Synthesize("frames 1", SynthesizeVoice("nobody"))], "no voice 'nobody'"),
    ([Synthesize(" ")], "the text is empty"),
    ([Synthesize("<speak/>", text_format="ssml")], "is not supported; use plain text"),
    ([SelectProgram("other"), Synthesize("frames 1")], "no program 'other'"),
    ([SynthesizeChunk("x"), SynthesizeStop()], "synthesize-chunk came before"),
    ([SynthesizeStop()], "synthesize-stop came before"),
    ([SynthesizeStart(), SynthesizeStart(), SynthesizeStop()], "came twice"),
    ([Synthesize("silent")], "ended before its first frame"),
    ([Synthesize("fail 0")], "broke"),
    ([Synthesize("fail 2")], "broke"),
]


@pytest.mark.parametrize(("events", "says"), WRONG)
def test_a_failure_is_an_error_and_ends_the_connection(server, tmp_path, events, says):
    heard = told(server, tmp_path, *events)
    assert says in failure(heard) and not any(AudioStop.is_type(event.type) for event in heard)


def test_an_invalid_event_is_an_error(server, tmp_path):
    async def ask():
        async with bridge(server, tmp_path) as client:
            await client.write_event(Event("synthesize", {"words": "x"}))
            return await client.read_event(), await client.read_event()

    error, end = asyncio.run(ask())
    assert "synthesize cannot be read" in failure([error]) and end is None


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\n",
        b"[]\n",
        b"{}\n",
        b'{"type": 5}\n',
        b'{"type": "synthesize", "data": []}\n',
        b'{"type": "synthesize", "data": {"text": 5}}\n',
        b'{"type": "synthesize", "data_length": "5"}\nhello',
        b'{"type": "synthesize", "data_length": 5}\nhello',
        b'{"type": "ping", "payload_length": 1000000000}\n',
        b'{"type": ' + 20_000 * b"[" + b"\n",
        100_000 * b"x" + b"\n",
    ],
)
def test_bytes_that_are_no_event_are_an_error_and_end_the_connection(server, tmp_path, sent):
    async def ask():
        async with bridge(server, tmp_path) as client:
            client._writer.write(sent)
            return await client.read_event(), await client.read_event()

    error, end = asyncio.run(ask())
    assert "cannot be read" in failure([error]) and end is None


@pytest.mark.parametrize("sent", [b'{"type": "syn', b'{"type": "ping", "payload_length": 50}\nabc'])
def test_a_client_that_leaves_within_an_event_leaves_no_error_in_the_log(server, tmp_path, sent, caplog):
    async def ask():
        async with bridge(server, tmp_path) as client:
            client._writer.write(sent)
            client._writer.write_eof()
            return await client.read_event()

    assert asyncio.run(ask()) is None
    gc.collect()
    assert not caplog.records


def test_a_client_that_disconnects_frees_its_slot(server, tmp_path):
    async def ask():
        async with bridge(server, tmp_path) as client:
            await client.write_event(Synthesize("hold 2").event())
            while not AudioChunk.is_type((await client.read_event()).type):
                pass

    before = len(server.engine.cancelled)
    asyncio.run(ask())
    until(lambda: len(server.engine.cancelled) == before + 1)


def test_a_server_with_a_key(tmp_path):
    (tmp_path / "s").mkdir()
    with Server(tmp_path / "s", api_key="sk-key") as server:
        assert audio(told(server, tmp_path, Synthesize("frames 1"), api_key="sk-key")) == frame(0)
        assert "401" in failure(told(server, tmp_path, Synthesize("frames 1")))


def test_a_server_that_is_away(tmp_path):
    class Away:
        url = "http://127.0.0.1:9"

    for asked in (Synthesize("frames 1"), Describe()):
        assert first_failure(Away, tmp_path, asked) == (
            "the speech server at http://127.0.0.1:9 does not answer; is it running?"
        )


def test_a_server_without_an_engine_says_so_in_its_own_words(tmp_path):
    (tmp_path / "s").mkdir()
    with Server(tmp_path / "s") as server:
        server.speak("die")
        until(lambda: server.http.get("/v1/models").status_code == 503)
        said = first_failure(server, tmp_path, Describe())
    assert f"{server.url} answers with status 503: the engine is " in said


def first_failure(server, path, asked):
    async def ask():
        async with bridge(server, path) as client:
            await client.write_event(asked.event())
            return await client.read_event()

    return failure([asyncio.run(ask())])


def test_ping(server, tmp_path):
    async def ask():
        async with bridge(server, tmp_path) as client:
            await client.write_event(Ping("there?").event())
            return Pong.from_event(await client.read_event()).text

    assert asyncio.run(ask()) == "there?"


def test_the_command_refuses_an_invalid_address():
    done = zoo("wyoming", "127.0.0.1:8000")
    assert done.returncode == 2 and "must begin with http://" in done.stderr
