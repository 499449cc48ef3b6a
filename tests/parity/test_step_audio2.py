"""Step-Audio 2 against transformers, the published audio encoder and stepaudio2-minicpmo: prompts, greedy tokens, rows of
clips, mel of the streamed flow, and samples.

The fixtures and what they hold: README.md in this folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import family
from safetensors.torch import load_file

import zoo
from zoo.check import check
from zoo.contract import View
from zoo.nn.s3.carried import heard
from zoo.request import AudioClip, Request, Turn
from zoo.step_audio2.voices import Voice, flow_prompt

HERE = Path(__file__).parent / "step_audio2"
FACTS = json.loads((HERE / "answers.json").read_text())
HEARD, SPEECH = load_file(HERE / "heard.safetensors"), load_file(HERE / "speech.safetensors")
CLIPS = {
    "short": (16_000, 40_961),
    "even": (16_000, 31_841),
    "other_rate": (24_000, 30_000),
    "pieces": (16_000, 25 * 16_000 + 2_560),
}
VOICES = {"long": 83, "short": 31}
STRIDE, MAX_TOKENS = 7, 90
# The reference adds up the phase of nine harmonics in fp32, as CosyVoice 2's does; 1e-4 was seen.
SAMPLES = {"rtol": 0, "atol": 2e-4}


@pytest.fixture(scope="module")
def model():
    return family("step_audio2", size="parity")


def clip(name: str) -> AudioClip:
    """Return the clip of the oracle, which follows from its rate and length."""
    rate_hz, num = CLIPS[name]
    t = torch.arange(num, dtype=torch.float64) / rate_hz
    hum = (2 * torch.pi * (180 + 40 * torch.sin(3 * t)) * t).sin() * (0.3 + 0.2 * torch.sin(7 * t))
    return AudioClip((hum * 32767).round().div(32768).float().numpy(), rate_hz)


def codes_of(num: int) -> torch.Tensor:
    return torch.arange(num) * 1237 % 6561


def voice(num_codes: int, width: int) -> Voice:
    at = torch.arange(2 * num_codes)[:, None] + torch.arange(80) / 7
    speaker = (torch.arange(width) * 0.7 + num_codes).cos()
    return Voice(codes_of(num_codes) * 3 % 6561, (at / 5).sin() * 2 - 4, speaker)


def request_of(name: str) -> Request:
    asked: dict[str, Any] = dict(FACTS["answers"][name]["request"])
    options = {"max_tokens": MAX_TOKENS, "template": asked["template"], "thinks": asked.get("thinks", False)}
    turns = [Turn("system", asked["system"])] if "system" in asked else []
    if name == "second":
        turns = [Turn("system", "Be brief."), Turn("user", FACTS["text"])]
        turns += [
            Turn("assistant", tokens=tuple(FACTS["answers"]["written"]["said"])),
            Turn("user", "And then?"),
        ]
    elif "clip" in asked:
        text = FACTS["text"] if name in ("text", "base") else None
        turns.append(Turn("user", text, clip(asked["clip"])))
    else:
        turns.append(Turn("user", FACTS["text"]))
    output = asked.get("output", "speech")
    voice = "default_female" if output == "speech" else None
    return Request(text="", voice=voice, turns=tuple(turns), options=options, temperature=0.0, output=output)


@pytest.mark.parametrize("name", CLIPS)
def test_rows_of_clips_are_the_reference_s(model, name):
    pieces = model.writer.ear(clip(name)).pieces
    assert len(pieces) == sum(key.startswith(f"{name}.") for key in HEARD)
    for i, rows in enumerate(pieces):
        found = HEARD[f"{name}.{i}"]
        torch.testing.assert_close(rows[:: 5 if len(rows) > 60 else 1], found, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", FACTS["answers"])
def test_greedy_answers_are_the_reference_s(model, name):
    """Text, codes and padding, token by token, for every form of a prompt."""
    request, expected = request_of(name), FACTS["answers"][name]
    assert list(model.writer(request, check(request, model.spec)).ids) == expected["ids"]
    said = zoo.generate(model, request)
    assert list(said.tokens) == expected["said"]
    first, hidden = model.first_code, model.first_hidden
    codes = [token - first for token in expected["said"] if 0 <= token - first < 6561]
    assert said.frames[:, 0].tolist() == ([] if request.output == "text" else codes)
    text = b"".join(model.detokenize(token) for token in expected["said"] if token < hidden)
    assert said.text == ("" if request.options["thinks"] else text.decode(errors="replace"))


def spoken(model, name: str, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mel and the samples of an answer of num codes in a voice."""
    made: list[torch.Tensor] = []

    def keep(vocoder, state, slots, mel, start, stop, *others):
        made.append(mel[0, : int(stop - start)])
        return heard(vocoder, state, slots, mel, start, stop, *others)

    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("zoo.step_audio2.model.heard", keep)
        prompt = flow_prompt(model.flow, voice(VOICES[name], model.config.flow.speaker))
        state = model.state(1)
        state.past.put(0, prompt.past, prompt.num_tokens)
        state.num_prompt[0], state.speaker[0] = prompt.num_tokens, prompt.speaker
        state.tape[0, :num, 0], state.ready[0] = codes_of(num), num
        row = torch.tensor([0]), torch.tensor([num]), torch.tensor([True])
        samples, valid = model.render(state, View(torch.tensor([0]), *row, num))
    return torch.cat(made), samples[0, : int(valid[0])]


@pytest.mark.parametrize("name", VOICES)
@pytest.mark.parametrize("num", [3, 25, 28, 51, 53, 150])
def test_streamed_speech_is_the_reference_s(model, name, num):
    """Longer than what the past holds, with a prompt of more and of less than 100 frames, and every end of a stream."""
    mel, samples = spoken(model, name, num)
    assert len(mel) == 2 * num and len(samples) == 960 * num
    found = SPEECH[f"{name}.{num}.mel"]
    torch.testing.assert_close(mel[:: 5 if num > 60 else 1], found, rtol=0, atol=1e-5)
    if num in (25, 51):
        torch.testing.assert_close(samples[::STRIDE], SPEECH[f"{name}.{num}.samples"], **SAMPLES)


def test_the_mel_of_a_voice_is_the_reference_s(model):
    """It is as long as two frames for every code; the reference repeats the last one, or cuts."""
    found = SPEECH["mel"]
    _, read = model.cloner(clip("other_rate"))
    num = min(len(found), -(-len(read.mel) // 5))
    # Amplitudes, not their logarithms: next to a hum most bins hold rounding errors, which differ between CPUs.
    torch.testing.assert_close(read.mel[::5][:num].exp(), found[:num].exp(), rtol=1e-4, atol=1e-6)
    assert len(read.mel) == 2 * len(read.codes)
