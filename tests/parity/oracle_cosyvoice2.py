"""Make the CosyVoice 2 fixtures with reference packages: transformers (language model, text tokenizer),
cosyvoice-minicpmo 0.1.0 (flow, vocoder), s3tokenizer 0.3.0, chatterbox-tts 0.1.7 (CAM++), torchaudio 2.11
(filter banks, resampling).

Run it in the reference environment that environments.sh builds:
    PYTHONPATH=. .venv-parity-cosyvoice2/bin/python tests/parity/oracle_cosyvoice2.py
"""

# ruff: noqa: RUF001  (the Chinese text has Chinese punctuation)

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import s3tokenizer
import torch
import torchaudio
import transformers
from safetensors.torch import save_file
from torch import Tensor

from zoo.checkpoint import loading, onnx_file, synthetic
from zoo.cosyvoice2 import demo, reference, weights
from zoo.cosyvoice2.config import Config
from zoo.cosyvoice2.reference import CAMPPlus, greedy, greedy_ids, make_tokenizer, prompt_mel
from zoo.nn.s3.campplus import CamPlus

HERE = Path(__file__).parent
FIXTURES = HERE / "cosyvoice2"
SEED = 0
SIZE = demo.CONFIGS["parity"]
PACKAGES = (
    "transformers",
    "cosyvoice-minicpmo",
    "s3tokenizer",
    "chatterbox-tts",
    "torchaudio",
    "torch",
    "diffusers",
    "librosa",
)
VERSIONS = {name: importlib.metadata.version(name) for name in PACKAGES}
NUM_CODES, FRAMES = 6561, 57  # 57 codes are two chunks and a part of a third
TEXTS = (
    "Good morning.",
    "It's 7:45, and my iPhone isn't ready [laughter] at all.",
    "你好，世界！今天天气很好，谢谢大家。",
    " <strong>very</strong>  well [breath]",
    "cafe\u0301 x²\n\n12345 !?",
)


def noise(name: str, *shape: int) -> Tensor:
    return torch.from_numpy(synthetic.fill(f"noise {name}", shape, "parity", [("noise", 0.0, 1.0, False)]))


def save(name: str, facts: dict[str, Any], **tensors: Tensor) -> None:
    FIXTURES.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, FIXTURES / f"{name}.safetensors")
    facts |= {"size": "parity", "seed": SEED, "versions": VERSIONS}
    (FIXTURES / f"{name}.json").write_text(
        json.dumps(facts, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    )


# language model


def language_model(directory: Path) -> tuple[transformers.Qwen2Model, dict[str, Tensor]]:
    tensors = torch.load(directory / "llm.pt", weights_only=True)
    config = transformers.Qwen2Config(
        **json.loads((directory / "CosyVoice-BlankEN" / "config.json").read_text())
    )
    model = transformers.Qwen2Model(config).eval()
    prefix = "llm.model.model."
    model.load_state_dict(
        {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    )
    return model, tensors


@torch.inference_mode()
def speak(
    model: transformers.Qwen2Model, tensors: dict[str, Tensor], case: dict[str, Any]
) -> dict[str, Tensor]:
    """Generate codes from inputs in the order of Qwen2LM.inference.

    Every code recomputes the whole sequence.
    """
    embed, speech = tensors["llm.model.model.embed_tokens.weight"], tensors["speech_embedding.weight"]
    sos, task = tensors["llm_embedding.weight"].split(1)
    inputs = torch.cat((sos, embed[case["text_ids"]], task, speech[case["codes"]]))
    said: list[int] = []
    kept = []
    for step in range(case["max_frames"]):
        whole = torch.cat((inputs, speech[torch.tensor(said, dtype=torch.int64)]))
        hidden = model(inputs_embeds=whole[None]).last_hidden_state[0, -1]
        scores = (tensors["llm_decoder.weight"] @ hidden + tensors["llm_decoder.bias"]).log_softmax(0)
        if step < case["min_frames"]:
            scores[NUM_CODES] = -torch.inf
        if step % 8 == 0:
            kept.append(hidden)
        code = greedy(scores, said, case["win_size"])
        if code >= NUM_CODES:
            break
        said.append(code)
    return {"codes": torch.tensor(said), "hidden": torch.stack(kept), "inputs": inputs[-1]}


def make_language_model(directory: Path) -> None:
    model, tensors = language_model(directory)
    tokenizer = make_tokenizer(directory)
    voices = torch.load(directory / "spk2info.pt", weights_only=True)
    prompt_text = voices["demo"]["prompt_text"][0].tolist()
    prompt_codes = voices["demo"]["flow_prompt_speech_token"][0]
    none = prompt_codes[:0]
    end = tokenizer.convert_tokens_to_ids("<|endofprompt|>")
    spoken = {text: tokenizer(text.strip())["input_ids"] for text in (*TEXTS, "slowly")}
    cases = {
        "zero_shot": (TEXTS[0], prompt_text, prompt_codes, {"voice": "demo"}),
        "chinese": (TEXTS[2], prompt_text, prompt_codes, {"voice": "demo"}),
        "instruct": (TEXTS[1], [*spoken["slowly"], end], none, {"voice": "demo", "instructions": "slowly"}),
        "sound": (TEXTS[0], [], none, {"voice": "sound"}),
    }
    for name, (text, before, codes, asked) in cases.items():
        for win_size in (0, 10):
            ids = spoken[text]
            case = {
                "text_ids": [*before, *ids],
                "codes": codes,
                "max_frames": 40,
                "min_frames": 2 * len(ids),
                "win_size": win_size,
            }
            made = speak(model, tensors, case)
            request = asked | {
                "text": text,
                "temperature": 0.0,
                "max_frames": 40,
                "options": {"ras_win_size": win_size},
            }
            save(f"lm_{name}_{win_size}", {"request": request, "text_ids": case["text_ids"]}, **made)


INTERLEAVED = "Good morning, everybody who is here today: my phone rings."


@torch.inference_mode()
def make_interleaved(directory: Path) -> None:
    """Write the codes of Qwen2LM.inference_bistream, run token by token by zoo/cosyvoice2/reference.py."""
    lm, tokenizer = reference.make_lm(directory, Config.read(directory)), make_tokenizer(directory)
    demo_voice = torch.load(directory / "spk2info.pt", weights_only=True)["demo"]
    prompt_codes, before = demo_voice["flow_prompt_speech_token"], demo_voice["prompt_text"][0].tolist()
    cases = {"none": 0, "rest": prompt_codes.shape[1], "whole": prompt_codes.shape[1] // 15 * 15}
    text, made = tokenizer(INTERLEAVED)["input_ids"], {}
    for name, num_codes in cases.items():
        words = before if num_codes else []
        with patch.object(lm, "sampling_ids", greedy_ids):
            said = reference.say_interleaved(lm, text, words, prompt_codes[:, :num_codes])
            made[name] = torch.tensor(list(islice(said, 90)))
    save("interleaved", {"text": INTERLEAVED, "num_codes": cases}, **made)


def make_tokens(directory: Path) -> None:
    tokenizer = make_tokenizer(directory)
    tokens = [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    (FIXTURES / "tokens.json").write_text(json.dumps(tokens, indent=1, ensure_ascii=False) + "\n")


# flow and vocoder


Prompt = tuple[Tensor, Tensor, Tensor]  # codes [1, P], mel [1, 2P, MELS], speaker [1, D]


def mel_of(flow: Any, codes: Tensor, prompt: Prompt, streaming: bool, finalize: bool) -> Tensor:
    """Return the mel [F, MELS] of codes after a prompt."""
    before, mel, speaker = prompt
    num_codes, num_before, num_mel = (torch.tensor([part.shape[1]]) for part in (codes, before, mel))
    given = (codes, num_codes, before, num_before, mel, num_mel, speaker)
    return flow.inference(*given, streaming, finalize)[0][0].mT


@torch.inference_mode()
def make_flow(directory: Path) -> None:
    flow = reference.make_flow(directory, Config.read(directory))
    voices = torch.load(directory / "spk2info.pt", weights_only=True)
    codes = (torch.arange(FRAMES)[None] * 997 + 5) % NUM_CODES
    demo_voice, sound = voices["demo"], voices["sound"]
    prompt_codes, prompt_mel = demo_voice["flow_prompt_speech_token"], demo_voice["prompt_speech_feat"]
    prompts = {
        "demo": (prompt_codes, prompt_mel, demo_voice["flow_embedding"]),
        "sound": (prompt_codes[:, :0], prompt_mel[:, :0], sound["embedding"]),
    }
    made = {"codes": codes[0], "noise": flow.decoder.rand_noise[0, :, ::101].clone()}
    for name, prompt in prompts.items():
        for mode, streaming, finalize in (
            ("chunks", True, True),
            ("chunks_open", True, False),
            ("whole", False, True),
        ):
            made[f"{name}_{mode}"] = mel_of(flow, codes, prompt, streaming, finalize)
    save("flow", {"chunk": 25}, **made)
    make_vocoder(directory, made)
    make_noise(directory, flow, codes, prompts["demo"])


def make_noise(directory: Path, flow: Any, codes: Tensor, prompt: Prompt) -> None:
    """Write samples of speech with given noise. The prompt keeps the flow's own noise."""
    start, first, fixed = noise("start", 2 * FRAMES, 80), prompt[1].shape[1], flow.decoder.rand_noise.clone()
    fixed[0, :, first : first + len(start)] = start.mT
    with patch.object(flow.decoder, "rand_noise", fixed):
        mel = mel_of(flow, codes, prompt, True, True)
    vocoder = reference.make_vocoder(directory, Config.read(directory))
    with patch.object(torch, "randn_like", source_noise):
        samples, _ = vocoder.inference(mel.mT[None])
    save("noise", {"stride": 7}, samples=samples[0, ::7])


def source_noise(like: Tensor) -> Tensor:
    """Return the fixture's noise in place of torch.randn_like.

    The random phase, which has no effect, is zero.
    """
    values = noise("source", FRAMES * 960, 9)
    return values.expand_as(like) if like.shape[-1] == 9 else torch.zeros_like(like)


def make_vocoder(directory: Path, mels: dict[str, Tensor]) -> None:
    vocoder, made = reference.make_vocoder(directory, Config.read(directory)), {}
    for name in ("demo_chunks", "sound_chunks"):
        for kind in ("", "_exact"):
            with patch.object(torch, "randn_like", source_noise):
                samples, source = vocoder.inference(mels[name].mT[None])
            made[f"{name}_samples{kind}"], made[f"{name}_source{kind}"] = samples[0, ::7], source[0, 0, ::7]
            generator = vocoder.m_source.l_sin_gen
            sum_in_fp64 = generator.forward
            generator.forward = lambda f0, inner=sum_in_fp64: tuple(
                value.float() for value in inner(f0.double())
            )
        del generator.forward
        made[f"{name}_f0"] = vocoder.f0_predictor(mels[name].mT[None])[0]
    save("vocoder", {"stride": 7}, **made)


# voices from clips


def clips() -> dict[str, tuple[Tensor, int]]:
    """Return clips and their rates in Hz: chirps with noise, one of them in stereo."""
    made = {}
    for name, seconds, rate_hz, channels in (
        ("short", 0.7, 16000, 1),
        ("stereo", 1.31, 44100, 2),
        ("long", 2.6, 24000, 1),
    ):
        at = torch.arange(int(seconds * rate_hz)) / rate_hz
        chirp = (2 * torch.pi * (110 + 40 * at) * at).sin() * 0.3 * (1 + (7 * at).sin()) / 2
        samples = torch.stack([chirp + 0.02 * noise(f"{name} {i}", len(at)) for i in range(channels)])
        made[name] = (32768 * samples).round() / 32768, rate_hz
    return made


@torch.inference_mode()
def make_voices(directory: Path) -> None:
    tokenizer = reference.make_s3_tokenizer(directory)
    speaker, made = speaker_encoder(), {}
    speaker.load_state_dict(speaker_tensors(speaker))
    for name, (samples, rate_hz) in clips().items():
        mono = samples.mean(0)
        speech = torchaudio.transforms.Resample(rate_hz, 16000)(mono) if rate_hz != 16000 else mono
        voice = torchaudio.transforms.Resample(rate_hz, 24000)(mono) if rate_hz != 24000 else mono
        mel = s3tokenizer.log_mel_spectrogram(speech, n_mels=128)
        codes, _ = tokenizer.quantize(mel[None], torch.tensor([mel.shape[1]]))
        features = torchaudio.compliance.kaldi.fbank(
            speech[None], num_mel_bins=80, dither=0, sample_frequency=16000
        )
        features = features - features.mean(0, keepdim=True)
        made |= {
            f"{name}_clip": (32768 * samples).to(torch.int16),
            f"{name}_codes": codes[0].long(),
            f"{name}_features": features[::3],
        }
        made |= {f"{name}_speaker": speaker(features[None])[0], f"{name}_mel": prompt_mel(voice[None])[0].mT}
    save("voices", {"rates_hz": {name: rate_hz for name, (_, rate_hz) in clips().items()}}, **made)


def speaker_encoder() -> CAMPPlus:
    return CAMPPlus(memory_efficient=False).eval()


def speaker_tensors(model: CAMPPlus) -> dict[str, Tensor]:
    """Return the tensors of CAM++. No two are equal, because the exporter would merge them."""
    state = model.state_dict()
    filled = {
        name: torch.from_numpy(fill_speaker(name, tuple(value.shape)))
        for name, value in state.items()
        if value.dim()
    }
    return state | filled


def fill_speaker(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return synthetic.fill(name, shape, "cosyvoice2:campplus", demo.RULES)


@torch.inference_mode()
def check_exported_speaker(directory: Path) -> None:
    """Check that our CAM++ gives the reference's vector from the file that PyTorch's exporter writes."""
    model = speaker_encoder()
    model.load_state_dict(speaker_tensors(model))
    path = directory / "exported" / weights.SPEAKER_FILE
    path.parent.mkdir()
    features = noise("features", 1, 250, 80)
    axes = {"input": {1: "frames"}}
    torch.onnx.export(
        model,
        (features,),
        str(path),
        input_names=["input"],
        output_names=["output"],
        dynamic_axes=axes,
        opset_version=14,
        dynamo=False,
    )
    print(len(onnx_file.initializers(path)), "initializers")
    with torch.device("meta"):
        ours = CamPlus()
    loading.load_file(
        ours, weights.campplus(), weights.open_speaker(path.parent), torch.device("cpu"), torch.float32
    )
    difference = (ours(features) - model(features)).abs().max() / model(features).abs().max()
    assert difference < 1e-4, f"the exported speaker encoder differs by {difference}"
    print("exported CAM++ differs by", float(difference))


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        directory = demo.write(Path(place) / "model", "parity", SEED)
        FIXTURES.mkdir(exist_ok=True)
        make_tokens(directory)
        make_language_model(directory)
        make_interleaved(directory)
        make_flow(directory)
        make_voices(directory)
        check_exported_speaker(directory)


if __name__ == "__main__":
    main()
