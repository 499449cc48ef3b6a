"""One function for each kind of client. It sends a request, and returns how it ended if that is right.

Every function raises Wrong if the answer is not what was promised, and Refused if the server refused. An
answer that breaks off raises aiohttp's errors.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from serving.tools.load.client import Target, connections
from tests.soak import answers, conversations, demand, hostile
from tests.soak.answers import NO_STATUS, Refused, Wrong
from tests.soak.cases import TRANSCRIPT, Case, sample, speakable
from tests.soak.conversations import Talk
from tests.soak.demand import OnDemand
from tests.soak.works import Library, Volume

SPEECH = "/v1/audio/speech"
WITHIN_S = 300.0  # a request must end, also a flexible one that waits through two overloads
CALLED_S = 30.0  # a request without speech must end
READ_BYTES = 8192  # of a slow reader, ten times a second
SLOWLY_S = 4.0  # a slow reader reads slowly for this long
DEAF_S = 8.0  # longer than the server's --max-stall
MAX_BATCH = 4


@dataclass
class Heard:
    """A request that ended as it should. ttfa_s: until the first bytes of a listener's audio."""

    how: str
    ttfa_s: float | None = None


@dataclass(frozen=True)
class Material:
    """What the clients of a soak ask for, and the first answers to it. volume, demand: None if the soak has no
    works, or no models on demand."""

    cases: Sequence[Case]
    corpus: hostile.Corpus
    talks: Sequence[Talk] = ()
    volume: Volume | None = None
    demand: OnDemand | None = None

    @property
    def abilities(self) -> frozenset[str]:
        """Return what `Kind.needs` may be."""
        has = {"answers": bool(self.talks), "works": self.volume, "on demand": self.demand}
        return frozenset(name for name, value in has.items() if value)


class Client:
    """Sends the requests of a soak."""

    library: Library

    def __init__(self, url: str, material: Material):
        self.url, self.material = url, material
        cases, self.corpus = material.cases, material.corpus
        self.talks = material.talks
        self.short = speakable(cases)
        self.long = speakable(cases, is_long=True)
        self.in_session = [case for case in cases if case.session is not None]
        self.kept = [case for case in cases if case.has_kept_voice and case.form == "pcm"]
        self.target = Target(url + "/v1")

    async def __aenter__(self) -> Client:
        self.usual_context = connections(self.target)
        self.slow_context = connections(self.target, is_slow=True)
        self.session = await self.usual_context.__aenter__()
        self.slow_session = await self.slow_context.__aenter__()
        if self.material.volume is not None:
            self.library = Library(self.session, self.url, self.material.volume)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.usual_context.__aexit__(*error)
        await self.slow_context.__aexit__(*error)

    # --- listeners ---

    async def file(self, case: Case) -> Heard:
        """Ask for a whole file, which must be the first answer again."""
        _, data = await self.posted(case.body | {"stream": False})
        answers.check_file(case.form, data, case.first, is_exact=case.is_exact)
        return Heard("whole")

    async def stream(self, case: Case, **fields: Any) -> Heard:
        ttfa_s, data = await self.posted(case.body | fields)
        answers.check_stream(case.form, data, case.first)
        return Heard("whole", ttfa_s)

    async def events(self, case: Case) -> Heard:
        times = {"timestamp_granularities": ["segment"]} if case.has_times else {}
        _, data = await self.posted(case.body | {"stream_format": "sse"} | times)
        events = [json.loads(line.removeprefix("data: ")) for line in data.decode().splitlines() if line]
        kinds = [event["type"] for event in events]
        if not kinds or kinds[-1] not in ("speech.audio.done", "error"):
            raise Wrong(f"events without a last event: {kinds[-3:]}")
        if kinds[-1] == "error":
            raise answers.refusal(NO_STATUS, events[-1]["error"])
        if case.has_times and "speech.audio.segment" not in kinds:
            raise Wrong("no segment's times")
        audio = [event["audio"] for event in events if event["type"] == "speech.audio.delta"]
        answers.check_stream(case.form, b"".join(map(base64.b64decode, audio)), case.first)
        return Heard("whole")

    async def batch(self, cases: Sequence[Case]) -> Heard:
        body = {"items": [case.body for case in cases]}
        _, data = await self.posted(body, path=SPEECH + "/batch")
        entries = json.loads(data)["data"]
        if len(entries) != len(cases):
            raise Wrong(f"{len(entries)} entries for {len(cases)} items")
        refused = [
            answers.refusal(NO_STATUS, entry["error"]) for entry in entries if entry["error"] is not None
        ]
        for entry, case in zip(entries, cases, strict=True):
            if entry["error"] is None:
                audio = base64.b64decode(entry["audio"])
                answers.check_file(case.form, audio, case.first, is_exact=case.is_exact)
        if refused:
            raise refused[0]
        return Heard("whole")

    async def posted(self, body: object, path: str = SPEECH) -> tuple[float, bytes]:
        """Return the seconds until the first bytes, and all bytes. Raises Refused and Wrong."""
        began_s, ttfa_s, data = time.monotonic(), 0.0, bytearray()
        async with self.session.post(self.url + path, json=body) as answer:
            async for part in answer.content.iter_any():
                ttfa_s = ttfa_s or time.monotonic() - began_s
                data += part
            check_status(answer, bytes(data))
        return ttfa_s, bytes(data)

    async def slow(self, case: Case) -> Heard:
        """Read slowly at first. The answer must be whole all the same."""
        data = bytearray()
        async with self.slow_session.post(self.url + SPEECH, json=case.body) as answer:
            if answer.status == 200:
                end_s = time.monotonic() + SLOWLY_S
                while time.monotonic() < end_s and (part := await answer.content.read(READ_BYTES)):
                    data += part
                    await asyncio.sleep(0.1)
            data += await answer.content.read()
            check_status(answer, bytes(data))
        answers.check_stream(case.form, bytes(data), case.first)
        return Heard("whole")

    # --- clients that leave ---

    async def leave(self, case: Case, stage: str) -> Heard:
        """Disconnect at a stage of a stream. What has arrived must be its beginning."""
        wanted = {"headers": 0, "first audio": 1, "later": len(case.first) // 3}[stage]
        data = bytearray()
        async with self.session.post(self.url + SPEECH, json=case.body) as answer:
            if answer.status != 200:
                check_status(answer, await answer.read())
            while len(data) < wanted and (part := await answer.content.readany()):
                data += part
        if case.form == "pcm":
            answers.check_beginning(bytes(data), case.first)
        return Heard("disconnected")

    async def leave_soon(self, cases: Sequence[Case], form: str, after_s: float) -> Heard:
        """Disconnect after a moment, from an answer of any form."""
        [first, *_] = cases
        posts: dict[str, tuple[str, dict[str, Any]]] = {
            "stream": (SPEECH, first.body),
            "file": (SPEECH, first.body | {"stream": False}),
            "events": (SPEECH, first.body | {"stream_format": "sse"}),
            "batch": (SPEECH + "/batch", {"items": [case.body for case in cases]}),
        }
        path, body = posts[form]
        try:
            async with asyncio.timeout(after_s):
                await self.posted(body, path=path)
        except TimeoutError:
            return Heard("disconnected")
        return Heard("whole")

    async def deaf(self, case: Case) -> Heard:
        """Read nothing for some seconds, then disconnect."""
        async with self.slow_session.post(self.url + SPEECH, json=case.body) as answer:
            if answer.status != 200:
                check_status(answer, await answer.read())
            await asyncio.sleep(DEAF_S)
        return Heard("disconnected")

    # --- text in portions ---

    async def portions(self, case: Case, chance: random.Random) -> Heard:
        """Send a text in random portions, twice in a session."""
        assert case.session is not None, case.name
        async with self.session.ws_connect(self.url + SPEECH + "/stream") as socket:
            await socket.send_json({"type": "session.config", **case.session})
            for _ in range(chance.choice((1, 2))):
                for text in cut(case.body["input"], chance):
                    await socket.send_json({"type": "input.text", "text": text})
                    await asyncio.sleep(chance.choice((0, 0, 0.02)))
                await socket.send_json({"type": "input.done"})
                done, data = await spoken(socket)
                if done["reason"] not in ("stop", "length"):
                    raise Wrong(f"the utterance ended with {done['reason']}")
                answers.check_stream(case.form, data, case.first)
        return Heard("whole")

    async def cancel(self, case: Case, stage: str, chance: random.Random) -> Heard:
        """Cancel an utterance over the WebSocket, or close the socket, at a stage."""
        assert case.session is not None, case.name
        async with self.session.ws_connect(self.url + SPEECH + "/stream") as socket:
            await socket.send_json({"type": "session.config", **case.session})
            await socket.send_json({"type": "input.text", "text": case.body["input"]})
            if stage in ("first audio", "later"):
                await socket.send_json({"type": "input.done"})
                await spoken(socket, until_first=True)
            else:
                await asyncio.sleep(0.3 * chance.random())
            if chance.random() < 0.5:
                await socket.send_json({"type": "input.cancel"})
                await spoken(socket)
        return Heard("disconnected")

    # --- uploaded voices ---

    async def life_of_a_voice(self, case: Case, name: str) -> Heard:
        """Upload a voice, speak in it, rename it, speak again, look at it and delete it."""
        as_new = Case(**vars(case) | {"body": case.body | {"voice": name}})
        renamed = Case(**vars(case) | {"body": case.body | {"voice": name + "-renamed"}})
        await self.uploaded(name, *sample(0))
        try:
            await self.file(as_new)
            path = f"/v1/audio/voices/{name}"
            await self.called("PATCH", path, {"name": name + "-renamed"})
            name += "-renamed"
            await self.stream(renamed)
            await self.called("GET", f"/v1/audio/voices/{name}/preview")
        finally:
            await self.called("DELETE", f"/v1/audio/voices/{name}")
        try:
            await self.file(renamed)
        except Refused as refused:
            if refused.status in (400, 404):
                return Heard("whole")
            raise
        raise Wrong("a deleted voice speaks")

    async def uploaded(self, name: str, file_name: str, data: bytes) -> None:
        form = aiohttp.FormData({"name": name, "ref_text": TRANSCRIPT})
        form.add_field("audio_sample", data, filename=file_name)
        async with self.session.post(self.url + "/v1/audio/voices", data=form) as answer:
            check_status(answer, await answer.read())

    async def called(self, method: str, path: str, body: object = None) -> bytes:
        """Return the content of an answer that is not speech. Raises Refused, Wrong and TimeoutError."""
        async with (
            asyncio.timeout(CALLED_S),
            self.session.request(method, self.url + path, json=body) as answer,
        ):
            data = await answer.read()
            check_status(answer, data)
            return data

    # --- models that answer, works, models on demand ---

    async def answer(self, talk: Talk) -> Heard:
        await conversations.answered(self.session, self.url, talk)
        return Heard("whole")

    async def answer_in_stream(self, talk: Talk) -> Heard:
        await conversations.answered_in_stream(self.session, self.url, talk)
        return Heard("whole")

    async def leave_answer(self, talk: Talk) -> Heard:
        await conversations.leave_answer(self.session, self.url, talk)
        return Heard("disconnected")

    async def work(self, chance: random.Random) -> Heard:
        return Heard(await self.library.work(chance))

    async def deleted_work(self, chance: random.Random) -> Heard:
        return Heard(await self.library.deleted(chance))

    async def abandoned_work(self, after_s: float) -> Heard:
        return Heard(await self.library.abandoned(after_s))

    async def on_demand(self, model: str) -> Heard:
        assert self.material.demand is not None, "no models on demand"
        await demand.speak(self.session, self.material.demand, model)
        return Heard("whole")

    # --- hostile clients ---

    async def damaged(self, index: int, case: Case) -> Heard:
        """Send a damaged recording with a request or as an upload: it is refused, or it is spoken in."""
        data = self.corpus.recordings[index % len(self.corpus.recordings)]
        try:
            if index % 3 == 0:
                await self.uploaded(f"hostile-{index}", "voice.wav", data)
                await self.called("DELETE", f"/v1/audio/voices/hostile-{index}")
            else:
                body = {key: value for key, value in case.body.items() if key != "voice"}
                recording = {"ref_audio": base64.b64encode(data).decode(), "ref_text": TRANSCRIPT}
                _, audio = await self.posted(body | recording)
                if not audio:
                    raise Wrong("200 without audio")
        except Refused as refused:
            return as_expected(refused, (400, 413, 422))
        return Heard("taken")

    async def invalid(self, index: int) -> Heard:
        """Send a body that the OpenAPI schema does not allow."""
        path, body = self.corpus.bodies[index % len(self.corpus.bodies)]
        try:
            await self.posted(body, path=path)
        except Refused as refused:
            return as_expected(refused, (400, 413, 422, 404))
        return Heard("taken")

    async def broken_http(self, index: int) -> Heard:
        return Heard(await hostile.break_http(self.url, index))

    async def broken_session(self, index: int) -> Heard:
        """Send wrong messages over a WebSocket. The server answers each with an error, or closes."""
        async with self.session.ws_connect(self.url + SPEECH + "/stream") as socket:
            message = hostile.MESSAGES[index % len(hostile.MESSAGES)]
            await (socket.send_bytes if isinstance(message, bytes) else socket.send_str)(message)
            async with asyncio.timeout(WITHIN_S):
                answer = await socket.receive()
            if answer.type is aiohttp.WSMsgType.TEXT:
                refused = answers.refusal(NO_STATUS, json.loads(answer.data).get("error"))
                return Heard(f"refused: {refused.code}")
            if answer.type not in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED):
                raise Wrong(f"{answer.type.name} after a wrong message")
        return Heard("closed")


def as_expected(refused: Refused, statuses: Sequence[int]) -> Heard:
    if refused.status in statuses:
        return Heard("refused")
    raise refused


def check_status(answer: aiohttp.ClientResponse, data: bytes) -> None:
    """Raises Refused or Wrong if the status is not one of success."""
    answers.check_status(answer.status, data, answer.headers.get("retry-after"))


def cut(text: str, chance: random.Random) -> list[str]:
    """Return the text in random portions."""
    places = sorted(chance.sample(range(1, len(text)), chance.choice((0, 1, 4, 12))))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


async def spoken(
    socket: aiohttp.ClientWebSocketResponse, *, until_first: bool = False
) -> tuple[dict[str, Any], bytes]:
    """Return an utterance's last event and its audio. Raises Refused, Wrong and ConnectionError."""
    data = b""
    async with asyncio.timeout(WITHIN_S):
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                data += message.data
                if until_first:
                    return {}, data
                continue
            if message.type is not aiohttp.WSMsgType.TEXT:
                break
            event = json.loads(message.data)
            if event["type"] == "audio.done":
                return event, data
            if event["type"] == "error":
                raise answers.refusal(NO_STATUS, event["error"])
    raise ConnectionError(f"the server closed the session with code {socket.close_code}")
