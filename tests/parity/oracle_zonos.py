"""Make the Zonos fixtures and manifests with Zyphra/Zonos at bc40d98 and transformers' DacModel; see
README.md in this folder and zoo/zonos/reference.py, which imports the reference. All requests are greedy.

It runs in the reference environment that environments.sh builds:
    PYTHONPATH=. .venv-parity-zonos/bin/python tests/parity/oracle_zonos.py
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from zonos import sampling

from zoo.zonos import demo
from zoo.zonos.reference import CODEC, LANGUAGES, Model, conditioning, load_speaker, tokens

HERE = Path(__file__).parent
FIXTURES = HERE / "zonos"
MANIFESTS = HERE.parent / "manifests"
SEED = 0
PACKAGES = (
    "transformers",
    "torch",
    "torchaudio",
    "numpy",
    "phonemizer",
    "espeakng-loader",
    "inflect",
    "sudachidict-core",
    "kanjize",
)
VERSIONS = {name: importlib.metadata.version(name) for name in PACKAGES}
STORY = "The quick brown fox jumps over the lazy dog."
STRIDE = 11  # of the stored samples
CLIP_SAMPLES, CLIP_HZ = 11_025, 16_000
# Requests in the fields of zoo.request.Request. `clip`: whether the one clip is given, with this transcript.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"text": STORY, "max_frames": 40},
    "one_frame": {"text": "a", "max_frames": 1},
    "voice": {"text": STORY, "max_frames": 24, "clip": None},
    "continued": {"text": "It hums.", "max_frames": 24, "clip": "Hm, hm."},
    "silence": {"text": STORY, "max_frames": 24, "options": {"silence_first": True}},
    "conditions": {
        "text": "Où est la forêt?",
        "language": "fr-fr",
        "max_frames": 24,
        "options": {
            "emotion_happiness": 0.9,
            "emotion_neutral": 0.0,
            "fmax": 11025.5,
            "pitch_std": 130.0,
            "speaking_rate": 28.0,
            "cfg_scale": 3.5,
        },
    },
    "unconditional": {
        "text": "Hello there.",
        "max_frames": 24,
        "options": {"unconditional_emotion": True, "unconditional_pitch_std": True},
    },
}
ENDED = "ended"  # a case that the model ends itself; its text is one of these
ENDED_TEXTS = tuple(f"number {i}" for i in range(60))
PHONEMES = (
    ("en-us", "Hello, the voice of the world is here!"),
    ("de", "Die Stimme der Welt ist hier; sie singt."),
    ("fr-fr", "Où est la forêt? Here."),
    ("cmn", "你好"),
    ("en-gb", "He said: \"It's 7:45, isn't it?\" — (yes) *no* a/b & c~d"),
    ("es", "¡Hola! ¿Qué tal? 3 euros."),
    ("en-us", "..."),
    ("ja", "今日は2024年の12月です。東京タワーへ行きました!"),
    ("ja", "ＡＢＣ、Hello world 3.5%"),  # noqa: RUF001
    ("ja", "「彼女の声」は、1億2,345円？ ガガーリン…"),  # noqa: RUF001
)
NUMBERS = (
    "$5.20", "$1,000.50", "$0", "£3", "1,250", "1999", "2005", "2010", "1100", "3000", "3rd", "2.5", "1000001", "2000",
    "2900", "1001", "0", "007", "$1", "$1.01", "$.50", "$1.2.3", "£1,234", "1,2", "21st of May 1984", "3.14.15", "12,345,678",
    "1000", "2999", "1003", "10000000000", "$1,234,567.89", "$10.00", "$0.5", "0th", "21th", "12th", "20th", "112th", "1984th",
    "999999999999999999999999999999999999",
)  # fmt: skip
RANDOM_NUMBERS = 150  # of up to 36 digits, every third with "th"


def record() -> np.ndarray:
    """Return a buzz with a moving pitch, and noise. int16 [N]"""
    random = np.random.default_rng(SEED)
    at = np.arange(CLIP_SAMPLES) / CLIP_HZ
    phase = 2 * np.pi * 120 * (at + 0.02 * np.sin(9 * at))
    buzz = sum(np.sin(k * phase) / k for k in range(1, 12))
    return (
        (4000 * buzz + 500 * random.standard_normal(CLIP_SAMPLES)).round().clip(-32768, 32767).astype("<i2")
    )


def asked_of(case: dict[str, Any], place: Path) -> dict[str, Any]:
    """Return a case as serving/tools/reference.py orders it."""
    references = []
    if "clip" in case:
        path = place / "clip.npz"
        np.savez(path, samples=record().astype(np.float32) / 32768, rate_hz=CLIP_HZ)
        references = [{"clip": str(path), "transcript": case["clip"]}]
    fields = {name: case[name] for name in ("text", "max_frames") if name in case}
    language = case.get("language", "en-us")
    return fields | {"references": references, "options": case.get("options", {}), "language": language}


@torch.inference_mode()
def generate(model: Model, case: dict[str, Any], place: Path) -> tuple[dict[str, torch.Tensor], int, bool]:
    """Return the tensors of a case, its number of frames, and whether the model ended it."""
    request = asked_of(case, place)
    prompt = model.prompt(request)
    model.seen.clear()
    codes, has_ended = model.generate(
        prompt, case["max_frames"], float(request["options"].get("cfg_scale", 2.0))
    )
    tensors = {
        "prefix": prompt.prefix.clone(),
        "codes": codes.to(torch.int16).contiguous(),
        "logits": torch.stack(model.seen[:3]),
        "samples": model.decode(codes, prompt.codes)[::STRIDE].clone(),
    }
    if prompt.codes is not None:
        tensors["reference"] = prompt.codes.to(torch.int16).contiguous()
    return tensors, len(codes), has_ended


@torch.inference_mode()
def codec(model: Model) -> dict[str, torch.Tensor]:
    """Return random codes and their samples, and a clip at 44.1 kHz and its codes."""
    random = torch.Generator().manual_seed(3)
    clip = record()
    tensors = {"clip": torch.from_numpy(clip)}
    for frames in (1, 2, 30):
        codes = torch.randint(1024, (frames, 9), generator=random)
        tensors[f"decode_{frames}.codes"] = codes.to(torch.int16)
        tensors[f"decode_{frames}.samples"] = model.decode(codes, None)[
            :: 1 if frames < 3 else STRIDE
        ].clone()
    for num in (1, 512, 513, 5000):
        samples = torch.from_numpy(clip[:num].astype(np.float32) / 32768)
        tensors[f"encode_{num}.codes"] = model.encode(samples).to(torch.int16).contiguous()
    return tensors


@torch.inference_mode()
def speakers(directory: Path) -> dict[str, torch.Tensor]:
    """Return the voices of the clip, taken to have each of some rates, in one and in two channels."""
    encoder, samples = load_speaker(directory), torch.from_numpy(record().astype(np.float32) / 32768)
    found = {str(hz): encoder(samples[None], hz)[0].clone() for hz in (16_000, 22_050, 44_100, 48_000)}
    two = torch.stack((samples, samples.flip(0)))
    return found | {"two": encoder(two, CLIP_HZ)[0].clone()}


@torch.inference_mode()
def likely() -> dict[str, torch.Tensor]:
    """Return probabilities after penalty, temperature, top-p, top-k and min-p, by the reference's own
    functions."""
    random = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(2, 9, 1026, generator=random)
    logits[..., 1025] = -torch.inf
    recent = torch.randint(0, 1026, (2, 9, 2), generator=random)
    recent[0, :, 1] = recent[0, :, 0]  # seen twice
    recent[1, :3] = 1025
    recent[1, 3:5, 0] = logits[1, 3:5].argmax(-1)
    penalised = sampling.modify_logit_for_repetition_penalty(logits, recent, 3.0, 2)
    tensors = {
        "logits": logits[..., :1025].clone(),
        "recent": recent,
        "penalised": penalised[..., :1025].clone(),
    }
    for i, (temperature, top_p, top_k, min_p, *unified) in enumerate(SETTINGS):
        probs = torch.softmax(penalised / temperature, -1)
        probs = sampling.apply_unified(probs, *unified) if unified else probs
        probs = sampling.apply_top_p(probs, top_p) if top_p else probs
        probs = sampling.apply_top_k(probs, top_k) if top_k else probs
        probs = sampling.apply_min_p(probs, min_p) if min_p else probs
        tensors[f"probabilities_{i}"] = probs[0, :2, :1025].clone()
    return tensors


# temperature, top-p, top-k, min-p, and what the unified sampler takes: linear, conf, quad
SETTINGS = (
    (1.0, 0.0, 0, 0.1),
    (0.7, 0.9, 50, 0.02),
    (1.3, 0.0, 5, 0.0),
    (1.0, 0.5, 0, 0.3),
    (0.9, 0.8, 20, 0.0),
    (1.0, 0.0, 0, 0.0, 0.5, 0.4, 0.0),
    (0.8, 0.7, 30, 0.05, 0.3, -0.1, 0.2),
)


@torch.inference_mode()
def rounded(directory: Path) -> dict[str, torch.Tensor]:
    """Return the prefix of one request in bfloat16: Fourier features, norm and all."""
    model = Model(directory, torch.bfloat16)
    prompt = model.prompt({"text": STORY, "references": [], "options": {}, "language": "en-us"})
    return {"prefix": prompt.prefix.clone()}


def write_manifests(place: Path) -> None:
    """Write the name, dtype and shape of every published tensor, as the reference's classes build them."""
    demo.write_texts(place, "full")
    shapes = Model.published(place)
    rows = [f"{name}|BF16|{'x'.join(map(str, shape))}" for name, shape in shapes.items()]
    (MANIFESTS / "zonos.txt").write_text("\n".join(sorted(rows)) + "\n")
    with torch.device("meta"):
        tensors = CODEC.from_config(place / "dac_44khz").state_dict()
    rows = [f"{name}|F32|{'x'.join(map(str, value.shape))}" for name, value in tensors.items()]
    (MANIFESTS / "zonos_dac.txt").write_text("\n".join(sorted(rows)) + "\n")
    with torch.device("meta"):
        tensors = load_speaker(None).model.state_dict()
    rows = [
        f"{name}|{str(value.dtype)[6:]}|{'x'.join(map(str, value.shape))}" for name, value in tensors.items()
    ]
    (MANIFESTS / "zonos_speaker.txt").write_text("\n".join(sorted(rows)) + "\n")


def numbers() -> dict[str, str]:
    """Return numbers and how the reference spells them."""
    random = np.random.default_rng(SEED)
    digits = (
        "".join(map(str, random.integers(0, 10, 1 + i % 36) * (random.random() < 0.7)))
        for i in range(RANDOM_NUMBERS)
    )
    drawn = [number + ("th" if i % 3 == 0 else "") for i, number in enumerate(digits)]
    return {text: conditioning.normalize_numbers(text) for text in (*NUMBERS, *drawn)}


def texts() -> dict[str, Any]:
    """Return phonemes and ids of texts, and how numbers are spelled, by espeak-ng of VERSIONS."""
    read = [
        {
            "language": language,
            "text": text,
            "phonemes": tokens.phonemes(text, language),
            "ids": tokens.ids(text, language),
        }
        for language, text in PHONEMES
    ]
    return {
        "phonemes": read,
        "numbers": numbers(),
        "languages": LANGUAGES,
    }


def write_json(name: str, content: Any) -> None:
    (FIXTURES / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def save(
    name: str, case: dict[str, Any], tensors: dict[str, torch.Tensor], frames: int, has_ended: bool
) -> None:
    save_file(tensors, FIXTURES / f"generate_{name}.safetensors")
    facts = {"request": case, "frames": frames, "stop": "end" if has_ended else "cap"}
    write_json(f"generate_{name}", facts)
    print(name, frames, "frames,", facts["stop"])


def main() -> None:
    FIXTURES.mkdir(exist_ok=True)
    write_json("texts", texts())
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        write_manifests(place / "full")
        directory = demo.write(place / "demo", "tiny", SEED, torch.float32)
        model = Model(directory, torch.float32)
        for name, case in CASES.items():
            save(name, case, *generate(model, case, place))
        for text in ENDED_TEXTS:
            case = {"text": text, "max_frames": 80}
            tensors, frames, has_ended = generate(model, case, place)
            if has_ended and frames >= 12:
                save(ENDED, case, tensors, frames, has_ended)
                break
        save_file(codec(model), FIXTURES / "codec.safetensors")
        save_file(speakers(directory), FIXTURES / "speaker.safetensors")
        save_file(likely(), FIXTURES / "likely.safetensors")
        save_file(rounded(directory), FIXTURES / "bfloat16.safetensors")
        files = ("model.safetensors", "dac_44khz/model.safetensors")
        digests = {file: hashlib.sha256((directory / file).read_bytes()).hexdigest() for file in files}
    write_json("checkpoint", {"versions": VERSIONS, "size": "tiny", "seed": SEED, "sha256": digests})


if __name__ == "__main__":
    main()
