"""Cloned and designed voices: the layout of their prompts, refused requests, and the engine's promises for
requests with references."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from models import Clock, directory, family, serve, write
from one_pass import decode

import zoo
from compile_cache.strategy import Whole
from serving.engine.device.arena import PAGE_TOKENS
from serving.engine.engine import Engine
from zoo.contract import View
from zoo.qwen3_tts import demo
from zoo.qwen3_tts.prompt import FRAME, MAX_TEXT_TOKENS, SPEAKER
from zoo.request import AudioClip, Reference, Request, RequestError

BASE, DESIGN, VOICE = (family("qwen3_tts", size=size) for size in ("tiny-base", "tiny-1.7b-design", "tiny"))
CONFIG, CONTROL, TOKENIZE = BASE.config, BASE.config.control, BASE.writer.tokenize
CLONER = BASE.writer.cloner
SAMPLES = {"rtol": 0, "atol": 5e-5}


def clip(seed: int = 0, seconds: float = 0.7, rate_hz: int = 24000, channels: int = 1) -> AudioClip:
    """A noisy buzz. The seed sets its pitch."""
    at = np.arange(round(seconds * rate_hz)) / rate_hz
    voices = [
        sum(np.sin(2 * np.pi * (100 + 37 * seed + c) * k * at) / k for k in range(1, 9))
        for c in range(channels)
    ]
    noise = np.random.default_rng(seed).standard_normal((channels, len(at)))
    samples = (0.1 * np.stack(voices) + 0.02 * noise).astype(np.float32)
    return AudioClip(samples if channels > 1 else samples[0], rate_hz)


CLIP = clip(seconds=1.0)  # 12.5 frames
SAYS = "Good evening."
ICL = Request(text="hello world", references=(Reference(CLIP, SAYS),), temperature=0.0, max_frames=20)
SOUND = replace(ICL, references=(Reference(CLIP),), options={"x_vector_only_mode": True})
FULL = {"text_mode": "full"}
DESIGNED = Request(text="hello world", instructions="A slow old man.", temperature=0.0, max_frames=20)
WORDS = (*TOKENIZE("Good evening."), *TOKENIZE("hello world"), CONFIG.tts_eos)
PREFIX = (
    *((token, -1) for token in (CONFIG.im_start, CONFIG.assistant, *TOKENIZE("\n"))),
    *((CONFIG.tts_pad, index) for index in (CONTROL.nothink, CONTROL.think_bos, CONTROL.think_eos, SPEAKER)),
    (CONFIG.tts_bos, CONTROL.pad),
)


def with_clip(request: Request, clip: AudioClip, **fields: Any) -> Request:
    """The request with another recording and the same transcript."""
    [reference] = request.references
    return replace(request, references=(replace(reference, clip=clip),), **fields)


def with_words(request: Request, transcript: str | None, **fields: Any) -> Request:
    [reference] = request.references
    return replace(request, references=(replace(reference, transcript=transcript),), **fields)


def requests() -> list[Request]:
    """Clones with and without a transcript, from all kinds of clips, in both text modes. One clip comes
    twice."""
    return [
        replace(ICL, max_frames=13),
        replace(SOUND, max_frames=9),
        with_clip(
            ICL,
            clip(1, rate_hz=16000),
            text="It's 7:45, and my phone rings.",
            temperature=0.8,
            seed=3,
            max_frames=25,
        ),
        with_clip(ICL, clip(2, seconds=0.3), options=FULL, temperature=1.0, seed=4, max_frames=30),
        with_clip(
            SOUND,
            clip(3, rate_hz=48000, channels=2),
            options=SOUND.options | FULL,
            language="french",
            temperature=0.7,
            max_frames=5,
        ),
        replace(
            ICL, text="Good morning, everybody.", language="english", temperature=0.9, seed=5, max_frames=18
        ),
        with_clip(ICL, clip(4, seconds=1.9), text="a", max_frames=3),
    ]


# the layout of prompts


def test_an_interleaved_clone_reads_transcript_and_codes_in_parallel():
    """Here the codes are longer than the text."""
    script = write(BASE, ICL)
    sounds = (CONTROL.bos, *(FRAME - f for f in range(13)))
    assert len(WORDS) < len(sounds)
    words = (*WORDS, *[CONFIG.tts_pad] * (len(sounds) - len(WORDS)))
    assert script.pairs == (*PREFIX, *zip(words, sounds, strict=True)) and script.trailing == ()


def test_text_longer_than_the_codes_is_added_to_the_new_frames():
    script = write(BASE, with_clip(ICL, clip(seconds=0.2)))
    sounds = (CONTROL.bos, FRAME, FRAME - 1, FRAME - 2)
    assert script.pairs == (*PREFIX, *zip(WORDS[:4], sounds, strict=True)) and script.trailing == WORDS[4:]


def test_a_full_clone_reads_all_text_before_the_codes():
    script = write(BASE, replace(ICL, options=FULL))
    sounds = (CONTROL.bos, *(FRAME - f for f in range(13)))
    body = (*((token, CONTROL.pad) for token in WORDS), *((CONFIG.tts_pad, sound) for sound in sounds))
    assert script.pairs == (*PREFIX, *body) and script.trailing == ()


def test_a_clone_without_transcript_takes_one_position():
    words = WORDS[len(TOKENIZE("Good evening.")) :]
    streaming, whole = write(BASE, SOUND), write(BASE, replace(SOUND, options=SOUND.options | FULL))
    assert streaming.pairs == (*PREFIX, (words[0], CONTROL.bos)) and streaming.trailing == words[1:]
    assert whole.pairs == (*PREFIX, *((token, CONTROL.pad) for token in words), (CONFIG.tts_pad, CONTROL.bos))
    assert write(BASE, with_words(SOUND, "These words are not read.")) == streaming


def test_a_designed_voice_has_no_voice_position_and_reads_all_text_first():
    pairs = write(DESIGN, DESIGNED).pairs
    config, control = DESIGN.config, DESIGN.config.control
    instruction = (config.im_start, *TOKENIZE("user\nA slow old man."), config.im_end, *TOKENIZE("\n"))
    prefix = [pair for pair in PREFIX if pair[1] != SPEAKER]
    body = (
        *((token, control.pad) for token in (*TOKENIZE("hello world"), config.tts_eos)),
        (config.tts_pad, control.bos),
    )
    assert pairs == (*((token, -1) for token in instruction), *prefix, *body)


def test_empty_instructions_are_no_rows_of_the_prompt():
    """Source: QwenLM/Qwen3-TTS, generate_voice_design: the ids of empty instructions are None."""
    instruction = len(TOKENIZE("user\nA slow old man.")) + 2 + len(TOKENIZE("\n"))
    assert (
        write(DESIGN, replace(DESIGNED, instructions="")).pairs == write(DESIGN, DESIGNED).pairs[instruction:]
    )


def test_inputs_of_a_reference_are_sums_of_rows():
    """The speaker vector, and the sum of a frame's code embeddings, are each added to a text row."""
    script, prompt, talker = write(BASE, ICL), BASE.prompt(ICL), BASE.talker
    reference = script.reference
    for row, (text, codec) in zip(prompt.inputs, script.pairs, strict=True):
        expected = talker.text(torch.tensor(text))
        if codec == SPEAKER:
            expected = expected + reference.speaker
        elif codec <= FRAME:
            codes = reference.codes[FRAME - codec]
            expected = expected + talker.codec_embedding.weight[codes[0]]
            expected = expected + sum(talker.depth.embeddings.table(g)[codes[g + 1]] for g in range(15))
        elif codec >= 0:
            expected = expected + talker.codec_embedding.weight[codec]
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-5)
    assert prompt.slot["num_prompt_frames"] == len(reference.codes) == 13


def test_keys_are_equal_exactly_when_inputs_are():
    rows: dict[int, torch.Tensor] = {}
    for request in (
        *requests(),
        replace(ICL, text="hello there"),
        with_clip(ICL, AudioClip(CLIP.samples.copy(), 24000)),
    ):
        prompt = BASE.prompt(request)
        assert len(prompt.prefix_keys) == len(prompt.inputs)
        for key, row in zip(prompt.prefix_keys, prompt.inputs, strict=True):
            assert -(2**63) <= key < 2**63
            torch.testing.assert_close(rows.setdefault(key, row), row, rtol=0, atol=1e-6)
    distinct = torch.stack(list(rows.values()))
    apart = torch.cdist(distinct, distinct) + 10 * torch.eye(len(distinct))
    # A clip's speaker vector has two keys: one with and one without a transcript.
    assert (apart < 1e-3).sum() <= 2


# refused requests


@pytest.mark.parametrize(
    ("model", "request_", "param", "message"),
    [
        (
            BASE,
            replace(ICL, references=()),
            "references",
            "a reference is needed: .*0.6B base clones the voice of a recording",
        ),
        (
            BASE,
            replace(ICL, references=2 * ICL.references),
            "references",
            "2 references are given; .* takes up to 1",
        ),
        (
            BASE,
            with_words(ICL, " "),
            "transcript",
            r"transcript is missing; .*, or set x_vector_only_mode",
        ),
        (
            BASE,
            replace(ICL, voice="ryan"),
            "voice",
            "has no voice 'ryan'.*: it clones a reference",
        ),
        (
            BASE,
            replace(ICL, instructions="Sing."),
            "instructions",
            "no instructions: 1.7B custom_voice and voice_design of Qwen3-TTS do",
        ),
        (
            BASE,
            with_clip(ICL, clip(seconds=0.05)),
            "references",
            "lasts 0.05 s; from 0.054 to 60 s are possible",
        ),
        (BASE, with_clip(ICL, clip(seconds=61, rate_hz=8000)), "references", "the reference lasts 61 s"),
        (BASE, with_clip(SOUND, AudioClip(0 * CLIP.samples, 24000)), "references", "the reference is silent"),
        (
            BASE,
            with_clip(ICL, AudioClip(np.nan * CLIP.samples, 24000)),
            "references",
            "samples that are no",
        ),
        (BASE, with_words(ICL, "1" * 8193), "transcript", "transcript has 8193 tokens; the limit is 8192"),
        (
            BASE,
            with_words(ICL, "1" * 193, text="1" * 8000),
            "transcript",
            "have 8193 tokens together; the limit is 8192",
        ),
        (BASE, replace(ICL, options={"x_vector_only_mode": 1}), "x_vector_only_mode", "is 1; possible: "),
        (
            DESIGN,
            replace(DESIGNED, instructions=None),
            "instructions",
            "are needed: .* makes a voice from a description of it",
        ),
        (
            DESIGN,
            replace(DESIGNED, voice="ryan"),
            "voice",
            "has no voice 'ryan'.*: it makes a voice from instructions",
        ),
        (
            DESIGN,
            replace(DESIGNED, references=ICL.references),
            "references",
            "takes no reference: Qwen3-TTS base clones",
        ),
        (
            VOICE,
            Request(text="a", voice="ryan", references=ICL.references),
            "references",
            "custom_voice takes no reference",
        ),
        (
            VOICE,
            Request(text="a", voice="ryan", options=SOUND.options),
            "x_vector_only_mode",
            "takes no x_vector_only_mode",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_errors_name_the_wrong_parameter(model, request_, param, message):
    with pytest.raises(RequestError, match=message) as refused:
        model.prompt(request_)
    assert refused.value.param == param


def test_a_reference_is_encoded_only_if_the_rest_of_the_request_is_valid():
    new, before = with_clip(ICL, clip(50)), CLONER.references.num_encoded
    wrong = ({"text": ""}, {"language": "klingon"}, {"options": {"text_mode": "diagonal"}}, {"voice": "ryan"})
    for request in (with_words(new, None), *(replace(new, **fields) for fields in wrong)):
        with pytest.raises(RequestError):
            BASE.prompt(request)
    assert CLONER.references.num_encoded == before


def test_the_longest_text_and_transcript_fit():
    prompt = BASE.prompt(
        with_clip(with_words(ICL, "1" * 9), clip(seconds=0.06), text="1" * (MAX_TEXT_TOKENS - 9))
    )
    state = BASE.state(1, 1)
    BASE.admit(state, 0, prompt)
    # One more for the end of the text; two fewer, which are added to bos and to the one reference frame.
    assert state.text_count[0] == MAX_TEXT_TOKENS + 1 - 2


# models


def test_each_variant_reports_its_modes_and_reference_lengths():
    facts = {
        size: family("qwen3_tts", size=size).spec
        for size in ("tiny", "tiny-base", "tiny-1.7b-base", "tiny-1.7b-design")
    }
    assert [spec.modes for spec in facts.values()] == [("voice",), ("clone",), ("clone",), ("design",)]
    assert [spec.reference_s for spec in facts.values()] == [None, (0.054, 60.0), (0.054, 60.0), None]
    assert facts["tiny-base"].voices == facts["tiny-1.7b-design"].voices == ()
    assert zoo.inspect(directory("qwen3_tts", "tiny-base"))["reference_s"] == [0.054, 60.0]
    assert VOICE.codec.encoder is None and VOICE.talker.speaker is None


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("0.6b-base", 914_643_008), ("1.7b-base", 1_928_677_440), ("1.7b-design", 1_916_676_352)],
)
def test_published_sizes_have_the_published_number_of_parameters(size, parameters, tmp_path):
    assert zoo.inspect(demo.write_texts(tmp_path / "model", size))["parameters"] == parameters + 170_557_441


@pytest.mark.parametrize("codec", ["qwen3_tts_tokenizer_12hz", "qwen3_tts_tokenizer_25hz"])
def test_a_directory_with_only_a_codec_is_refused(codec, tmp_path):
    path = shutil.copytree(directory("qwen3_tts", "tiny-base") / "speech_tokenizer", tmp_path / "codec")
    config = json.loads((path / "config.json").read_text()) | {"model_type": codec}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=rf"only a codec \({codec}\); load the model that contains it as speech_tokenizer/"
    ):
        zoo.load(path, "cpu")


def test_a_base_model_without_its_speaker_encoder_is_refused(tmp_path):
    path = shutil.copytree(directory("qwen3_tts", "tiny-base"), tmp_path / "model")
    shutil.copy(directory("qwen3_tts", "tiny") / "model.safetensors", path)
    with pytest.raises(
        ValueError, match="does not hold the tensors its config promises: missing speaker_encoder"
    ):
        zoo.load(path, "cpu")


# references are encoded once


@pytest.mark.parametrize("request_", [ICL, SOUND], ids=["words", "sound"])
def test_a_reference_is_not_encoded_twice(request_, monkeypatch):
    store = CLONER.references
    asked = with_clip(request_, clip(60 + len(request_.options)))
    before = store.num_encoded
    first = BASE.prompt(asked)
    assert store.num_encoded == before + 1

    def encodes(*args):
        raise AssertionError("an encoder ran")

    for module in (BASE.codec.encoder, BASE.talker.speaker, CLONER.mel, BASE.codec.decoder):
        monkeypatch.setattr(module, "forward", encodes)
    same = AudioClip(asked.references[0].clip.samples.copy(), 24000)
    again = BASE.prompt(with_clip(asked, same, text="Something else."))
    assert store.num_encoded == before + 1
    for name in ("codec_state", "num_prompt_frames"):
        assert again.slot.get(name) is first.slot.get(name), name


def test_many_threads_encode_equal_references_once():
    store, asked = CLONER.references, with_clip(ICL, clip(70))
    before, prompts = store.num_encoded, []
    threads = [threading.Thread(target=lambda: prompts.append(BASE.prompt(asked))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert store.num_encoded == before + 1 and len(prompts) == 6
    assert all(torch.equal(prompt.inputs, prompts[0].inputs) for prompt in prompts)


# the codec continues from the reference


@pytest.mark.parametrize("frames", [1, 2, 9, 10, 11, 12, 40])
def test_priming_leaves_the_state_that_decoding_leaves(frames):
    decoder = family("qwen3_tts", "float64", "tiny-base").codec.decoder
    codes = torch.randint(64, (2, frames, 16), generator=torch.Generator().manual_seed(frames))
    none = torch.zeros(2, dtype=torch.int64)
    zeros = torch.zeros(2, decoder.state_size, dtype=torch.float64)
    _, past = decode(decoder, codes, zeros, none, none + frames)
    torch.testing.assert_close(decoder.prime(codes), past, rtol=0, atol=1e-11)


@pytest.mark.parametrize("sizes", [[1], [4], [25], [1, 4, 25]], ids=str)
def test_continuing_a_reference_is_exact_for_any_window(sizes):
    """Compared with decoding reference and new frames in one call and cutting off the reference's samples, in
    float64. A stream that starts from nothing is batched with it."""
    exact = family("qwen3_tts", "float64", "tiny-base")
    codes = write(BASE, ICL).reference.codes
    random = torch.Generator().manual_seed(1)
    state = exact.state(3)
    tape = torch.randint(64, (2, 30, 16), generator=random)
    for slot, request in ((2, ICL), (0, SOUND)):
        prompt = BASE.prompt(replace(request, max_frames=30))
        if slot == 2:
            prompt.slot["codec_state"] = exact.codec.decoder.prime(codes[None])[0]
        exact.admit(state, slot, prompt)
    state.tape[[2, 0], :30] = tape

    pieces, start, turn = [], 0, 0
    while start < 30:
        frames = sizes[turn % len(sizes)]
        count = min(frames, 30 - start)
        is_last = torch.tensor([start + count == 30] * 2)
        view = View(
            torch.tensor([2, 0]), torch.tensor([start] * 2), torch.tensor([count] * 2), is_last, frames
        )
        samples, valid = exact.render(state, view)
        assert valid.tolist() == [1920 * count] * 2
        pieces.append(samples[:, : 1920 * count])
        start, turn = start + count, turn + 1
    heard = torch.cat(pieces, 1)  # [2, N]

    none = torch.zeros(1, dtype=torch.int64)
    for row, before in ((0, codes), (1, codes[:0])):
        whole = torch.cat((before, tape[row]))[None]
        past = torch.zeros(1, exact.codec.decoder.state_size, dtype=torch.float64)
        samples, _ = decode(exact.codec.decoder, whole, past, none, none + whole.shape[1])
        torch.testing.assert_close(heard[row], samples[0, 1920 * len(before) :].float(), rtol=0, atol=1e-6)


# promises of the engine


@pytest.mark.slow
@pytest.mark.parametrize("report_lag", [0, 1])
@pytest.mark.parametrize("policy", ["streaming", "throughput"])
def test_a_batched_stream_equals_the_request_alone(policy, report_lag):
    """There are more clones than slots, so slots are reused, by clones with and without a transcript."""
    asked = requests()
    engine = Engine(BASE, max_slots=3, compile=False, report_lag=report_lag, policy=policy, clock=Clock())
    [model] = engine.models.values()
    model.scheduler.policy = replace(model.scheduler.policy, prefill_tokens=11)
    listeners = serve(engine, {0: asked[:2], 3: asked[2:3], 4: asked[3:]})
    for listener, request in zip(listeners, asked, strict=True):
        truth = zoo.generate(BASE, request)
        assert listener.frames == len(truth.frames) > 0
        np.testing.assert_allclose(listener.samples, truth.samples, **SAMPLES)


def num_equal(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@pytest.mark.parametrize("text_mode", ["full", "interleaved"])
@pytest.mark.parametrize("report_lag", [0, 1])
def test_requests_with_equal_references_share_pages(text_mode, report_lag):
    """Equal clips in different arrays share pages as far as the prompts are equal. Different clips share
    none."""
    words = "one two three four five six seven eight nine ten"
    first = with_words(ICL, words, options={"text_mode": text_mode}, max_frames=4)
    again = with_clip(first, AudioClip(CLIP.samples.copy(), 24000), text="hello there", seed=7)
    other = with_clip(first, clip(5))
    keys = [BASE.prompt(request).prefix_keys for request in (first, again, other)]
    equal = min(num_equal(keys[0], keys[1]), len(keys[1]) - 1)  # the first step reads the last input
    engine = Engine(BASE, max_slots=2, compile=False, report_lag=report_lag, clock=Clock())
    listeners = serve(engine, {0: [first], 2: [again], 60: [other]})
    assert engine.stats()["pages_shared"] == equal // PAGE_TOKENS > 0
    assert num_equal(keys[0], keys[2]) < PAGE_TOKENS
    listeners += serve(engine, {0: [first]})
    assert engine.stats()["pages_shared"] == equal // PAGE_TOKENS + (len(keys[0]) - 1) // PAGE_TOKENS
    for listener, request in zip(listeners, (first, again, other, first), strict=True):
        np.testing.assert_allclose(listener.samples, zoo.generate(BASE, request).samples, **SAMPLES)


@pytest.mark.slow
def test_the_engine_serves_designed_voices():
    asked = [
        DESIGNED,
        replace(
            DESIGNED, instructions="A child.", options={"text_mode": "interleaved"}, temperature=0.8, seed=2
        ),
    ]
    listeners = serve(Engine(DESIGN, max_slots=2, compile=False, report_lag=1, clock=Clock()), {0: asked})
    for listener, request in zip(listeners, asked, strict=True):
        np.testing.assert_allclose(listener.samples, zoo.generate(DESIGN, request).samples, **SAMPLES)


@pytest.mark.compile
def test_lowered_clones_equal_eager_ones(monkeypatch):
    """One graph serves clones with and without a transcript, and requests that share their first pages."""
    torch._dynamo.reset()

    def lower(verb, how):
        return torch.compile(verb, backend="eager", fullgraph=True) if how == Whole() else verb

    monkeypatch.setattr("serving.engine.device.lowered.lower", lower)
    engine = Engine(BASE, max_slots=3, report_lag=0, clock=Clock())
    engine.warm(lambda progress, stage: None)
    asked = [*requests(), requests()[0]]
    with torch.compiler.set_stance("fail_on_recompile"):
        listeners = serve(engine, {0: asked[:2], 3: asked[2:3], 4: asked[3:]})
    assert engine.stats()["pages_shared"] > 0
    for listener, request in zip(listeners, asked, strict=True):
        truth = zoo.generate(BASE, request)
        assert listener.frames == len(truth.frames) > 0
        np.testing.assert_allclose(listener.samples, truth.samples, **SAMPLES)
