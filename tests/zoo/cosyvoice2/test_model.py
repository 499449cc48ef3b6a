"""CosyVoice 2: prompts, the flow's bounded past, and sampling."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from models import family
from torch import Tensor

import zoo
from zoo.contract import View
from zoo.cosyvoice2.model import MAX_CODES_AT_ONCE, CosyVoice2, CosyVoice2State
from zoo.cosyvoice2.prompt import END_OF_PROMPT, ended
from zoo.cosyvoice2.sampling import nucleus, repetition_aware
from zoo.cosyvoice2.voices import MAX_PROMPT, MAX_REST
from zoo.nn.s3.sizes import GRID
from zoo.request import AudioClip, Reference, Request, RequestError

CLIP = AudioClip(np.sin(np.arange(40_000) ** 1.4 / 30).astype(np.float32) / 4, 16000)  # 2.5 s


@pytest.fixture(scope="module")
def model() -> CosyVoice2:
    loaded = family("cosyvoice2")
    assert isinstance(loaded, CosyVoice2)
    return loaded


# prompts


def test_only_a_transcript_adds_the_words_and_codes_of_a_reference(model):
    text, said = model.writer.tokenize("Hm."), model.writer.tokenize("Good evening.")
    cloned = model.prompt(Request(text="Hm.", references=(Reference(CLIP, "Good evening."),)))
    num_codes = len(model.cloner(CLIP).codes)
    assert len(cloned.inputs) == 1 + len(said) + len(text) + 1 + num_codes and num_codes > 50
    crossed = model.prompt(Request(text="Hm.", references=(Reference(CLIP),)))
    assert len(crossed.inputs) == 1 + len(text) + 1
    told = model.prompt(
        Request(text="Hm.", references=(Reference(CLIP, "Good evening."),), instructions="slowly")
    )
    assert len(told.inputs) == 1 + len(model.writer.tokenize("slowly")) + 1 + len(text) + 1
    for prompt in (cloned, crossed, told):  # the flow reads the prompt in every mode
        assert int(prompt.slot["num_prompt"]) == num_codes
        assert (prompt.grid_offset + num_codes) % GRID == 0


def test_an_instruction_has_exactly_one_end_token(model):
    asked = [
        Request(text="Hm.", voice="demo", instructions=text) for text in ("slowly", f"slowly{END_OF_PROMPT}")
    ]
    first, second = (model.prompt(request).prefix_keys for request in asked)
    assert first == second


def test_tags_are_tokens_and_other_special_tokens_are_text(model):
    assert model.writer.tokenize("[laughter]") == [model.writer.tokenize.special["[laughter]"]]
    assert len(model.writer.tokenize(END_OF_PROMPT)) > 3
    assert not set(model.writer.tokenize("<|im_end|>")) & set(model.writer.tokenize.special.values())


def test_the_text_bounds_the_speech(model):
    num = len(model.writer.tokenize("Good morning."))
    prompt = model.prompt(Request(text="Good morning.", voice="sound"))
    assert (prompt.slot["min_steps"], prompt.max_frames) == (2 * num, 20 * num)
    speech = zoo.generate(model, Request(text="Good morning.", voice="sound", seed=3))
    assert 2 * num <= len(speech.frames) <= 20 * num
    assert len(speech.samples) == 960 * len(speech.frames)


def test_a_request_must_name_one_of_several_voices(model):
    with pytest.raises(RequestError, match="a voice is needed"):
        model.prompt(Request(text="Hm."))


def test_only_the_flow_cuts_a_long_prompt(model):
    long = AudioClip(np.tile(CLIP.samples, 6), 16000)  # 15 s
    prompt = model.prompt(Request(text="Hm.", references=(Reference(long, "Good evening."),)))
    assert int(prompt.slot["num_prompt"]) == MAX_PROMPT and len(prompt.slot["rest"]) <= MAX_REST
    assert len(prompt.inputs) > 370


def test_an_encoded_voice_is_cached(model):
    before = model.flow_prompts.num_encoded, model.cloner.voices.num_encoded
    clip = AudioClip(CLIP.samples[:20_000], 16000)
    for text in ("Hm.", "Good morning."):
        model.prompt(Request(text=text, references=(Reference(clip),)))
    assert (model.flow_prompts.num_encoded, model.cloner.voices.num_encoded) == (before[0] + 1, before[1] + 1)


# samples


@torch.inference_mode()
def rendered(model: CosyVoice2, voice: str, codes: Tensor, size: int) -> Tensor:
    """Return samples of a tape of these codes, in windows of `size` frames after the first grid point."""
    state: CosyVoice2State = model.state(1, len(codes))
    prompt = model.prompt(Request(text="Hm.", voice=voice))
    model.admit(state, 0, prompt)
    state.tape[0, :, 0], state.ready[0] = codes, len(codes)
    start, heard = 0, []
    while start < len(codes):
        first = prompt.grid_offset if start == 0 and size < len(codes) else 0
        stop = min(start + (first or size), len(codes))
        frames = max(model.spec.window.bucket(stop - start), stop - start)
        length = model.spec.window.length_bucket(stop)
        is_last = torch.tensor([stop == len(codes)])
        count = torch.tensor([stop - start])
        samples, valid = model.render(
            state, View(torch.tensor([0]), torch.tensor([start]), count, is_last, frames, length)
        )
        heard.append(samples[0, : int(valid)])
        start = stop
    return torch.cat(heard)


@pytest.mark.slow
@torch.inference_mode()
def test_a_large_batch_is_rendered_in_several_parts(model):
    exact = copy.deepcopy(model).double()
    rows = MAX_CODES_AT_ONCE // 50 + 1
    state: CosyVoice2State = exact.state(rows, 60)
    prompt = exact.prompt(Request(text="Hm.", voice="demo"))
    codes = torch.arange(rows * 60).view(rows, 60) * 733 % 6561
    for slot in range(rows):
        exact.admit(state, slot, prompt)
    state.tape[:rows, :, 0], state.ready[:rows] = codes, 60
    slots = torch.arange(rows).flip(0)
    start, count, is_last = slots * 0, slots * 0 + prompt.grid_offset + 25, slots < 0
    samples, valid = exact.render(
        state, View(slots, start, count, is_last, 50, exact.spec.window.length_bucket(60))
    )
    alone = exact.state(1, 60)
    for row in (0, rows - 2, rows - 1):
        exact.admit(alone, 0, prompt)
        alone.tape[0, :, 0], alone.ready[0] = codes[slots[row]], 60
        view = View(slots[:1] * 0, start[:1], count[:1], is_last[:1], 50, exact.spec.window.length_bucket(60))
        expected, num = exact.render(alone, view)
        assert valid[row] == num[0] > 0
        torch.testing.assert_close(samples[row, : num[0]], expected[0, : num[0]], rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("voice", ["demo", "sound"])
@pytest.mark.parametrize("past_tokens", [150, 500])
def test_a_stream_equals_the_whole_tape_beyond_the_cached_past(model, voice, past_tokens):
    """In float64. A past of 150 tokens is too short, so both drop the same oldest tokens."""
    exact = copy.deepcopy(model).double()
    exact.past_tokens = past_tokens
    codes = torch.arange(260) * 733 % 6561
    whole = rendered(exact, voice, codes, len(codes))
    assert len(whole) == 960 * len(codes) and whole.std() > 0.01
    for size in (25, 50):
        torch.testing.assert_close(rendered(exact, voice, codes, size), whole, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_a_shorter_past_changes_the_speech(model):
    """The bound is an approximation of the reference, which has none."""
    codes = torch.arange(260) * 733 % 6561
    short = copy.deepcopy(model)
    short.past_tokens = 150
    whole, bounded = rendered(model, "demo", codes, 25), rendered(short, "demo", codes, 25)
    same = 960 * 90  # nothing is dropped yet: 150 tokens less the prompt and the vocoder's lag
    torch.testing.assert_close(bounded[:same], whole[:same], rtol=0, atol=1e-5)
    assert (bounded - whole).abs().max() > 1e-4


def test_given_noise_replaces_random_noise(model):
    request = Request(text="Hm.", voice="demo", max_frames=6)
    noise = torch.randn(6, *model.spec.noise_shape, generator=torch.Generator().manual_seed(1))
    first, second = (zoo.generate(model, request, noise=given).samples for given in (noise, noise + 1))
    assert torch.equal(first, zoo.generate(model, request, noise=noise).samples) and not torch.equal(
        first, second
    )
    assert torch.equal(zoo.generate(model, request).samples, zoo.generate(model, request).samples)


# sampling


def test_the_nucleus_keeps_the_token_that_crosses():
    """As in the reference's loop, top_p counts all probability and top_k limits the number."""
    logits = torch.randn(40, 60, generator=torch.Generator().manual_seed(0)) * 2
    top_k, top_p = torch.randint(0, 12, (40,)), torch.rand(40)
    kept = nucleus(logits, top_k, top_p).isfinite()
    for row, k, p, mask in zip(logits, top_k.tolist(), top_p.tolist(), kept, strict=True):
        values, order = row.softmax(0).sort(descending=True, stable=True)
        expected: list[int] = []
        mass = 0.0
        for value, index in zip(values.tolist(), order.tolist(), strict=True):
            if mass >= p or (k and len(expected) >= k):
                break
            expected.append(index)
            mass += value
        assert mask.nonzero()[:, 0].tolist() == sorted(expected)


def test_a_repeated_code_is_sampled_again_from_all_others():
    logits = torch.tensor([[5.0, 3.0, 1.0, 0.0]]).repeat(4000, 1)
    num = len(logits)
    noise = -torch.log(-torch.log(torch.rand(num, 2, 4, generator=torch.Generator().manual_seed(0))))
    settings = torch.ones(num), torch.full((num,), 1), torch.ones(num)
    drawn = repetition_aware(logits, *settings, lambda code: code == 0, noise)
    shares = drawn.bincount(minlength=4) / num
    expected = torch.tensor([-torch.inf, 3.0, 1.0, 0.0]).softmax(0)
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.02)
    assert (repetition_aware(logits, *settings, lambda code: code < 0, noise) == 0).all()
    greedy = repetition_aware(logits, 0 * settings[0], *settings[1:], lambda code: code == 0, noise)
    assert (greedy == 1).all()


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("Hm", "Hm."),
        ("ok [laughter]", "ok [laughter]."),
        ("你好", "你好。"),
        ("Hm?", "Hm?"),
        ("你好、", "你好、"),
        ('He said "Hm."', 'He said "Hm."'),
        ("one, ", "one,"),
        ("a <|b|>", "a <|b|>"),
    ],
)
def test_a_whole_text_ends_like_a_sentence(text, read):
    """By the reference's split_paragraph, except behind a comma, where a piece of a long text may end."""
    write, transcript = family("cosyvoice2").writer, (1,)
    assert ended(text.strip()) == read
    assert write(Request(text=text), transcript) == write(Request(text=read), transcript)
    apart = Request(text=text, options={"text_mode": "interleaved"})
    assert list(write(apart, transcript).text) == write.tokenize(text.strip())
