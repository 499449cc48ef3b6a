"""The conversation of a realtime session: items that clients and answers add, and the turns that a model reads."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from serving import protocol
from serving.http.answers import Answer
from serving.http.errors import cut, refusal

MAX_ITEMS = 256
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

    def up_to_ms(self, end_ms: int) -> Speech:
        """Return what was heard up to a time: whole frames, and the text that was written before the last of them."""
        frames = int(end_ms * self.frames_per_ms)
        if frames >= self.frames:
            return self
        answer = None if self.answer is None else self.answer.up_to(frames)
        marks = [mark for mark in self.marks if mark[0] < frames]
        return Speech(self.frames_per_ms, frames, answer, marks)

    @property
    def text(self) -> str:
        return "".join(part for _, part in self.marks)


@dataclass
class Item:
    """A message. clip: of a user. speech: of an answer with audio. is_cut: whether the client truncated it; its text
    may be longer than its audio then, and is no longer shown."""

    role: Literal["user", "assistant", "system"]
    text: str = ""
    clip: protocol.AudioClip | None = None
    speech: Speech | None = None
    id: str = field(default_factory=lambda: new_id("item"))
    status: Literal["completed", "incomplete", "in_progress"] = "completed"
    is_cut: bool = False

    def json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "realtime.item",
            "type": "message",
            "status": self.status,
            "role": self.role,
            "content": self._content(),
        }

    def _content(self) -> list[dict[str, Any]]:
        if self.role == "assistant":
            if self.status == "in_progress":
                return []
            if self.speech is None:
                return [{"type": "output_text", "text": self.text}]
            return [{"type": "output_audio", "transcript": None if self.is_cut else self.text}]
        heard: list[dict[str, Any]] = []
        if self.clip is not None:
            heard.append({"type": "input_audio", "transcript": None})
        if self.text:
            heard.append({"type": "input_text", "text": self.text})
        return heard

    def turn(self) -> protocol.Turn:
        """Return the item as the model reads it: an answer's own tokens up to what was heard, or else its text."""
        if self.speech is None:
            return protocol.Turn(self.role, self.text or None, self.clip)
        if self.speech.answer is not None:
            return self.speech.answer.turn()
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
            raise refusal(400, f"the item {cut(item.id)!r} is there already", "item.id")
        at = len(self.items)
        if after is not None:
            at = 0 if after == "root" else 1 + self._index(after, "previous_item_id")
        self.items.insert(at, item)
        return self.items[at - 1].id if at else None

    def check_room(self) -> None:
        """Check that another item may be added. Raises the refusal."""
        if len(self.items) >= MAX_ITEMS:
            message = f"the conversation has {MAX_ITEMS} items, the maximum; delete some"
            raise refusal(400, message, code="too_many_items")

    def previous(self, item: Item) -> str | None:
        """Return the ID of the item before one."""
        at = self.items.index(item)
        return self.items[at - 1].id if at else None

    def find(self, id: str, param: str = "item_id") -> Item:
        """Raises the refusal."""
        return self.items[self._index(id, param)]

    def delete(self, id: str) -> None:
        """Raises the refusal."""
        del self.items[self._index(id, "item_id")]

    def _index(self, id: str, param: str) -> int:
        for at, item in enumerate(self.items):
            if item.id == id:
                return at
        raise refusal(400, f"there is no item {cut(id)!r} in the conversation", param, "item_not_found")

    def turns(self, instructions: str) -> list[protocol.Turn]:
        """Return the turns that a model reads. Instructions and the system's items before the first turn are one;
        so are a user's items that follow one another."""
        turns: list[protocol.Turn] = []
        if instructions:
            turns.append(protocol.Turn("system", instructions))
        for item in self.items:
            turn = item.turn()
            if turns and turn.role == turns[-1].role != "assistant":
                turns[-1] = joined(turns[-1], turn)
            else:
                turns.append(turn)
        return turns


def joined(first: protocol.Turn, second: protocol.Turn) -> protocol.Turn:
    text = "\n".join(turn.text for turn in (first, second) if turn.text)
    clips = [turn.clip for turn in (first, second) if turn.clip is not None]
    clip = clips[0] if clips else None
    if len(clips) == 2:
        clip = protocol.AudioClip(clips[0].samples + clips[1].samples, SAMPLE_RATE_HZ)
    return protocol.Turn(first.role, text or None, clip)
