"""GLM-4-Voice in the engine, and what its renderer promises."""

from __future__ import annotations

import torch
from models import Clock, Listener, alone, family, serve

from serving.engine.engine import Engine, Finished
from zoo.contract import View
from zoo.glm4_voice.config import mel_frames
from zoo.glm4_voice.strategy import GRID
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


def test_a_window_that_has_only_held_samples():
    """The speech may end after its last codes were rendered: the vocoder's lag is still to come."""
    model = family(NAME)

    def rendered(views: list[tuple[int, int, bool]]) -> torch.Tensor:
        state = model.state(1)
        state.tape[0, : 2 * GRID, 0] = torch.arange(2 * GRID)
        state.ready[0] = 2 * GRID
        parts = []
        for start, count, is_last in views:
            row = torch.tensor([start]), torch.tensor([count]), torch.tensor([is_last])
            samples, valid = model.render(state, View(torch.tensor([0]), *row, 2 * GRID))
            parts.append(samples[0, : valid[0]])
        return torch.cat(parts)

    with torch.inference_mode():
        whole = rendered([(0, 2 * GRID, True)])
        late = rendered([(0, GRID, False), (GRID, GRID, False), (2 * GRID, 0, True)])
    assert len(whole) == MEL_SAMPLES * mel_frames(2 * GRID)
    torch.testing.assert_close(late, whole, rtol=0, atol=5e-5)


def test_padded_rows_give_what_they_give_alone(monkeypatch):
    """On a GPU all slots share a launch of fixed shapes; here that path runs on a CPU."""
    model = family(NAME)
    counts = (3 * GRID + 4, GRID, 0)

    def rendered() -> tuple[torch.Tensor, torch.Tensor]:
        state = model.state(len(counts))
        for slot, count in enumerate(counts):
            state.tape[slot, :count, 0] = (torch.arange(count) * (slot + 3)) % 64
            state.ready[slot] = count
        slots, count = torch.arange(len(counts)), torch.tensor(counts)
        view = View(slots, torch.zeros_like(count), count, torch.tensor([True, False, False]), 4 * GRID)
        return model.render(state, view)

    with torch.inference_mode():
        samples, valid = rendered()
        for place in ("zoo.glm4_voice.model", "zoo.nn.s3.hift", "zoo.nn.s3.stretch"):
            monkeypatch.setattr(f"{place}.may_follow_values", lambda _: False)
        padded, also_valid = rendered()
    assert (
        torch.equal(valid, also_valid) and valid[0] == MEL_SAMPLES * mel_frames(counts[0]) and valid[2] == 0
    )
    for one, other, num in zip(samples, padded, valid.tolist(), strict=True):
        torch.testing.assert_close(other[:num], one[:num], rtol=0, atol=5e-5)
