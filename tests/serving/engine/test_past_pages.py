"""A renderer's past in pages: CosyVoice 2 on a CPU that calls itself a GPU (tests/masquerade.py)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from masquerade import LateStream, masquerade
from models import TOYS, Clock, Listener, directory, family

import zoo
from benchmarks.rehearsal import shapes
from serving.engine.device import page_copies
from serving.engine.device.arena import CHUNK_PAGES, Arena, chunk_bytes, common_page_bytes
from serving.engine.device.runner import Runner
from serving.engine.engine import Engine
from serving.engine.memory.memory_plan import plan
from serving.engine.memory.pages import Pages
from serving.engine.memory.slot_pages import SlotPages
from zoo.contract import Family, Past
from zoo.request import Request

TOLERANCE = 1e-4
FRAMES = 70


def request(seed: int, frames: int = FRAMES) -> Request:
    return Request(text="Hi.", seed=seed, max_frames=frames, voice="demo")


@cache
def alone(asked: Request) -> np.ndarray:
    return zoo.generate(family("cosyvoice2"), asked).samples.numpy()


class Paged:
    """An engine with the past in pages, for `chunks` chunks and the language model's pages."""

    def __init__(self, chunks: int | None = None, **settings: Any):
        self.family: Family[Any] = zoo.load(directory("cosyvoice2", "tiny"), "cuda", "float32")
        if chunks is not None:
            num_pages = chunks * CHUNK_PAGES + 20
            settings["kv_memory_bytes"] = num_pages * common_page_bytes([self.family])
        self.engine = Engine(self.family, max_slots=2, compile=False, clock=Clock(), **settings)
        [self.model] = self.engine.models.values()
        self.chunk_pages = self.engine.arena.chunk_pages(self.family)

    @property
    def past(self) -> Past:
        assert self.family.spec.past is not None
        return self.family.spec.past

    def turn(self) -> bool:
        has_more = self.engine.turn()
        self.engine.clock.now_s += 0.03
        return has_more


@pytest.mark.slow
def test_a_past_grows_with_its_stream_and_is_given_back():
    with masquerade():
        paged = Paged()
        free, asked, listener = paged.engine.pages.free, request(1), Listener()
        paged.engine.speak("one", asked, listener)
        held = []
        while paged.turn():
            for job in paged.model.running.values():
                chunks = len(job.pages.past) / paged.chunk_pages
                held.append((paged.model.num_ready(job.slot), chunks, job.prompt.past_frames))
        assert paged.engine.pages.free == free
    assert held[0][1] < held[-1][1]
    for ready, chunks, prompt in held:
        assert chunks * paged.past.frames >= ready + prompt
        assert (chunks - 2) * paged.past.frames < ready + prompt
    np.testing.assert_allclose(listener.samples, alone(asked), atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_streams_of_one_voice_share_the_chunks_of_its_prompt():
    with masquerade():
        paged = Paged()
        both, listeners = [request(1), request(2)], [Listener(), Listener()]
        for i, asked in enumerate(both):
            paged.engine.speak(str(i), asked, listeners[i])
        paged.turn()
        first, second = paged.model.running.values()
        num_shared = len(first.prompt.past_keys) * paged.chunk_pages
        assert num_shared and first.pages.past[:num_shared] == second.pages.past[:num_shared]
        assert not set(first.pages.past[num_shared:]) & set(second.pages.past)
        while paged.turn():
            pass
        assert paged.engine.pages.free == paged.engine.pages.num_pages
    for asked, listener in zip(both, listeners, strict=True):
        np.testing.assert_allclose(listener.samples, alone(asked), atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_a_stream_that_is_paused_for_pages_of_its_past_sounds_the_same():
    """There is room for the past of one and a half streams. The other half waits on the host."""
    chunks = 5
    with masquerade():
        LateStream.chance.seed(11)
        paged = Paged(chunks, swap_memory_bytes=1 << 30)
        both, listeners = [request(3), request(4)], [Listener(), Listener()]
        for i, asked in enumerate(both):
            paged.engine.speak(str(i), asked, listeners[i])
        while paged.turn():
            pass
        assert paged.engine.paging.num_pauses > 0
        assert paged.engine.pages.free == paged.engine.pages.num_pages
    for asked, listener in zip(both, listeners, strict=True):
        np.testing.assert_allclose(listener.samples, alone(asked), atol=TOLERANCE, rtol=0)


def hummer() -> Runner:
    """Return a runner of a toy that could have a past."""
    model = TOYS["toy"]()
    model.spec = replace(model.spec, past=Past(frames=4, values=32, row_values=16, max_chunks=5))
    return Runner(model, 2, Arena([model], 1 << 16), compile=False)


def test_a_past_is_saved_between_renders_and_later_steps_and_restored_after_those_in_flight():
    """Renders write it, and steps may use its old pages, or its new ones."""
    with masquerade():
        runner = hummer()
        page, [row] = 5, runner.arena.by_page[5:6]

        def write(value: int) -> tuple[torch.Tensor]:
            return (row.fill_(value),)

        runner.streams.renders.run(lambda: write(7))
        saved = runner.save_past([page])
        runner.streams.lm.run(lambda: write(9)).read()
        assert (saved[0].read()[0] == 7).all()
        runner.streams.lm.run(lambda: write(8))
        runner.restore_past([page], saved)
        runner.streams.renders.run(lambda: (row,)).read()
        runner.streams.lm.here()
        assert (row == 7).all()


def test_pages_are_saved_and_restored_in_pieces(monkeypatch):
    """A whole stream at once would need as much memory again on the device."""
    with masquerade():
        runner = hummer()
        monkeypatch.setattr(page_copies, "PIECE_BYTES", 2 * runner.arena.page_bytes)
        pages = runner.arena.by_page
        for page in range(len(pages)):
            pages[page] = page
        saved = runner.save([5, 1, 4])
        assert [len(piece.tensors()[0]) for piece in saved] == [2, 1]
        runner.restore([2, 6, 3], saved)
        runner.streams.lm.here()
        assert pages[:7, 0].tolist() == [0, 1, 5, 4, 4, 5, 1]
        assert runner.save([]) == []


def test_a_slot_with_fewer_pages_of_its_past_reads_none_of_the_old_ones():
    with masquerade():
        runner = hummer()
        runner.set_past(0, [5, 6, 7])
        runner.set_past(0, [8])
        runner.set_past(1, [9])
        scratch = runner.past[-1, 0]
        assert runner.past[0, 0] == 8 and runner.past[1, 0] == 9
        assert (runner.past[:2, 1:] == scratch).all()


def test_a_stream_needs_no_pages_for_frames_behind_its_last_one():
    """The last step is launched once more before its report is read. The room may be just enough."""
    with masquerade():
        runner = hummer()
        paged = SlotPages(runner, Pages(64), chunk_pages=1)
        prompt = next(runner.family.passes(Request(text="hmm", max_frames=8)))
        assert paged.num_needed(prompt, 7) == paged.num_needed(prompt) == paged.num_needed(prompt, 9)
        assert paged.num_needed(prompt, 4) < paged.num_needed(prompt)


@pytest.mark.slow
def test_a_request_ends_in_a_memory_of_exactly_its_largest_need():
    """Its speech ends with a chunk."""
    with masquerade():
        roomy = Paged()
        frames = 2 * roomy.past.frames - next(roomy.family.passes(request(1))).past_frames % roomy.past.frames
        asked = request(1, frames)
        prompt, listener = next(roomy.family.passes(asked)), Listener()
        assert (prompt.past_frames + prompt.max_frames) % roomy.past.frames == 0
        num_pages = 1 + sum(roomy.model.pages.num_needed(prompt))
        exact = Paged(kv_memory_bytes=num_pages * common_page_bytes([roomy.family]))
        exact.engine.speak("one", asked, listener)
        for _ in range(300):
            exact.turn()
    assert listener.frames == frames and listener.has_ended_well


@pytest.mark.slow
def test_64_streams_of_10_s_fit_on_a_card_of_80_gb(tmp_path):
    """At the published size, in bf16, next to the weights and all launches."""
    model = zoo.load(shapes.write("cosyvoice2", "full", tmp_path / "full"), "meta", "bfloat16")
    past_bytes = 64 * model.spec.past.chunks(250) * chunk_bytes(model)
    assert plan(model, 64, kv_memory_bytes=past_bytes).total < 80e9
