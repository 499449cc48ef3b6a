"""Fish Audio S2: two exact savings, the end of speech, the window of recent codes, and turns in several
passes."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import Clock, alone, family, serve
from torch.nn import functional as F

import zoo
from serving.engine.engine import Engine
from zoo.contract import Family, Prompt, following
from zoo.fish_s2.prompt import column_keys
from zoo.fish_s2.sampling import RAS_WINDOW
from zoo.request import AudioClip, Reference, Request

SAMPLES = {"rtol": 0, "atol": 5e-5}
FISH = family("fish_s2")
CLIP = AudioClip(np.sin(np.arange(9000) ** 1.5 / 30).astype(np.float32) / 4, 24_000)
ASKED = Request(text="Good morning.", max_frames=20, seed=3)
TURNS = "<|speaker:0|>Good morning. <|speaker:1|>Hi! <|speaker:0|>" + "Well. " * 20
TALK = replace(
    ASKED,
    text=TURNS,
    max_frames=None,
    options={"chunk_length": 100},
    references=(Reference(CLIP, "One."), Reference(AudioClip(CLIP.samples[::-1].copy(), 24_000), "Two.")),
)
OTHERS = (replace(TALK, seed=9, references=TALK.references[:1]), replace(TALK, seed=10, references=()))


@pytest.fixture(autouse=True)
def short_passes(monkeypatch):
    """A pass without a cap has at most 9 frames, because random weights find no end."""
    monkeypatch.setattr("zoo.fish_s2.model.DEFAULT_FRAMES", 9)


def with_end(likely: float) -> Family:
    """Return the model with `likely` added to the end's logit in every step."""
    changed = copy.copy(FISH)
    scores = FISH.scores

    def raised(h: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        return scores(h, steps) + likely * F.one_hot(
            torch.tensor(FISH.config.codebook_size), FISH.config.codebook_size + 1
        )

    changed.scores = raised
    return changed


# the savings


@torch.inference_mode()
def test_the_gathered_head_equals_the_whole_one_on_allowed_tokens():
    h, steps = torch.randn(5, FISH.spec.width, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    start, size = FISH.config.semantic_start, FISH.config.codebook_size
    whole = F.linear(h, FISH.lm.embedding.weight)
    allowed = torch.cat((whole[:, start : start + size], whole[:, FISH.config.end, None]), 1)
    allowed[0, -1] = -torch.inf  # in the first step
    torch.testing.assert_close(FISH.scores(h, steps), allowed)


@torch.inference_mode()
def test_a_frame_takes_one_pass_less_than_it_has_positions():
    """K - 1 passes make the same K codes as passes over the whole sequence so far."""
    fast, num_calls = FISH.lm.fast, []
    hidden = torch.randn(3, FISH.spec.width, generator=torch.Generator().manual_seed(1))
    first = torch.tensor([5, 63, 0])
    hook = fast.layers[0].register_forward_hook(lambda module, args, out: num_calls.append(args[0].shape[1]))
    made = fast(hidden, first, lambda logits, k: logits.argmax(-1))
    hook.remove()
    assert num_calls == [2, *[1] * (FISH.config.codebooks - 2)]
    codes = [first]
    for _ in range(1, FISH.config.codebooks):
        x = torch.cat((hidden[:, None], fast.embedding(torch.stack(codes, 1))), 1)  # [B, 1 + k, D]
        empty = x.new_zeros(3, 2, fast.config.kv_heads, FISH.config.codebooks, fast.config.head_dim)
        cos, sin = (fast.rope[:, i].repeat_interleave(2, -1) for i in range(2))
        for layer in fast.layers:
            x, _ = layer(x, cos, sin, torch.tensor([0]), empty)
        codes.append(fast.head(fast.norm(x[:, -1])).argmax(-1))
    assert torch.equal(made, torch.stack(codes, 1))


# the end, and the window of recent codes


def test_the_end_is_never_drawn_first_or_decoded():
    speech = zoo.generate(with_end(1e4), ASKED)
    assert len(speech.frames) == 1 and len(speech.samples) == 2048


def test_the_last_frame_before_a_cap_is_kept():
    assert len(zoo.generate(with_end(-1e4), ASKED).frames) == 20


@torch.inference_mode()
def test_the_window_holds_the_latest_codes_except_the_first_of_all():
    family = with_end(-1e4)
    state, prompt = family.state(2), family.prompt(ASKED)
    family.admit(state, 1, prompt)
    slots, random = torch.tensor([1]), torch.Generator().manual_seed(2)
    for step in range(14):
        family.emit(state, slots, torch.randn(1, family.spec.width, generator=random))
        codes = state.tape[1, 1 : step + 1, 0].tolist()
        assert state.recent[1].tolist() == ([-1] * RAS_WINDOW + codes)[-RAS_WINDOW:]
    assert (state.recent[0] == -1).all()


def test_equal_seeds_give_equal_speech():
    same, other = alone("fish_s2", ASKED), zoo.generate(FISH, replace(ASKED, seed=4))
    assert torch.equal(same.frames, zoo.generate(FISH, ASKED).frames)
    assert same.frames.tolist() != other.frames.tolist()


# turns


def passes(family: Family, request: Request) -> list[Prompt]:
    """Return the prompts of a request whose passes each speak three frames of zeros."""
    prompts, made = family.prompts(request), []
    made.append(next(prompts))
    while not made[-1].is_final:
        made.append(prompts.send(torch.zeros(3, family.config.codebooks, dtype=torch.int64)))
    return made


def test_a_pass_reads_the_speech_of_earlier_passes():
    first, second = passes(FISH, TALK)
    assert second.prefix_keys[: len(first.prefix_keys)] == first.prefix_keys
    assert second.slot["seed"] != first.slot["seed"] == TALK.seed
    said = second.prefix_keys[len(first.prefix_keys) :]
    assert len(set(said[:3])) == 1 and said[0] < 0 <= min(said[3:])


def test_a_long_conversation_drops_its_oldest_turns(monkeypatch):
    """The model has 512 positions, and each pass speaks 100 frames. The references and the latest passes
    stay."""
    monkeypatch.setattr("zoo.fish_s2.model.DEFAULT_FRAMES", 100)
    talk = replace(TALK, text="".join(f"<|speaker:{i % 2}|>{'a' * 60}" for i in range(12)))
    prompts, made = FISH.prompts(talk), []
    made.append(next(prompts))
    while not made[-1].is_final:
        assert max(made[-1].max_positions) <= FISH.spec.max_positions
        made.append(prompts.send(torch.full((100, 4), len(made))))
    system = len(FISH.writer.system(talk.references))
    assert len(made) == 12 and len({prompt.prefix_keys[:system] for prompt in made}) == 1
    assert made[1].prefix_keys[: len(made[0].prefix_keys)] == made[0].prefix_keys
    said = [column_keys(FISH.writer.frames(torch.full((1, 4), i)), FISH.config)[0] for i in range(1, 12)]
    remembered = [key for key in said if key in made[11].prefix_keys]
    assert remembered == said[-len(remembered) :] and 1 <= len(remembered) < 11


def test_max_frames_limits_all_passes_together():
    prompts = FISH.prompts(replace(TALK, max_frames=10))
    assert next(prompts).max_frames == 10
    assert prompts.send(torch.zeros(3, 4, dtype=torch.int64)).max_frames == 7
    assert following(prompts, torch.zeros(7, 4, dtype=torch.int64)) is None
    paused = replace(TALK, text=f"{TURNS} [pause:0.5s] {TURNS}")
    assert len(zoo.generate(FISH, replace(TALK, max_frames=10)).frames) == 10
    assert [len(zoo.generate(FISH, replace(paused, max_frames=n)).frames) for n in (7, 25)] == [7, 25]


@pytest.mark.parametrize("references", [(), TALK.references])
def test_a_pause_in_a_conversation_loses_no_turn(references):
    turns = [f"<|speaker:{i % 2}|>Turn {i}." for i in range(14)]
    text = "".join(turns[:7]) + "[pause:0.5s]" + "".join(turns[7:])
    answer = FISH.passes(Request(text=text, references=references))
    frames = [torch.full((2, 4), i) for i in range(4)]
    made = [next(answer), *map(answer.send, frames[:3])]
    for prompt, spoken in zip(made, (turns[:5], turns[5:7], turns[7:12], turns[12:]), strict=True):
        asked = column_keys(FISH.writer.user("\n".join(spoken)), FISH.config)
        assert prompt.prefix_keys[-len(asked) :] == asked
    assert [prompt.is_final for prompt in made] == [False, False, False, True]
    pause = FISH.spec.sample_rate_hz // 2
    assert [prompt.silence_after for prompt in made] == [0, pause, 0, 0]
    said = [column_keys(FISH.writer.frames(each), FISH.config)[0] for each in frames]
    carried = [[i for i, key in enumerate(said) if key in prompt.prefix_keys] for prompt in made]
    first = [] if references else [0, 1]  # the first piece, whose random voice goes on
    assert carried == [[], [0], first, [*first, 2]]


@pytest.mark.parametrize("report_lag", [0, 1])
def test_the_engine_speaks_turns_like_the_plain_loop(report_lag):
    """The requests are batched with others, in slots that are reused."""
    asked = [TALK, ASKED, *OTHERS]
    engine = Engine(family("fish_s2"), max_slots=2, compile=False, report_lag=report_lag, clock=Clock())
    listeners = serve(engine, {0: asked[:2], 3: asked[2:]})
    for listener, request in zip(listeners, asked, strict=True):
        np.testing.assert_allclose(listener.samples, alone("fish_s2", request).samples, **SAMPLES)
    assert sum(request.references != () for request in asked) == 2
    assert len(alone("fish_s2", TALK).frames) == 18  # two passes, both at their cap
