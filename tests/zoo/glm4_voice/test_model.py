"""GLM-4-Voice in the engine, and what its renderer promises."""

from __future__ import annotations

import pytest
import torch
from models import Clock, Listener, alone, family, serve

from serving.engine.engine import Engine, Finished
from zoo.contract import View
from zoo.glm4_voice.config import mel_frames
from zoo.glm4_voice.strategy import CELL, GRID
from zoo.request import Request

NAME = "glm4_voice"
MEL_SAMPLES = 256


def heard(request: Request) -> Listener:
    engine = Engine(family(NAME), max_slots=2, compile=False, clock=Clock())
    [listener] = serve(engine, {0: [request]})
    return listener


def test_an_answer_may_be_text_alone():
    """The first greedy token of the demo checkpoint is text, and the bound allows no other."""
    request = Request(text="Good morning.", temperature=0.0, options={"max_tokens": 1})
    listener = heard(request)
    assert isinstance(listener.end, Finished) and (listener.end.reason, listener.end.frames) == ("length", 0)
    assert "".join(listener.texts) == alone(NAME, request).text != ""
    assert listener.end.usage["text_tokens"] == 1 and len(listener.samples) == 0


def test_text_and_codes_alternate_and_the_end_is_neither():
    """Seed 1 ends by itself: its tokens are the codes, the text, and the one that ends it."""
    request = Request(text="Good morning.", temperature=1.0, seed=1, max_frames=40)
    listener = heard(request)
    assert isinstance(listener.end, Finished) and listener.end.reason == "stop"
    assert 0 < listener.end.frames < 40 and listener.end.usage["text_tokens"] > 0
    assert len(listener.samples) == MEL_SAMPLES * mel_frames(listener.end.frames)


def test_rows_without_a_token_are_never_drawn():
    """They lie behind the codes; the flow has no embedding for them."""
    model = family(NAME)
    logits = model._logits(torch.ones(1, model.spec.width))
    known = model.first_code + model.config.flow.codes
    assert (
        known < logits.shape[1]
        and logits[0, known:].eq(-torch.inf).all()
        and logits[0, :known].isfinite().all()
    )


def spoken(views: list[tuple[int, int, bool]], num_codes: int, is_one_shape: bool = False) -> torch.Tensor:
    """Return the samples of one answer, rendered in these stretches: first code, codes, whether it is the last.

    is_one_shape: the stretches are padded to one shape that holds all of them, instead of each to its own.
    """
    model = family(NAME)
    state, window = model.state(1), model.spec.window
    state.tape[0, :num_codes, 0] = (torch.arange(num_codes) * 5) % 64
    state.ready[0] = num_codes
    parts = []
    with torch.inference_mode():
        for start, count, is_last in views:
            row = torch.tensor([start]), torch.tensor([count]), torch.tensor([is_last])
            frames, length = window.bucket(count), window.length_bucket(start + count)
            if is_one_shape:
                frames, length = 4 * CELL, window.lengths[-1]
            samples, valid = model.render(state, View(torch.tensor([0]), *row, frames, length))
            parts.append(samples[0, : valid[0]])
    return torch.cat(parts)


def test_a_window_that_has_only_held_samples():
    """The speech may end after its last codes were rendered: the vocoder's lag is still to come."""
    num = GRID + CELL
    whole = spoken([(0, num, True)], num, is_one_shape=True)
    late = spoken([(0, GRID, False), (GRID, CELL, False), (num, 0, True)], num)
    assert len(whole) == MEL_SAMPLES * mel_frames(num)
    torch.testing.assert_close(late, whole, rtol=0, atol=5e-5)


@pytest.mark.parametrize("is_padded", [False, True], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize(
    "num",
    [GRID - 1, GRID, GRID + 7, CELL, GRID + CELL, pytest.param(GRID + 3 * CELL + 9, marks=pytest.mark.slow)],
)
def test_the_shape_of_a_launch_does_not_change_samples(monkeypatch, num, is_padded):
    """A launch is as long as the answer's beginning needs. A short answer has two cells in one launch."""
    starts = [0] if num <= CELL else [0, *range(GRID, num, CELL)]
    stops = [*starts[1:], num]
    views = [(start, stop - start, stop == num) for start, stop in zip(starts, stops, strict=True)]
    whole = spoken([(0, num, True)], num, is_one_shape=True)
    if is_padded:
        pad_rows(monkeypatch)
    torch.testing.assert_close(spoken(views, num), whole, rtol=0, atol=5e-5)
    assert len(whole) == MEL_SAMPLES * mel_frames(num) and whole.std() > 1e-4


def pad_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (
        "zoo.glm4_voice.model",
        "zoo.nn.s3.hift",
        "zoo.nn.s3.stretch",
        "zoo.nn.s3.cells",
        "zoo.nn.s3.carried",
    ):
        monkeypatch.setattr(f"{place}.may_follow_values", lambda _: False)


@pytest.mark.slow
def test_padded_rows_give_what_they_give_alone(monkeypatch):
    """On a GPU all slots share a launch of fixed shapes; here that path runs on a CPU."""
    model = family(NAME)
    counts = (GRID + CELL + 4, GRID, 0)

    def rendered() -> tuple[torch.Tensor, torch.Tensor]:
        state = model.state(len(counts))
        for slot, count in enumerate(counts):
            state.tape[slot, :count, 0] = (torch.arange(count) * (slot + 3)) % 64
            state.ready[slot] = count
        slots, count = torch.arange(len(counts)), torch.tensor(counts)
        shape, is_last = (2 * CELL, GRID + 2 * CELL), torch.tensor([True, False, False])
        return model.render(state, View(slots, torch.zeros_like(count), count, is_last, *shape))

    with torch.inference_mode():
        samples, valid = rendered()
        pad_rows(monkeypatch)
        padded, also_valid = rendered()
    assert (
        torch.equal(valid, also_valid) and valid[0] == MEL_SAMPLES * mel_frames(counts[0]) and valid[2] == 0
    )
    for one, other, num in zip(samples, padded, valid.tolist(), strict=True):
        torch.testing.assert_close(other[:num], one[:num], rtol=0, atol=5e-5)
