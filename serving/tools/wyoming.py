"""A bridge from Home Assistant's Wyoming protocol to a `zoo serve` server. It needs the extra `wyoming`.

    client   describe   synthesize        synthesize-start  synthesize-chunk ...  synthesize-stop
    bridge   info       audio-start audio-chunk ... audio-stop       the same while text arrives, then synthesize-stopped
    server              a session over WS /v1/audio/speech/stream for each connection; an utterance for each synthesis

The server's session speaks text chunks as they arrive. When a client disconnects, the bridge closes its
session, which frees the slot. A failure sends an `error` and closes the connection, because clients wait for
audio until one of the two.
Source: rhasspy/wyoming, README.md; home-assistant/core, homeassistant/components/wyoming/tts.py. The latter
also sends the whole text as `synthesize` before `synthesize-stop`, for programs that do not stream. The
bridge ignores that event.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Annotated, Any

import httpx
import msgspec
import structlog
import websockets.asyncio.client
from websockets.exceptions import InvalidHandshake, InvalidStatus, WebSocketException
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.error import Error
from wyoming.event import Event, Eventable
from wyoming.info import Attribution, Describe, Info, SelectProgram, TtsProgram, TtsVoice
from wyoming.ping import Ping, Pong
from wyoming.server import AsyncEventHandler, AsyncServer
from wyoming.tts import (
    Synthesize,
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeStopped,
    SynthesizeTextFormat,
    SynthesizeVoice,
)

ASK_S = 10.0  # timeout for answers that the server gives immediately
WIDTH = 2  # bytes of a sample
MAX_EVENT_BYTES = 1 << 20  # of the data of an event, and of its payload
ATTRIBUTION = Attribution("speechzoo", "https://pypi.org/project/speechzoo/")
ANY_VOICE = "default"  # stands for the voice of a model without named voices
# Our names of languages, and the BCP 47 codes that Home Assistant uses. A dialect counts as its language.
LANGUAGES = {
    "chinese": "zh",
    "english": "en",
    "french": "fr",
    "german": "de",
    "italian": "it",
    "japanese": "ja",
    "korean": "ko",
    "portuguese": "pt",
    "russian": "ru",
    "spanish": "es",
}

log = structlog.get_logger()


class Refused(Exception):
    """A synthesis is not possible; the message says why."""


class Upstream:
    """The speech server. languages: BCP 47 codes for models that do not list their languages."""

    def __init__(self, url: str, api_key: str | None, languages: Sequence[str]):
        self.url = url.rstrip("/")
        self.languages = list(languages)
        self.headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}

    async def programs(self) -> list[TtsProgram]:
        """Return a program for each model. Raises Refused."""
        try:
            async with httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=ASK_S) as client:
                answers = [await client.get(path) for path in ("/v1/models", "/v1/audio/voices")]
        except httpx.HTTPError:
            raise self._unreachable() from None
        for answer in answers:
            if answer.is_error:
                raise self._refusal(answer.status_code, answer.content)
        try:
            models, voices = (answer.json()["data"] for answer in answers)
        except (KeyError, TypeError, ValueError):
            raise Refused(f"{self.url} is not a server that zoo serve runs") from None
        return [self._program(model, voices) for model in models]

    def _unreachable(self) -> Refused:
        return Refused(f"the speech server at {self.url} does not answer; is it running?")

    def _refusal(self, status: int, body: bytes) -> Refused:
        """Return the error of an answer. body: in OpenAI's shape, if the server is ours."""
        try:
            why = msgspec.json.decode(body, type=Answer).error.message
        except msgspec.MsgspecError:
            why = HTTPStatus(status).phrase if status in list(HTTPStatus) else "it gives no reason"
        return Refused(f"the speech server at {self.url} answers with status {status}: {why}")

    def _program(self, model: Mapping[str, Any], voices: Sequence[Mapping[str, Any]]) -> TtsProgram:
        names = [voice["id"] for voice in voices if model["id"] in voice["models"]] or [ANY_VOICE]
        spoken = [LANGUAGES[name] for name in model["languages"] if name in LANGUAGES] or self.languages
        facts: dict[str, Any] = {
            "attribution": ATTRIBUTION,
            "installed": True,
            "version": version("speechzoo"),
        }
        return TtsProgram(
            name=model["id"],
            description=f"{model['family']} {model['variant']}",
            voices=[TtsVoice(name=name, description=name, languages=spoken, **facts) for name in names],
            supports_synthesize_streaming=True,
            **facts,
        )

    async def connect(self) -> websockets.asyncio.client.ClientConnection:
        """Connect to a new session. Raises Refused."""
        url = "ws" + self.url.removeprefix("http") + "/v1/audio/speech/stream"
        try:
            return await websockets.asyncio.client.connect(
                url, additional_headers=self.headers, max_size=None, proxy=None, open_timeout=ASK_S
            )
        except InvalidStatus as error:
            raise self._refusal(error.response.status_code, bytes(error.response.body or b"")) from None
        except (InvalidHandshake, OSError, TimeoutError):
            raise self._unreachable() from None


class Handler(AsyncEventHandler):
    """A connection of a client. It handles events one after the other and sends audio at the same time."""

    def __init__(self, upstream: Upstream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        super().__init__(reader, writer)
        self.upstream = upstream
        self.program: str | None = None  # the program that the client chose
        self.socket: websockets.asyncio.client.ClientConnection | None = None
        self.hearing: asyncio.Task[None] | None = None
        self.configured: asyncio.Future[None] | None = None
        self.is_streaming = self.has_text = False  # between synthesize-start and -stop
        self.open: deque[bool] = deque()  # for each open utterance, whether its text came in chunks
        self.sending = asyncio.Lock()  # keeps an event's line and its data together

    async def run(self) -> None:
        """Handle events until the client disconnects, or until one fails or cannot be read."""
        try:
            while (event := await next_event(self.reader)) is not None and await self.handle_event(event):
                pass
        except Refused as error:
            await self._fail(str(error))
        except OSError:
            pass  # the client has disconnected
        finally:
            await self.disconnect()
            self.writer.close()

    async def write_event(self, event: Event) -> None:
        async with self.sending:
            await super().write_event(event)

    async def handle_event(self, event: Event) -> bool:
        try:
            await self._take(event)
        except (Refused, WebSocketException, OSError, TimeoutError) as error:
            await self._fail(str(error) or type(error).__name__)
            return False
        return True

    async def _take(self, event: Event) -> None:
        """Raises Refused, WebSocketException, OSError, TimeoutError."""
        if Describe.is_type(event.type):
            await self.write_event(Info(tts=await self.upstream.programs()).event())
        elif Ping.is_type(event.type):
            await self.write_event(Pong(text=Ping.from_event(event).text).event())
        elif SelectProgram.is_type(event.type):
            self.program = read(SelectProgram, event).name
        elif SynthesizeStart.is_type(event.type):
            if self.is_streaming:
                raise Refused("synthesize-start came twice; send synthesize-stop before the next one")
            start = read(SynthesizeStart, event)
            await self._configure(start.voice, start.text_format)
            self.is_streaming = True
            self.has_text = False
        elif SynthesizeChunk.is_type(event.type):
            if not self.is_streaming:
                raise Refused("synthesize-chunk came before synthesize-start")
            await self._say(read(SynthesizeChunk, event).text)
        elif SynthesizeStop.is_type(event.type):
            await self._stop()
        elif Synthesize.is_type(event.type) and not self.is_streaming:
            whole = read(Synthesize, event)
            if not whole.text.strip():
                raise Refused("the text is empty")
            await self._configure(whole.voice, whole.text_format)
            self.open.append(False)
            await self._send(type="input.text", text=whole.text)
            await self._send(type="input.done")

    async def _say(self, text: str) -> None:
        if not self.has_text and not text.strip():
            return
        if not self.has_text:
            self.open.append(True)
            self.has_text = True
        await self._send(type="input.text", text=text)

    async def _stop(self) -> None:
        if not self.is_streaming:
            raise Refused("synthesize-stop came before synthesize-start")
        self.is_streaming = False
        if self.has_text:
            await self._send(type="input.done")
        else:
            await self.write_event(SynthesizeStopped().event())

    async def _configure(
        self, voice: SynthesizeVoice | None, text_format: str | SynthesizeTextFormat | None
    ) -> None:
        """Open the session if needed, and configure it for the next utterance. Raises Refused."""
        if text_format not in (None, SynthesizeTextFormat.TEXT):
            raise Refused(f"text format {text_format!r} is not supported; use plain text")
        if self.socket is None:
            self.socket = await self.upstream.connect()
            self.hearing = asyncio.create_task(self._hear(self.socket))
        self.configured = asyncio.get_running_loop().create_future()
        await self._send(type="session.config", **await self._chosen(voice))
        async with asyncio.timeout(ASK_S):
            await self.configured

    async def _chosen(self, voice: SynthesizeVoice | None) -> dict[str, str]:
        """Choose a model and a voice from what the client named. Raises Refused."""
        programs = await self.upstream.programs()
        name = None if voice is None else voice.name
        if self.program is not None:
            programs = [program for program in programs if program.name == self.program]
        elif name is not None:  # prefer a model that has this voice
            programs = [p for p in programs if name in [v.name for v in p.voices]] or programs
        if not programs:
            raise Refused(f"there is no program {self.program!r}; describe lists the programs")
        program = programs[0]
        first = program.voices[0].name
        if name is None and (len(program.voices) > 1 or first != ANY_VOICE):
            name = first
        asked = {} if name in (None, ANY_VOICE) else {"voice": str(name)}
        return {"model": program.name, **asked}

    async def _send(self, **message: str) -> None:
        assert self.socket is not None, "text came before a session was opened"
        await self.socket.send(json.dumps(message))

    async def _hear(self, socket: websockets.asyncio.client.ClientConnection) -> None:
        """Forward the session's messages as events. When the session ends, close the connection."""
        rate_hz = 0  # sample rate of the current utterance; 0: there is none
        why = "the server closed the session"
        with suppress(WebSocketException, OSError):
            async for message in socket:
                if isinstance(message, bytes):
                    await self._tell(AudioChunk(rate=rate_hz, width=WIDTH, channels=1, audio=message))
                    continue
                event = json.loads(message)
                match event["type"]:
                    case "session.configured":
                        assert self.configured is not None, "the session was configured without a request"
                        self.configured.set_result(None)
                    case "audio.start":
                        rate_hz = event["sample_rate"]
                        await self._tell(AudioStart(rate=rate_hz, width=WIDTH, channels=1))
                    case "audio.done" if not rate_hz:
                        why = "the model generated no audio for this text"
                        break
                    case "audio.done":
                        rate_hz = 0
                        await self._end()
                    case "error":
                        why = event["error"]["message"]
                        break
        if self.configured is not None and not self.configured.done():
            self.configured.set_exception(Refused(why))  # `_configure` waits for it and reports the error
        else:
            await self._fail(why)
            self.writer.close()

    async def _end(self) -> None:
        await self._tell(AudioStop())
        if self.open.popleft():
            await self._tell(SynthesizeStopped())

    async def _tell(self, event: Eventable) -> None:
        await self.write_event(event.event())

    async def _fail(self, why: str) -> None:
        log.warning("wyoming", error=why)
        with suppress(OSError):
            await self._tell(Error(why))

    async def disconnect(self) -> None:
        """Close the session after the client disconnected or the connection was closed."""
        if self.hearing is not None:
            self.hearing.cancel()
        if self.socket is not None:
            await self.socket.close()


class Reason(msgspec.Struct):
    message: str


class Answer(msgspec.Struct):
    """An error of the speech server."""

    error: Reason


class Head(msgspec.Struct):
    """The first line of an event. More of its data, and a payload, may follow the line."""

    type: str
    data: dict[str, Any] | None = None
    data_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_EVENT_BYTES)] | None = None
    payload_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_EVENT_BYTES)] | None = None


async def next_event(reader: asyncio.StreamReader) -> Event | None:
    """Return the next event of a client, or None if it has disconnected. wyoming's own function reads a payload of
    any length, and leaves most errors to its caller. Raises Refused, OSError."""
    try:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            return None
        head = msgspec.json.decode(line, type=Head)
        more = await reader.readexactly(head.data_length or 0) or b"{}"
        data = (head.data or {}) | msgspec.json.decode(more, type=dict[str, Any])
        return Event(head.type, data, await reader.readexactly(head.payload_length or 0) or None)
    except asyncio.IncompleteReadError:
        return None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refused(f"an event cannot be read: {error}") from None


def read(kind: type[Any], event: Event) -> Any:
    """Return an event's fields. Raises Refused."""
    if not isinstance(event.data.get("text", ""), str):
        raise Refused(f"{event.type} cannot be read: its text is not a string")
    try:
        return kind.from_event(event)
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{event.type} cannot be read: {type(error).__name__} {error}") from None


def serve(uri: str, upstream: Upstream) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises ValueError if the address cannot be used."""
    try:
        asyncio.run(AsyncServer.from_uri(uri).run(partial(Handler, upstream)))
    except OSError as error:
        raise ValueError(f"cannot listen on {uri}: {error.strerror or error}") from None
