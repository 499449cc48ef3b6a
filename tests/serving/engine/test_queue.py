"""One queue: a request counts from the moment it is accepted, and one whose client leaves is gone at once."""

from __future__ import annotations

import threading

import pytest
from models import Clock, Listener
from toy import Toy

from serving.engine.engine import Engine, Failed, Finished, Full
from serving.engine.wire import NotEncoded
from zoo.contract import Prompt
from zoo.request import Request, RequestError

MIB = 1 << 20


class Encoding(Toy):
    """Prompts of texts that begin with "clone" take until `go`; `made` records them all."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.made = threading.Event(), []

    def prompt(self, request: Request) -> Prompt:
        if request.text.startswith("clone"):
            assert self.go.wait(30)
        self.made.append(request.text)
        return super().prompt(request)


def engine(**settings) -> Engine:
    return Engine(Encoding(), **{"max_slots": 4, "compile": False, "clock": Clock(), **settings})


def counts(engine: Engine) -> tuple[int, int, int]:
    """Preparing, waiting, running."""
    toy = engine.stats()["models"]["toy"]
    return toy["preparing"], toy["waiting"], toy["running"]


def accept(engine: Engine, *ids: str, **fields) -> list:
    listeners = [Listener() for _ in ids]
    return [engine.accept(id, heard, **fields) for id, heard in zip(ids, listeners, strict=True)]


def text(words: str):
    return lambda: Request(text=words, seed=1, max_frames=5)


def run(engine: Engine) -> None:
    while engine.turn():
        engine.clock.now_s += 0.03


def test_a_request_that_leaves_before_its_voice_is_encoded_gives_its_memory_back():
    """It was found to need the slow threads, and waits for them."""
    room = engine()
    [place] = accept(room, "a", reference_bytes=MIB)

    def no_encoding() -> Request:
        raise NotEncoded

    with pytest.raises(NotEncoded):
        room.prepare(place, no_encoding)
    assert room.intake.reference_bytes == MIB
    room.cancel("a")
    assert room.intake.reference_bytes == 0
    room.prepare(place, no_encoding)
    assert room.intake.reference_bytes == 0


def test_one_limit_holds_for_all_requests_without_a_slot():
    """Two whose prompts are being made, two in the inbox, two in the line."""
    room = engine(max_slots=1, max_waiting=6)
    for place in accept(room, "a", "b", "c"):
        room.prepare(place, text("hi"))
    room.turn()
    assert counts(room) == (0, 2, 1)
    for place in accept(room, "d", "e"):
        room.prepare(place, text("hi"))
    accept(room, "f", "g")
    assert counts(room) == (2, 4, 1)
    with pytest.raises(Full, match="6 requests are waiting already"):
        accept(room, "h")
    assert room.stats()["models"]["toy"]["refused"] == 1
    room.cancel("f")
    accept(room, "h")


def test_no_prompt_is_built_for_a_client_that_disconnected():
    room = engine(max_waiting=2)
    first, second = accept(room, "first", "second", reference_bytes=MIB)
    room.cancel("first")
    assert counts(room) == (1, 0, 0) and room.stats()["reference_bytes"] == MIB
    [third] = accept(room, "third")  # its place is free already
    for place, words in ((first, "one"), (second, "two"), (third, "three")):
        room.prepare(place, text(words))
    run(room)
    [family] = room.arena.families
    assert family.made == ["two", "three"]
    assert [place.deliver.end.reason for place in (first, second, third)] == ["cancelled", "length", "length"]
    assert room.stats()["models"]["toy"]["left_early"] == 1 and not room.num_requests


def test_a_request_cancelled_during_its_prompt_is_never_queued():
    room = engine()
    [place] = accept(room, "clone", reference_bytes=MIB)
    [family] = room.arena.families
    making = threading.Thread(target=room.prepare, args=(place, text("clone")))
    making.start()
    while not place.is_preparing:
        pass
    room.cancel("clone")
    assert counts(room) == (0, 0, 0)
    assert room.stats()["reference_bytes"] == MIB  # it is still being read
    family.go.set()
    making.join(30)
    assert room.stats()["reference_bytes"] == 0
    run(room)
    assert place.deliver.end == Finished("cancelled", 0, {}) and not room.num_requests


def test_recordings_have_a_byte_limit_that_one_may_exceed():
    room = engine(reference_memory_bytes=10 * MIB)
    [large] = accept(room, "large", reference_bytes=40 * MIB)
    with pytest.raises(Full, match="recordings of 40 MiB are waiting to be encoded; the limit is 10 MiB"):
        accept(room, "other", reference_bytes=1)
    accept(room, "preset")
    room.prepare(large, text("hi"))
    accept(room, "other", "another", reference_bytes=5 * MIB)
    with pytest.raises(Full):
        accept(room, "one more", reference_bytes=1)


def test_a_failed_prompt_leaves_the_queue():
    room = engine(max_waiting=1)
    [place] = accept(room, "bad", reference_bytes=MIB)
    with pytest.raises(RequestError, match="text is empty"):
        room.prepare(place, text(""))
    assert not room.num_requests and room.stats()["reference_bytes"] == 0
    accept(room, "good")


def test_an_id_is_taken_from_acceptance_on():
    room = engine()
    accept(room, "one")
    with pytest.raises(ValueError, match="'one' is under way already"):
        accept(room, "one")


def test_stop_fails_requests_whose_prompts_are_being_built():
    room = engine()
    first, second = accept(room, "first", "second")
    room.cancel("second")
    room.stop()
    room.run()
    assert (
        first.deliver.end
        == second.deliver.end
        == Failed("the engine stopped while it worked on this request", "engine_stopped")
    )
    room.prepare(first, text("hi"))
    assert not room.num_requests
    with pytest.raises(Full, match="the engine has stopped"):
        accept(room, "late")


def test_a_preset_voice_starts_as_if_alone_while_forty_clones_are_encoded():
    """In as many turns, with as many who speak."""
    turns = []
    for num_clones in (0, 40):
        room, heard = engine(), Listener()
        accept(room, *(f"clone-{i}" for i in range(num_clones)), reference_bytes=1)
        room.speak("preset", Request(text="hi", seed=1, max_frames=5), heard)
        turns.append(0)
        while not heard.chunks:
            room.turn()
            turns[-1] += 1
    assert turns[0] == turns[1]
