"""The delay pattern of Higgs Audio V3: to which frames a step's codes go, when a frame is complete, and where
speech ends."""

from __future__ import annotations

import pytest
import torch
from models import Clock, family, serve
from torch import Tensor

import zoo
from serving.engine.engine import Engine, Finished
from zoo.higgs_v3.delay import DelayState, stagger
from zoo.loop import PAGE_TOKENS
from zoo.nn.sampling import gumbel
from zoo.request import Request

BEGIN, END = 64, 65


@pytest.fixture(scope="module")
def ours():
    return family("higgs_v3")


def state(ours, slots: int, most: int = 40) -> DelayState:
    fresh = ours.state(slots, most)
    for slot in range(slots):
        fresh.open(slot, ours.prompt(Request(text="a", max_frames=most)))
    return fresh


def script(frames: int, seed: int = 0) -> Tensor:
    """Return random codes of complete frames [F, 8]."""
    return torch.randint(64, (frames, 8), generator=torch.Generator().manual_seed(seed))


def run(state: DelayState, rows: dict[int, Tensor]) -> dict[int, list[int]]:
    """Step all slots together through their rows [R, 8]. Return each slot's number of ready frames after each
    step."""
    slots, ready = torch.tensor(sorted(rows)), {slot: [] for slot in rows}
    for step in range(max(len(value) for value in rows.values())):
        drawn = torch.stack([rows[int(slot)][min(step, len(rows[int(slot)]) - 1)] for slot in slots])
        state.step(slots, drawn, BEGIN, END)
        for slot in rows:
            ready[slot].append(int(state.ready[slot]))
    return ready


def test_a_references_codes_are_staggered():
    rows = stagger(torch.arange(16).view(2, 8), BEGIN, END)
    assert rows.shape == (9, 8)
    assert rows[:, 0].tolist() == [0, 8, *[END] * 7] and rows[:, 7].tolist() == [*[BEGIN] * 7, 7, 15]
    assert rows[3].tolist() == [END, END, 10, 3, BEGIN, BEGIN, BEGIN, BEGIN]


def test_speaking_staggered_codes_restores_their_frames(ours):
    """A frame is complete seven steps after its first code."""
    there, codes = state(ours, 1), script(12)
    ready = run(there, {0: stagger(codes, BEGIN, END)})
    assert torch.equal(there.tape[0, :12], codes)
    assert ready[0] == [0] * 7 + list(range(1, 13)) and bool(there.done[0])
    assert there.tape[0, 12:].sum() == 0


def test_codes_drawn_before_their_codebook_begins_are_dropped_and_not_fed_back(ours):
    there, drawn = state(ours, 1), script(3)
    for step in range(3):
        there.step(torch.tensor([0]), drawn[step : step + 1], BEGIN, END)
        assert there.row[0].tolist() == [*drawn[step, : step + 1].tolist(), *[BEGIN] * (7 - step)]
    assert there.tape[0, 0].tolist() == [drawn[0, 0], drawn[1, 1], drawn[2, 2], 0, 0, 0, 0, 0]
    assert there.ready[0] == 0 and not there.done[0]


@pytest.mark.parametrize("frames", [1, 2, 7, 8, 9])
def test_speech_stops_seven_steps_after_its_last_capped_frame(frames, ours):
    """The tape need not be longer than the capped frames."""
    there, codes = state(ours, 1, frames), script(30)
    rows = stagger(codes, BEGIN, END)[:30]
    for step in range(frames + 7):
        assert not there.done[0], step
        there.step(torch.tensor([0]), rows[step : step + 1], BEGIN, END)
    assert there.done[0] and there.ready[0] == frames
    assert torch.equal(there.tape[0], codes[:frames])


def test_special_ids_become_code_0_on_the_tape_and_are_fed_back_unchanged(ours):
    there, rows = state(ours, 1), stagger(script(12) + 0, BEGIN, END).clamp(max=63) + 1
    rows[9, 3], rows[10, 0] = BEGIN, BEGIN
    run(there, {0: rows[:11]})
    assert there.tape[0, 9 - 3, 3] == 0 and there.tape[0, 10, 0] == 0
    assert there.row[0, 0] == BEGIN


def test_only_the_first_end_in_codebook_0_ends_the_speech(ours):
    there, rows = state(ours, 1), script(40)
    rows[9, 5] = END
    rows[12, 0] = rows[14, 0] = END
    ready = run(there, {0: rows})
    assert there.ready[0] == 12 and there.steps[0] == 19
    assert ready[0][18:] == [12] * 22


def test_slots_at_different_steps_do_not_affect_each_other(ours):
    """One slot begins while another speaks and a third has ended. Each equals a run alone."""
    one = script(20, 1)
    one[11, 0] = END
    rows = {0: one, 1: script(20, 2), 2: stagger(script(5, 3), BEGIN, END)}
    together, alone = state(ours, 3), [state(ours, 3) for _ in rows]
    run(together, {2: rows[2][:4]})
    run(together, {0: one[:6], 2: rows[2][4:10]})
    run(together, {0: one[6:], 1: rows[1], 2: rows[2][10:]})
    for slot, there in enumerate(alone):
        run(there, {slot: rows[slot]})
        for field in ("tape", "row", "ready", "end", "steps", "done"):
            assert torch.equal(getattr(together, field)[slot], getattr(there, field)[slot]), (slot, field)


def test_a_model_that_ends_at_once_speaks_one_frame(ours):
    """The end cannot be drawn in the first step, either in the plain loop or in the engine."""
    asked = Request(text="a", max_frames=9)
    hook = ours.head.register_forward_hook(
        lambda module, args, out: out.index_fill(1, torch.tensor(END), 1e4)
    )
    speech = zoo.generate(ours, asked)
    (listener,) = serve(Engine(ours, max_slots=2, compile=False, clock=Clock()), {0: [asked]})
    hook.remove()
    assert speech.frames.shape == (1, 8) and speech.samples.shape == (960,)
    assert isinstance(listener.end, Finished) and (listener.end.reason, listener.end.frames) == ("stop", 1)
    torch.testing.assert_close(torch.from_numpy(listener.samples), speech.samples, rtol=0, atol=5e-5)


@pytest.mark.parametrize(("text", "seed"), [("a", 200), ("a", 2338), ("𝔘𝔫𝔦", 2512)])  # noqa: RUF001
def test_requests_that_would_draw_the_end_first_still_speak(text, seed, ours):
    """Without the ban, these seeds draw the end of codebook 0 in the first step, which makes an empty
    answer."""
    asked = Request(text=text, temperature=1.0, top_k=0, top_p=1.0, seed=seed, max_frames=5)
    heads: list[Tensor] = []
    hook = ours.head.register_forward_hook(lambda module, args, out: heads.append(out.clone()))
    speech = zoo.generate(ours, asked)
    hook.remove()
    noise = gumbel(torch.tensor([seed]), torch.tensor([0]), range(1), END + 1)[0, 0]
    assert (heads[0][0, : END + 1] + noise).argmax() == END
    assert len(speech.frames) > 0 and len(speech.samples) == 960 * len(speech.frames)


def test_the_engine_reserves_positions_for_the_steps_after_the_last_frame(ours):
    """Prompt and frames fill a page completely, so each request needs another, unshared page for the last
    seven steps."""
    asked = [Request(text="a", max_frames=PAGE_TOKENS - 4, seed=seed) for seed in range(3)]
    assert len(ours.prompt(asked[0]).inputs) + asked[0].max_frames == PAGE_TOKENS
    listeners = serve(Engine(ours, max_slots=3, compile=False, clock=Clock()), {0: asked})
    for listener, request in zip(listeners, asked, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(listener.samples), zoo.generate(ours, request).samples, rtol=0, atol=5e-5
        )


@pytest.mark.parametrize("end", [1, 2, 8])
def test_the_step_of_the_end_is_the_number_of_frames(end, ours):
    seen = []

    def force(module, args, out):
        seen.append(out)
        return (
            out.index_fill(1, torch.tensor(END), 1e4)
            if len(seen) == end + 1
            else out.index_fill(1, torch.tensor(END), -1e4)
        )

    hook = ours.head.register_forward_hook(force)
    speech = zoo.generate(ours, Request(text="a", max_frames=20))
    hook.remove()
    assert speech.frames.shape == (end, 8) and speech.samples.shape == (960 * end,) and len(seen) == end + 7
    assert speech.samples.abs().max() > 0.01
