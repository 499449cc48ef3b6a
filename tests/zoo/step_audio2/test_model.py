"""Step-Audio 2 in the engine, and what its renderer promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from models import Clock, Listener, alone, family, serve

from serving.engine.engine import Engine, Finished
from zoo.contract import View
from zoo.nn.s3.sizes import GRID
from zoo.request import AudioClip, Reference, Request, RequestError, Turn
from zoo.step_audio2 import thought
from zoo.step_audio2.past import FIRST_FRAMES, MAX_PROMPT, RING_TOKENS, Cell, CellFrames, CellTokens
from zoo.step_audio2.prompt import BEHIND_THOUGHT
from zoo.step_audio2.vocabulary import SPEECH_START

NAME = "step_audio2"
HELLO = Request(text="Good morning.", voice="default_female", temperature=1.0, max_frames=40)
CLIP = AudioClip(np.sin(np.arange(8000) ** 1.5 / 30).astype(np.float32) / 4, 16_000)


def heard(*requests: Request) -> list[Listener]:
    engine = Engine(family(NAME), max_slots=4, compile=False, clock=Clock())
    return serve(engine, {0: list(requests)})


def test_an_answer_is_text_and_speech():
    [listener] = heard(HELLO)
    truth = alone(NAME, HELLO)
    assert isinstance(listener.end, Finished) and listener.end.frames == len(truth.frames) > 0
    assert len(listener.samples) == 960 * len(truth.frames) and "".join(listener.texts) == truth.text
    np.testing.assert_allclose(listener.samples, truth.samples.numpy(), rtol=0, atol=5e-5)


def test_a_text_answer_has_no_frame():
    """The codes that a model writes there are not spoken, and not shown."""
    request = Request(text="Hm?", output="text", temperature=1.0, seed=3, options={"max_tokens": 40})
    [listener] = heard(request)
    truth = alone(NAME, request)
    assert isinstance(listener.end, Finished) and listener.end.frames == 0 and not listener.chunks
    assert "".join(listener.texts) == truth.text and len(truth.tokens) <= 40
    first = family(NAME).first_code
    assert any(token >= first for token in truth.tokens), "the demo checkpoint writes codes anywhere"


def test_a_transcript_next_to_speech():
    transcript = Request(
        text="", turns=(Turn("user", clip=CLIP),), output="transcript", options={"max_tokens": 12}
    )
    written, spoken = heard(transcript, HELLO)
    assert "".join(written.texts) == alone(NAME, transcript).text and not written.chunks
    np.testing.assert_allclose(spoken.samples, alone(NAME, HELLO).samples.numpy(), rtol=0, atol=5e-5)


@pytest.mark.parametrize("output", ["speech", "text"])
def test_what_is_neither_text_nor_a_code_is_kept_and_not_shown(monkeypatch, output):
    """Paddings and the token that ends speech are in the answer's tokens, and so are codes of an answer in text."""
    model = family(NAME)
    special = model.writer.vocabulary.special
    state, slot = model.state(1), torch.tensor([0])
    voice = HELLO.voice if output == "speech" else None
    model.admit(state, 0, model.prompt(Request(text="Hm?", voice=voice, output=output)))
    [word] = model.writer.vocabulary("a")
    pads = [special["<tts_pad>"], special["<tts_end>"], model.first_code + 6561]
    drawn = [word, model.first_code + 7, *pads, word]
    steps, text = [], b""
    for token in (*drawn, model.end):
        monkeypatch.setattr(model, "_drawn", lambda *_, token=token: torch.tensor([token]))
        before = int(state.ready[0])
        model.emit(state, slot, torch.zeros(1, model.spec.width))
        written = int(state.written[0])
        text += model.detokenize(written) if written >= 0 else b""
        if written >= 0 or int(state.ready[0]) > before:
            steps.append(written)
    assert state.done[0] and text == b"aa"
    assert int(state.ready[0]) == (output == "speech")
    assert model.answer_tokens(state.tape[0, : state.ready[0]], steps) == tuple(drawn)


def test_rows_without_a_token_are_never_drawn():
    model = family(NAME)
    state = model.state(1)
    model.admit(state, 0, model.prompt(HELLO))
    state.temperature[0] = 0
    weight = model.lm.head.weight
    kept = weight[model.num_tokens :].clone()
    h = weight[model.num_tokens :].mean(0, keepdim=True)
    weight[model.num_tokens :] *= 1000
    drawn = model._drawn(state, torch.tensor([0]), h)
    weight[model.num_tokens :] = kept
    assert drawn[0] < model.num_tokens < len(weight)


def test_a_penalty_counts_the_prompt_too():
    model = family(NAME)
    prompt = model.prompt(HELLO)
    seen = prompt.slot["seen"].nonzero()[:, 0].tolist()
    assert set(seen) == set(prompt.prefix_keys), "its keys are its ids"


# voices


def test_voices_differ_and_a_reference_is_one():
    model = family(NAME)
    samples = [
        alone(NAME, Request(**{**vars(HELLO), "max_frames": 5, **voice})).samples
        for voice in ({}, {"voice": "default_male"}, {"voice": None, "references": (Reference(CLIP),)})
    ]
    assert len(samples[0]) == len(samples[1]) == len(samples[2])
    assert not torch.equal(samples[0], samples[1]) and not torch.equal(samples[0], samples[2])
    assert model.spec.voices == ("default_female", "default_male")


def test_without_a_voice_only_text_is_possible(monkeypatch):
    model = family(NAME)
    monkeypatch.setattr(model, "voices", {})
    monkeypatch.setattr(model, "spec", replace(model.spec, voices=(), modes=("clone",)))
    model.prompt(Request(text="Hm?", output="text"))
    with pytest.raises(RequestError, match=r"a reference is needed.*; or put the original's assets/default_"):
        model.prompt(Request(text="Hm?"))


def test_only_ten_seconds_of_a_voice_are_read():
    t = np.arange(11 * 16_000) / 16_000
    clip = AudioClip((np.sin(2 * np.pi * 200 * t) / 3).astype(np.float32), 16_000)
    _, voice = family(NAME).cloner(clip)
    assert len(voice.codes) == MAX_PROMPT and len(voice.mel) == 2 * MAX_PROMPT


# thoughts


@pytest.mark.parametrize(
    "spelled", [("</", "think", ">\n\n"), ("<", "/th", "ink", ">"), ("x</t", "</", "think", ">")]
)
def test_a_thought_ends_at_its_string(spelled):
    """Whatever tokens spell it. What follows is as if the whole were tokenized anew, and the speech begins."""
    model = family(NAME)
    vocabulary = model.writer.vocabulary
    state = model.state(1)
    model.admit(state, 0, model.prompt(Request(**{**vars(HELLO), "options": {"thinks": True}})))
    slot = torch.tensor([0])
    given = [vocabulary(part) for part in spelled]
    drawn = [token for part in given for token in part] + [vocabulary.end] * 4
    made, shown = [], []
    for token in drawn:
        found, is_thought = model._behind_thought(state, slot, torch.tensor([token]), ~state.done[slot])
        made.append(int(found))
        shown.append(not bool(is_thought))
    closing = thought.closing(vocabulary)
    first = made.index(closing[0], sum(map(len, given)) - len(given[-1]))
    assert tuple(made[first : first + len(closing)]) == closing
    assert shown.index(True) == first + len(closing) and made[first + len(closing)] == vocabulary.end


def test_the_tokens_behind_a_thought():
    vocabulary = family(NAME).writer.vocabulary
    whole = vocabulary.own(BEHIND_THOUGHT + SPEECH_START)
    closing = thought.closing(vocabulary)
    assert tuple(whole[-len(closing) :]) == closing and closing[-1] == vocabulary.speech_start


def test_a_thought_is_neither_heard_nor_shown():
    request = Request(**{**vars(HELLO), "options": {"thinks": True}, "seed": 5})
    [listener] = heard(request)
    truth = alone(NAME, request)
    assert "".join(listener.texts) == truth.text == "" and listener.end.frames == len(truth.frames)


# the flow's past


@pytest.mark.parametrize("prompt", [1, 13, 31, 83])
def test_the_estimator_s_past_holds_what_the_reference_holds(prompt):
    """Its list has new frames in front; once it is longer than the prompt and 100, it keeps as many of the first ones as
    the prompt has, and the last 100."""
    frames = 2 * prompt
    held = [("prompt", i) for i in range(frames)]
    places: dict[int, tuple[object, int]] = {frames - 1 - i: ("prompt", i) for i in range(frames)}
    one = torch.ones(1, dtype=torch.int64)
    for number in range(20):
        cell = Cell(0 * one, GRID * number * one, GRID * one, prompt * one, GRID, 100)
        seen = CellFrames(cell)
        visible = seen.mask[0, 0, 0, : seen.held]
        assert sorted(map(str, (places[i] for i in range(seen.held) if visible[i]))) == sorted(map(str, held))
        new = [(number, i) for i in range(2 * GRID)]
        for i, place in enumerate(seen.index[0].tolist()):
            if place != 2 * 100 + FIRST_FRAMES:
                places[place] = new[i]
        held = new + held
        if len(held) > frames + 100:
            held = held[:frames] + held[-100:]


@pytest.mark.parametrize("rate", [1, 2])
def test_the_encoder_sees_its_prompt_and_fifty_tokens(rate):
    """Distances are those in a list of the prompt, the last fifty tokens and the cell."""
    one, prompt, number = torch.ones(1, dtype=torch.int64), 13, 5
    places = {i: i for i in range(prompt * rate)}  # place -> position in the whole stream
    for k in range(number + 1):
        cell = Cell(0 * one, GRID * k * one, GRID * one, prompt * one, GRID, 20)
        seen = CellTokens(cell, rate)
        mask, distance = seen.mask[0, 3], seen.distance[0, 3]
        start = (prompt + GRID * k) * rate
        known = {places[i]: int(distance[i]) for i in range(seen.held) if mask[i]}
        first = max(prompt * rate, start - RING_TOKENS * rate)
        expected = [*range(prompt * rate), *range(first, start)]
        assert sorted(known) == expected
        assert [known[at] for at in expected] == [len(expected) + 3 - i for i in range(len(expected))]
        for i, place in enumerate(seen.index[0].tolist()):
            places[place] = start + i


def rendered(views: list[tuple[int, int, bool]], num: int, dtype: str = "float32") -> torch.Tensor:
    model = family(NAME, dtype)
    prompt = model.prompt(HELLO)
    state = model.state(1)
    model.admit(state, 0, prompt)
    state.tape[0, :num, 0] = torch.arange(num) * 7
    state.ready[0] = num
    parts = []
    for start, count, is_last in views:
        row = torch.tensor([start]), torch.tensor([count]), torch.tensor([is_last])
        frames = model.spec.window.bucket(count)
        samples, valid = model.render(state, View(torch.tensor([0]), *row, max(frames, count)))
        parts.append(samples[0, : valid[0]])
    return torch.cat(parts)


@pytest.mark.parametrize("num", [50, 51, 52, 53, 74])
def test_every_end_of_an_answer_is_cut_anywhere(num):
    """The last cell may hold 27 codes, so it may take those of the next stretch."""
    with torch.inference_mode():
        whole = rendered([(0, num, True)], num)
        cuts = [(0, GRID, False), (GRID, GRID, False), (2 * GRID, num - 2 * GRID, True)]
        late = rendered(cuts, num)
    assert len(whole) == 960 * num
    torch.testing.assert_close(late, whole, rtol=0, atol=5e-5)


def test_padded_rows_give_what_they_give_alone(monkeypatch):
    """On a GPU all slots share a launch of fixed shapes; here that path runs on a CPU."""
    model = family(NAME)
    counts = (3 * GRID + 4, GRID + 1, 0)
    prompts = [model.prompt(Request(**{**vars(HELLO), "voice": voice})) for voice in model.spec.voices]

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        state = model.state(len(counts))
        for slot, count in enumerate(counts):
            model.admit(state, slot, prompts[slot % 2])
            state.tape[slot, :count, 0] = torch.arange(count) * (slot + 3)
            state.ready[slot] = count
        slots, count = torch.arange(len(counts)), torch.tensor(counts)
        view = View(slots, torch.zeros_like(count), count, torch.tensor([True, True, False]), 4 * GRID)
        return model.render(state, view)

    with torch.inference_mode():
        samples, valid = both()
        for place in ("step_audio2.model", "step_audio2.past", "nn.s3.hift", "nn.s3.stretch"):
            monkeypatch.setattr(f"zoo.{place}.may_follow_values", lambda _: False)
        padded, also_valid = both()
    assert torch.equal(valid, also_valid) and valid.tolist() == [960 * counts[0], 960 * counts[1], 0]
    for one, other, num in zip(samples, padded, valid.tolist(), strict=True):
        torch.testing.assert_close(other[:num], one[:num], rtol=0, atol=5e-5)
