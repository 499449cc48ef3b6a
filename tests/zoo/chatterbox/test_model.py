"""Chatterbox's ids, guidance, sampling order, noise and watermark."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import directory, family
from torch import Tensor

import zoo
from zoo.chatterbox import model, watermark
from zoo.chatterbox.config import BEGIN, END
from zoo.chatterbox.loudness import at_loudness, integrated
from zoo.chatterbox.sampling import draw_after_penalty, draw_before_penalty
from zoo.contract import View
from zoo.request import Request, RequestError

ASKED = Request(text="Good morning.", max_frames=6, seed=5)


def after(monkeypatch, drawn: list[int], size: str = "tiny", max_frames: int = 8):
    """Return a state in which these ids were drawn."""
    ours, left = family("chatterbox", size=size), iter(drawn)
    for kind in ("draw_after_penalty", "draw_before_penalty"):
        monkeypatch.setattr(model, kind, lambda logits, *how: torch.full((len(logits),), next(left)))
    state = ours.state(1, max_frames)
    ours.admit(state, 0, ours.prompt(Request(text="a", max_frames=max_frames)))
    h = torch.zeros(ours.spec.lanes, ours.spec.width)
    for _ in drawn:
        ours.emit(state, torch.tensor([0]), h)
    return state


def tape(state) -> tuple[list[int], bool]:
    return state.tape[0, : state.ready[0], 0].tolist(), bool(state.done[0])


def test_an_id_that_is_no_code_is_read_and_counted_but_not_spoken(monkeypatch):
    state = after(monkeypatch, [5, 7000, 9])
    assert tape(state) == ([5, 9], False)
    assert int(state.steps[0]) == 3 and state.seen[0].nonzero()[:, 0].tolist() == [5, 9, 7000]
    assert tape(after(monkeypatch, [5, 7000, BEGIN], max_frames=3)) == ([5], True)


def test_the_end_is_not_spoken(monkeypatch):
    assert tape(after(monkeypatch, [5, END])) == ([5], True)


def test_turbo_does_not_end_at_its_first_id(monkeypatch):
    assert tape(after(monkeypatch, [END, 5], "tiny-turbo")) == ([5], False)
    assert tape(after(monkeypatch, [END, 5, END], "tiny-turbo")) == ([5], True)


def test_the_next_input_is_the_last_id_at_its_position(monkeypatch):
    ours, state = family("chatterbox"), after(monkeypatch, [5, 7000])
    row = ours.t3.codes.weight[7000] + ours.t3.speech_positions.weight[2]
    assert torch.equal(ours.embed(state, torch.tensor([0])), row.expand(2, -1))


def one(*values: float) -> Tensor:
    return torch.tensor(values)


def test_min_p_comes_before_top_p():
    """The last id has less than a tenth of the first one's share. Without it the second one lies beyond
    top-p."""
    logits = torch.log(one(0.6, 0.35, 0.05))[None]
    noise = one(0.0, 5.0, 9.0)[None]
    seen = torch.zeros(1, 3, dtype=torch.bool)

    def drawn(min_p: float, top_p: float) -> int:
        return int(draw_after_penalty(logits, seen, one(1.0), one(1.0), one(min_p), one(top_p), noise))

    assert drawn(0.0, 1.0) == 2
    assert drawn(0.1, 1.0) == 1
    assert drawn(0.1, 0.61) == 0 and drawn(0.0, 0.61) == 1


def test_turbos_penalty_comes_last():
    """An id that top-k left alone stays the only choice. A greedy draw takes the best penalised logit."""
    logits, seen, top_k = one(3.0, 2.9)[None], torch.tensor([[True, False]]), torch.tensor([1])
    how = one(2.0), seen, one(1.0), torch.zeros(1, 2)
    assert int(draw_before_penalty(logits, how[1], how[0], one(1.0), top_k, how[2], how[3])) == 0
    assert int(draw_before_penalty(logits, how[1], how[0], one(0.0), top_k, how[2], how[3])) == 1


def test_without_guidance_only_the_first_lane_counts(monkeypatch):
    """The second lane's prompt is replaced by noise, and nothing changes."""
    ours = family("chatterbox")

    def codes(weight: float, is_spoiled: bool) -> list[int]:
        asked = Request(text="Good morning.", max_frames=6, temperature=0.0, options={"cfg_weight": weight})
        prompt = ours.prompt(asked)
        if is_spoiled:
            prompt.null = replace(prompt.null, inputs=torch.randn_like(prompt.null.inputs))
        monkeypatch.setattr(type(ours), "prompts", lambda *_: iter((prompt,)))
        return zoo.generate(ours, asked).frames[:, 0].tolist()

    assert codes(0.0, False) == codes(0.0, True)
    assert codes(1.0, False) != codes(1.0, True)


def test_both_lanes_and_all_requests_of_a_voice_share_its_pages():
    ours = family("chatterbox")
    prompt, other = ours.prompt(ASKED), ours.prompt(Request(text="Something else."))
    num = ours.config.t3.queries + 2
    first, second = prompt.lanes
    assert first.prefix_keys[:num] == second.prefix_keys[:num] == other.prefix_keys[:num]
    assert torch.equal(first.inputs[:num], second.inputs[:num])
    assert first.prefix_keys[num] != second.prefix_keys[num]
    louder = ours.prompt(Request(text="Good morning.", options={"exaggeration": 0.6}))
    assert louder.prefix_keys[: num - 1] == prompt.prefix_keys[: num - 1]
    assert louder.prefix_keys[num - 1] != prompt.prefix_keys[num - 1]
    assert not torch.equal(louder.inputs[num - 1], prompt.inputs[num - 1])


def test_a_speech_does_not_depend_on_the_padding_of_its_launch():
    """On a GPU a launch has the shape of its length; on a CPU it has the length of the speech."""
    ours = family("chatterbox", "float64")
    state = ours.state(2, 8)
    for slot, text in enumerate(("Good morning.", "a")):
        ours.admit(state, slot, family("chatterbox").prompt(Request(text=text, seed=slot)))
        state.tape[slot, :, 0] = torch.arange(8) * 700 + slot
        state.ready[slot] = 8
    count, zeros = torch.tensor([8, 5]), torch.tensor([0, 0])
    view = View(torch.tensor([0, 1]), zeros, count, count > 0, 1000, 125)
    whole, valid = ours.render(state, view)
    assert valid.tolist() == [8 * 960, 5 * 960]
    padded, _ = ours._speech(state, view, 12)
    for i, num in enumerate(valid.tolist()):
        torch.testing.assert_close(padded[i, :num], whole[i, :num], rtol=0, atol=1e-6)


def test_the_last_code_changes_the_first_frame():
    """So a speech is rendered when it has ended, and no window ends before."""
    ours = family("chatterbox", "float64")
    codes = torch.arange(9)[None] * 700
    other = codes.clone()
    other[0, -1] = 1
    zeros = torch.zeros(1, 18, 80, dtype=torch.float64)
    speaker = torch.ones(1, 192, dtype=torch.float64)
    one, two = (ours.flow(each, torch.tensor([9]), zeros, speaker, zeros) for each in (codes, other))
    assert (one - two)[0, 0].abs().max() > 1e-6
    assert ours.spec.window.grid >= ours.spec.max_frames


def test_a_speech_begins_with_silence_and_a_fade():
    samples = zoo.generate(family("chatterbox"), ASKED).samples
    assert samples[:480].abs().max() == 0 < samples[480:960].abs().max()


def test_the_watermark_is_an_option_of_its_package(monkeypatch):
    with pytest.raises(RequestError, match="pip install resemble-perth"):
        zoo.generate(family("chatterbox"), Request(text="a", options={"watermark": True}))
    watermark._watermarker.cache_clear()
    heard = []

    class Watermarker:
        def apply_watermark(self, samples: np.ndarray, sample_rate: int) -> np.ndarray:
            heard.append((len(samples), sample_rate))
            return samples / 2

    module = types.ModuleType("perth")
    module.__spec__ = types.SimpleNamespace()
    module.PerthImplicitWatermarker = Watermarker
    monkeypatch.setitem(sys.modules, "perth", module)
    ours = zoo.load(directory("chatterbox", "tiny"), "cpu")
    plain = zoo.generate(ours, ASKED).samples
    marked = zoo.generate(ours, Request(**(vars(ASKED) | {"options": {"watermark": True}}))).samples
    assert heard == [(len(plain), 24_000)] and torch.equal(marked, plain / 2)
    watermark._watermarker.cache_clear()


def test_loudness_of_a_sine():
    """BS.1770: a sine of 997 Hz at full scale has -3.01 LUFS."""
    sine = np.sin(2 * np.pi * 997 * np.arange(48_000 * 2) / 48_000).astype(np.float32)
    assert integrated(sine, 48_000) == pytest.approx(-3.01, abs=0.1)
    assert integrated(at_loudness(sine, 48_000, -27.0), 48_000) == pytest.approx(-27.0, abs=0.01)
    silence = np.zeros(48_000, np.float32)
    assert np.array_equal(at_loudness(silence, 48_000, -27.0), silence)
