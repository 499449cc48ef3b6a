"""Mixes of voices: weighted sums of speaker vectors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from models import directory, family

import zoo
from zoo.check import shares
from zoo.request import (
    AudioClip,
    Reference,
    Request,
    RequestError,
    is_mix,
    names_in,
    parts_of,
    with_own_names,
)

PRESETS = family("qwen3_tts")
BASE = zoo.load(directory("qwen3_tts", "tiny-base"), "cpu", "float32")
COSY = family("cosyvoice2")
FIRST, SECOND, *_ = PRESETS.spec.voices


def clip(pitch: float) -> AudioClip:
    return AudioClip((np.sin(np.arange(24000) * pitch) / 3).astype(np.float32), 24000)


ANNA, BERT = Reference(clip(0.02), name="anna"), Reference(clip(0.07), name="bert")


def asked(voice, *references, **fields):
    return Request(text="Good morning.", voice=voice, references=references, seed=3, max_frames=3, **fields)


def weights(voice, *references, model=PRESETS):
    return [(share.name, round(share.weight, 6)) for share in shares(asked(voice, *references), model.spec)]


def test_weights_of_a_mix_are_parsed():
    a, b = FIRST, SECOND
    assert weights(f"{a}+{b}") == [(a, 0.5), (b, 0.5)]
    assert weights(f"{a}(2)+{b}(1)") == [(a, 0.666667), (b, 0.333333)]
    assert weights(f" {a.upper()} ( .5 ) + {b}(1.5)") == [(a, 0.25), (b, 0.75)]
    assert weights(f"{a}(3)+{a}") == [(a, 0.75), (a, 0.25)]
    assert weights("anna(3)+bert(1)", ANNA, BERT, model=BASE) == [("anna", 0.75), ("bert", 0.25)]
    assert shares(asked(a), PRESETS.spec) == shares(asked(None), PRESETS.spec) == ()


def test_http_and_the_model_read_a_mix_alike():
    mix = " Anna ( .5 ) + bert(2)"
    assert is_mix(mix) and not is_mix("anna")
    assert names_in(mix) == [name for name, _ in parts_of(mix)] == ["Anna", "bert"]
    assert names_in("anna(x)+bert+(2)+") == ["bert"]  # `parts_of` refuses the mix
    assert with_own_names(mix, {"Anna": "slt", "0": "x"}) == " slt ( .5 ) + bert(2)"
    assert with_own_names("anna(x)+bert", {"anna": "slt", "bert": "rms"}) == "anna(x)+rms"


def test_a_voice_whose_name_looks_like_a_mix_is_that_voice():
    spec = replace(PRESETS.spec, voices=("a", "b", "A+B"))
    assert shares(asked("a+b"), spec) == ()


NO_MIX = [
    "{a}+",
    "+{a}",
    "+",
    "{a}++{b}",
    "{a}(0)+{b}",
    "{a}(-1)+{b}",
    "{a}(1e3)+{b}",
    "{a}(2000)+{b}",
    "{a}(x)+{b}",
    "{a}(1+{b}",
]
NO_MIX += ["{a}(1)(2)+{b}", "{a}" + 8 * "+{b}", "{a}(nan)+{b}", "{a}()+{b}", "(2)+{b}"]


@pytest.mark.parametrize("voice", NO_MIX)
def test_a_malformed_mix_is_refused_with_an_example(voice):
    with pytest.raises(RequestError, match=r"is not a mix of voices such as anna\(2\)\+bert\(1\)") as refused:
        PRESETS.prompt(asked(voice.format(a=FIRST, b=SECOND)))
    assert refused.value.param == "voice"


SAID = replace(BERT, transcript="What I say.")
WRONG = [
    (PRESETS, asked(f"{FIRST}+nobody"), "voice", "no voice 'nobody' to mix; it has: "),
    (BASE, asked("anna+bert", ANNA), "voice", "no voice 'bert' to mix; it has: anna"),
    (PRESETS, asked(f"{FIRST}+bert", BERT), "references", "takes no reference: Qwen3-TTS base clones"),
    (BASE, asked("anna+anna", ANNA, BERT), "references", "leave one out"),
    (BASE, asked("anna+bert", ANNA, replace(BERT, name=None)), "voice", "no voice 'bert'"),
    (
        BASE,
        asked("anna+bert", ANNA, SAID),
        "voice",
        "'bert' has a transcript.*without a transcript, or set x_vector_only_mode",
    ),
    (COSY, asked("anna+bert", ANNA, SAID), "voice", "'bert' has a transcript.*use one without a transcript$"),
    (family("voxcpm2"), asked("anna+bert", ANNA, BERT), "voice", "cannot mix voices.*no speaker vectors"),
    (family("higgs_v3"), asked("anna+bert", ANNA, BERT), "voice", "cannot mix voices.*no speaker vectors"),
    (family("fish_s2"), asked("anna+bert", ANNA, BERT), "voice", "cannot mix voices.*no speaker vectors"),
]


@pytest.mark.parametrize(("model", "request_", "param", "says"), WRONG)
def test_voices_that_cannot_be_mixed_are_refused(model, request_, param, says):
    with pytest.raises(RequestError, match=says) as refused:
        model.prompt(request_)
    assert refused.value.param == param


def test_a_mix_of_presets_is_between_them():
    a, b = (PRESETS.prompt(asked(voice, language="english")) for voice in (FIRST, SECOND))
    mixed = PRESETS.prompt(asked(f"{FIRST}(3)+{SECOND}(1)", language="english"))
    assert torch.allclose(mixed.inputs, 0.75 * a.inputs + 0.25 * b.inputs, rtol=0, atol=1e-6)
    assert not torch.allclose(a.inputs, b.inputs, rtol=0, atol=1e-3)


def test_a_mix_of_clones_is_between_their_sounds():
    sound = {"x_vector_only_mode": True}
    a, b = (BASE.prompt(asked(None, replace(who, name=None), options=sound)) for who in (ANNA, BERT))
    mixed = BASE.prompt(asked("anna(3)+bert(1)", ANNA, BERT))
    assert torch.allclose(mixed.inputs, 0.75 * a.inputs + 0.25 * b.inputs, rtol=0, atol=1e-5)
    said = BASE.prompt(asked("anna(3)+bert(1)", ANNA, SAID, options=sound))  # the transcript is ignored
    assert torch.equal(said.inputs, mixed.inputs)


def test_cosyvoice_mixes_its_own_voices_and_uploads():
    own = COSY.spec.voices
    assert own, "the demo checkpoint has no voices"
    voice = COSY._voice(asked(f"{own[0]}(1)+anna(3)", ANNA))
    expected = 0.25 * COSY.voices[own[0]].speaker + 0.75 * COSY.cloner(ANNA.clip).speaker
    assert torch.allclose(voice.speaker, expected, rtol=0, atol=1e-6)
    assert len(voice.codes) == len(voice.mel) == 0 and voice.transcript == ()


@pytest.mark.parametrize(
    ("model", "voices", "references"),
    [
        (PRESETS, (FIRST, SECOND), ()),
        (BASE, ("anna", "bert"), (ANNA, BERT)),
        (COSY, ("anna", "bert"), (ANNA, BERT)),
    ],
    ids=["presets", "clones", "cosyvoice2"],
)
def test_mixes_speak_and_share_pages_only_with_equal_mixes(model, voices, references):
    a, b = voices
    speech = zoo.generate(model, asked(f"{a}+{b}", *references))
    assert len(speech.samples) and torch.isfinite(speech.samples).all()
    again, other = (model.prompt(asked(mix, *references)) for mix in (f"{a}(2)+{b}(2)", f"{a}(2)+{b}(1)"))
    first = model.prompt(asked(f"{a}+{b}", *references))
    assert first.prefix_keys == again.prefix_keys
    if model is not COSY:  # its language model does not read the speaker
        assert first.prefix_keys != other.prefix_keys
