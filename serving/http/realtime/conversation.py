"""The conversation of a realtime session: items that clients and answers add, and the turns that a model reads."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from serving import protocol
from serving.http.answers import Answer
from serving.http.errors import cut, refusal
from serving.http.tool_calls import written

MAX_ITEMS = 256
NOT_FOUND = "item_not_found"  # where OpenAI's API has no code of its own
SAMPLE_RATE_HZ = 16_000  # of clips


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex[:24]}"


@dataclass
class Speech:
    """The spoken part of an answer. frames: those that were sent; frames_per_ms: as the client plays them. answer: its
    tokens, if the model keeps them. marks: for each part of the text how many frames were sent before it."""

    frames_per_ms: float
    frames: int = 0
    answer: Answer | None = None
    marks: list[tuple[int, str]] = field(default_factory=list)

    def up_to_ms(self, end_ms: int, has_calls: bool) -> Speech:
        """Return what was heard up to a time: whole frames, and the text that was written before the last of them.
        has_calls: whether the answer calls tools. A call has no audio, and a part of the tokens would lose it. So the
        model then reads the answer as text."""
        frames = int(end_ms * self.frames_per_ms)
        if frames >= self.frames:
            return self
        answer = None if self.answer is None or has_calls else self.answer.up_to(frames)
        marks = [mark for mark in self.marks if mark[0] < frames]
        return Speech(self.frames_per_ms, frames, answer, marks)

    @property
    def text(self) -> str:
        return "".join(part for _, part in self.marks)


@dataclass(frozen=True)
class Call:
    """A call of a tool. arguments: JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: new_id("call"))


@dataclass
class Item:
    """A message, a call of a tool, or the result of one. clip: of a user; transcript: its words. speech: of an answer
    with audio. is_cut: whether the client truncated it; its text may be longer than its audio then, and is no longer
    shown.

    first: of a call, the item with the tokens of the whole answer, if that is another one. result_of: the ID of the
    call whose result the text is. cue: of an answer, the words that it followed in the place of the user's."""

    role: Literal["user", "assistant", "system", "tool"]
    text: str = ""
    clip: protocol.AudioClip | None = None
    transcript: str | None = None
    speech: Speech | None = None
    call: Call | None = None
    first: Item | None = None
    result_of: str | None = None
    cue: str | None = None
    id: str = field(default_factory=lambda: new_id("item"))
    status: Literal["completed", "incomplete", "in_progress"] = "completed"
    is_cut: bool = False

    def json(self) -> dict[str, Any]:
        head = {"id": self.id, "object": "realtime.item", "status": self.status}
        if (call := self.call) is not None:
            arguments = "" if self.status == "in_progress" else call.arguments
            called = {"call_id": call.id, "name": call.name, "arguments": arguments}
            return head | {"type": "function_call"} | called
        if self.result_of is not None:
            return head | {"type": "function_call_output", "call_id": self.result_of, "output": self.text}
        return head | {"type": "message", "role": self.role, "content": self._content()}

    def _content(self) -> list[dict[str, Any]]:
        if self.role == "assistant":
            if self.status == "in_progress":
                return []
            if self.speech is None:
                return [{"type": "output_text", "text": self.text}]
            return [{"type": "output_audio", "transcript": None if self.is_cut else self.text}]
        heard: list[dict[str, Any]] = []
        if self.clip is not None:
            heard.append({"type": "input_audio", "transcript": self.transcript})
        if self.text:
            heard.append({"type": "input_text", "text": self.text})
        return heard

    def turn(self) -> protocol.Turn:
        """Return the item as the model reads it: an answer's own tokens up to what was heard, or else its text."""
        if self.speech is not None and self.speech.answer is not None:
            return self.speech.answer.turn()
        if self.call is not None:
            return protocol.Turn(self.role, written(self.call.name, self.call.arguments))
        if self.speech is None:
            return protocol.Turn(self.role, self.text or None, self.clip)
        return protocol.Turn(self.role, self.speech.text)


class Conversation:
    """Items in order. It may also be a part that one answer reads."""

    def __init__(self, items: list[Item] | None = None) -> None:
        self.id = new_id("conv")
        self.items = items or []

    def add(self, item: Item, after: str | None = None) -> str | None:
        """Add an item at the end, or behind the item `after` ("root": at the beginning). Return the ID of the item
        before it. Raises the refusal."""
        self.check_room()
        if any(each.id == item.id for each in self.items):
            message = f"the item {cut(item.id)!r} is there already"
            raise refusal(400, message, "item.id", "item_create_duplicate_item_id")
        calls = {each.call.id for each in self.items if each.call is not None}
        if item.result_of is not None and item.result_of not in calls:
            message = f"there is no call {cut(item.result_of)!r} in the conversation"
            raise refusal(400, message, "item.call_id", NOT_FOUND)
        at = len(self.items)
        if after is not None:
            at = 0 if after == "root" else 1 + self._index(after, "previous_item_id")
        self.items.insert(at, item)
        return self.items[at - 1].id if at else None

    def join(self, item: Item, before: Item | None) -> None:
        """Add a call that the model has made: after an item of the same answer, or at the end. It always has room."""
        is_there = any(each is before for each in self.items)
        at = 1 + self._index(before.id, "item_id") if before is not None and is_there else len(self.items)
        self.items.insert(at, item)

    def check_room(self) -> None:
        """Check that another item may be added. Raises the refusal."""
        if len(self.items) >= MAX_ITEMS:
            message = f"the conversation has {MAX_ITEMS} items, the maximum; delete some"
            raise refusal(400, message, code="too_many_items")

    def previous(self, item: Item) -> str | None:
        """Return the ID of the item before one."""
        at = next(i for i, each in enumerate(self.items) if each is item)
        return self.items[at - 1].id if at else None

    def find(self, id: str, param: str = "item_id", code: str = NOT_FOUND) -> Item:
        """Raises the refusal."""
        return self.items[self._index(id, param, code)]

    def delete(self, id: str) -> None:
        """Raises the refusal."""
        item = self.items.pop(self._index(id, "item_id", "item_delete_invalid_item_id"))
        if item.call is not None and item.first is not None and item.first.speech is not None:
            item.first.speech.answer = None  # these tokens have the call

    def has_calls(self, item: Item) -> bool:
        """Return whether the answer of an item calls tools."""
        return any(each.first is item for each in self.items)

    def _index(self, id: str, param: str, code: str = NOT_FOUND) -> int:
        for at, item in enumerate(self.items):
            if item.id == id:
                return at
        raise refusal(400, f"there is no item {cut(id)!r} in the conversation", param, code)

    def turns(self, instructions: str, schemas: str | None = None) -> list[protocol.Turn]:
        """Return the turns that a model reads. Instructions and the system's items before the first turn are one; so
        are a user's items that follow one another, and the text and the calls of an answer. schemas: of tools."""
        turns: list[protocol.Turn] = []
        if instructions:
            turns.append(protocol.Turn("system", instructions))
        for item in self._as_read():
            turn, before = item.turn(), turns[-1] if turns else None
            if item.call is not None and self._has_tokens_of(item):
                continue
            if item.cue is not None:
                add(turns, protocol.Turn("user", item.cue))
                turns.append(turn)
            elif turn.role in ("system", "user"):
                add(turns, turn)
            elif item.call is not None and before is not None and is_text_of_answer(before):
                turns[-1] = protocol.Turn("assistant", (before.text or "") + (turn.text or ""))
            else:
                turns.append(turn)
        if schemas is not None:
            turns.insert(turns[0].role == "system" if turns else 0, protocol.Turn("tools", schemas))
        return turns

    def asked(
        self, instructions: str, own: str | None, schemas: str | None
    ) -> tuple[list[protocol.Turn], str | None]:
        """Return the turns for an answer, and its cue if it has one. own: its own instructions, which replace the
        session's; None if it has none."""
        cue = self._cue(instructions, own)
        if cue is None:
            return self.turns(instructions if own is None else own, schemas), None
        system = "" if cue == instructions else instructions
        return [*self.turns(system, schemas), protocol.Turn("user", cue)], cue

    def _cue(self, instructions: str, own: str | None) -> str | None:
        """Return the words that an answer follows if no turn of the user or of a tool waits for one: its own
        instructions, or else those of the session."""
        last = self._as_read()[-1:]
        if last and last[0].role in ("user", "tool"):
            return None
        if own:
            return own.removeprefix(instructions).strip() or own  # LiveKit puts the session's in front
        return last[0].text if last and last[0].role == "system" else instructions or None

    def _as_read(self) -> list[Item]:
        """Return the items in the order in which a model reads them. The user's words during a call follow its result,
        and results come in the order of their calls."""
        calls = {item.call.id: at for at, item in enumerate(self.items) if item.call is not None}
        read: list[Item] = []
        for is_answer, items in groupby(self.items, lambda item: item.role == "assistant"):
            if is_answer:
                read += items
            else:
                read += sorted(items, key=lambda item: calls.get(item.result_of or "", len(self.items)))
        return read

    def _has_tokens_of(self, item: Item) -> bool:
        """Return whether the model reads a call in the tokens of its answer."""
        first = item.first
        is_there = any(each is first for each in self.items)
        return is_there and first is not None and first.speech is not None and first.speech.answer is not None


def is_text_of_answer(turn: protocol.Turn) -> bool:
    return turn.role == "assistant" and turn.tokens is None


def add(turns: list[protocol.Turn], turn: protocol.Turn) -> None:
    """Add a turn, or make it a part of the last one if that is by the same role."""
    if turns and turns[-1].role == turn.role:
        turns[-1] = joined(turns[-1], turn)
    else:
        turns.append(turn)


def joined(first: protocol.Turn, second: protocol.Turn) -> protocol.Turn:
    text = "\n".join(turn.text for turn in (first, second) if turn.text)
    clips = [turn.clip for turn in (first, second) if turn.clip is not None]
    clip = clips[0] if clips else None
    if len(clips) == 2:
        clip = protocol.AudioClip(clips[0].samples + clips[1].samples, SAMPLE_RATE_HZ)
    return protocol.Turn(first.role, text or None, clip)
