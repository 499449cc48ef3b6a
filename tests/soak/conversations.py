"""The distinct questions to models that answer, and clients that ask them over chat completions."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import aiohttp
import httpx

from benchmarks.clones import recording
from tests.soak import answers
from tests.soak.answers import NO_STATUS, Wrong, check_status
from tests.soak.cases import KEPT, REFERENCE_S

CHAT = "/v1/chat/completions"
QUESTION, NEXT_QUESTION = "What is the sea like?", "And at night?"
MAX_TOKENS = 24  # of an answer: what a tiny Bagpiper can write at most
KEEPS_ANSWERS = ("glm4_voice", "step_audio2")  # families whose next turn may name an answer


class Answer(NamedTuple):
    """What a model said. audio: a file or a stream; None: it was asked for text alone."""

    text: str
    audio: bytes | None
    reason: str
    audio_id: str | None = None


@dataclass(frozen=True)
class Talk:
    """A question. first: the answer that the server gave at first; then: the one to the next question, which
    names the first answer, or None if the model does not keep its answers."""

    name: str
    body: dict[str, Any]
    is_exact: bool
    first: Answer | None = None
    then: Answer | None = None

    @property
    def form(self) -> str:
        return str(self.body["audio"]["format"]) if "audio" in self.body else "none"

    @property
    def may_stream(self) -> bool:
        return self.form in ("none", "pcm16")

    def next_body(self, audio_id: str) -> dict[str, Any]:
        """Return the request of the next turn, which names the answer instead of repeating it."""
        named = {"role": "assistant", "audio": {"id": audio_id}}
        asked = {"role": "user", "content": NEXT_QUESTION}
        return self.body | {"messages": [*self.body["messages"], named, asked]}


def talks_of(model: dict[str, Any]) -> Iterator[Talk]:
    """Yield the questions to a model that answers: in text and with a clip, answered in text and in audio."""
    heard = {"data": recording(6, REFERENCE_S).partition(",")[2], "format": "wav"}
    contents = {"text": QUESTION, "clip": [{"type": "input_audio", "input_audio": heard}]}
    voices = [*model["voices"][-1:], *(KEPT[:1] if "clone" in model["modes"] else ())]
    spoken = [{"format": form, "voice": "any"} for form in ("pcm16", "mp3")]
    spoken += [{"format": "pcm16", "voice": voice} for voice in voices]
    for what, content in contents.items():
        yield talk(model, f"{what} to text", content, seed=100)
        for number, audio in enumerate(spoken, 101):
            name = f"{what} to {audio['format']}, {audio['voice']}"
            yield talk(model, name, content, seed=number, modalities=["text", "audio"], audio=audio)


def talk(model: dict[str, Any], name: str, content: object, **fields: Any) -> Talk:
    body = {
        "model": model["id"],
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": MAX_TOKENS,
        **fields,
    }
    return Talk(f"{model['id']} {name}", body, is_exact=True)


def record_talks(client: httpx.Client) -> list[Talk]:
    """Return every question with its first answer. The kept voices are there already."""
    found = []
    for model in client.get("/v1/models").json()["data"]:
        for each in talks_of(model) if model["answers"] else ():
            first = answer_of(asked(client, each.name, each.body), each)
            then = None
            if first.audio_id is not None and model["family"] in KEEPS_ANSWERS:
                then = answer_of(asked(client, each.name, each.next_body(first.audio_id)), each)
            found.append(replace(each, first=first, then=then))
    return found


def asked(client: httpx.Client, name: str, body: dict[str, Any]) -> bytes:
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, f"{name}: {answer.text}"
    return answer.content


def answer_of(data: bytes, of: Talk) -> Answer:
    """Return the answer in a whole chat completion. Raises Wrong."""
    answer = json.loads(data)
    [choice] = answer["choices"]
    message, reason = choice["message"], choice["finish_reason"]
    check_usage(answer["usage"])
    if of.form == "none":
        return Answer(message["content"], None, reason)
    audio = message["audio"]
    if message["content"] is not None:
        raise Wrong("content next to audio")
    return Answer(audio["transcript"], base64.b64decode(audio["data"]), reason, audio["id"])


def check_usage(usage: dict[str, Any]) -> None:
    """Raise Wrong if the numbers of tokens do not add up."""
    prompt, answer = usage["prompt_tokens_details"], usage["completion_tokens_details"]
    parts = [prompt["text_tokens"], prompt["audio_tokens"], answer["text_tokens"], answer["audio_tokens"]]
    if min(parts) < 0 or usage["prompt_tokens"] != sum(parts[:2]) or usage["total_tokens"] != sum(parts):
        raise Wrong(f"the usage does not add up: {usage}")


def streamed_answer(data: bytes, of: Talk) -> Answer:
    """Return the answer in the chunks of a whole stream. Raises Refused, Wrong."""
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if events and "error" in events[-1]:
        raise answers.refusal(NO_STATUS, events[-1]["error"])
    if not lines or lines[-1] != "[DONE]":
        raise Wrong(f"chunks without an end: {lines[-1:]}")
    text, parts, id, reason = "", [], None, None
    for event in events:
        [choice] = event["choices"]
        delta = choice["delta"]
        audio = delta.get("audio", {})
        text += audio.get("transcript", delta.get("content", ""))
        parts.append(base64.b64decode(audio.get("data", "")))
        id, reason = audio.get("id", id), choice["finish_reason"]
    return Answer(text, None if of.form == "none" else b"".join(parts), str(reason), id)


def check_answer(heard: Answer, first: Answer, of: Talk, *, is_stream: bool = False) -> None:
    """Compare an answer with the first one. Raises Wrong."""
    if (heard.text, heard.reason) != (first.text, first.reason):
        said = f"{heard.reason}: {heard.text[:80]!r}"
        raise Wrong(f"{said}; the first answer was {first.reason}: {first.text[:80]!r}")
    if heard.audio is None or first.audio is None:
        if heard.audio is not first.audio:
            raise Wrong("audio is missing, or was not asked for")
        return
    if heard.audio == first.audio:  # which may be empty: a tiny model writes text alone
        return
    form = "pcm" if of.form == "pcm16" else of.form
    if is_stream:
        answers.check_stream(form, heard.audio, first.audio)
    else:
        answers.check_file(form, heard.audio, first.audio, is_exact=of.is_exact)


# --- clients ---


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> bytes:
    """Return the content of an answer. Raises Refused and Wrong."""
    async with session.post(url + CHAT, json=body) as answer:
        data = await answer.read()
        check_status(answer.status, data, answer.headers.get("retry-after"))
        return data


async def answered(session: aiohttp.ClientSession, url: str, of: Talk) -> None:
    """Ask a question; if the model keeps its answers, ask the next one, too."""
    heard = answer_of(await ask(session, url, of.body), of)
    assert of.first is not None, of.name
    check_answer(heard, of.first, of)
    if of.then is not None and heard.audio_id is not None:
        then = answer_of(await ask(session, url, of.next_body(heard.audio_id)), of)
        check_answer(then, of.then, of)


async def answered_in_stream(session: aiohttp.ClientSession, url: str, of: Talk) -> None:
    heard = streamed_answer(await ask(session, url, of.body | {"stream": True}), of)
    assert of.first is not None, of.name
    check_answer(heard, of.first, of, is_stream=True)


async def leave_answer(session: aiohttp.ClientSession, url: str, of: Talk) -> None:
    """Disconnect after the first bytes of a stream."""
    async with session.post(url + CHAT, json=of.body | {"stream": True}) as answer:
        if answer.status != 200:
            check_status(answer.status, await answer.read(), answer.headers.get("retry-after"))
        await answer.content.readany()


def streaming(talks: Sequence[Talk]) -> list[Talk]:
    return [each for each in talks if each.may_stream]
