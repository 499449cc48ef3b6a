"""Make the Chatterbox fixtures with chatterbox-tts 0.1.7; see README.md in this folder, and
zoo/chatterbox/reference.py, whose loop this is. All requests are greedy.

It runs in the reference environment that environments.sh builds:
    PYTHONPATH=. .venv-parity-chatterbox/bin/python tests/parity/oracle_chatterbox.py
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from zoo.chatterbox import demo
from zoo.chatterbox.config import t3_file
from zoo.chatterbox.reference import Model, NoRender, likeliest, speak_from, tts
from zoo.checkpoint import synthetic

HERE = Path(__file__).parent
FIXTURES = HERE / "chatterbox"
SEED, STRIDE, COLUMNS, HARMONICS = 0, 7, 9, 9
PACKAGES = ("chatterbox-tts", "transformers", "s3tokenizer", "torchaudio", "librosa", "pyloudnorm", "torch")
VERSIONS = {name: importlib.metadata.version(name) for name in PACKAGES}
STORY = "hello — the “fine” fox; no… really: 3 of [laughter] Them - ok"
LONG = "the water and the house " * 70
PENALTY = {"repetition_penalty": 2.0}
# name -> size, and a request: `clip` names one of the clips
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("parity", {"text": STORY, "max_frames": 24}),
    "calm": ("parity", {"text": STORY, "max_frames": 12, "exaggeration": 0.1, "cfg_weight": 0.9}),
    "unguided": ("parity", {"text": STORY, "max_frames": 12, "cfg_weight": 0.0, "exaggeration": 1.5}),
    "clone": ("parity", {"text": "Good morning.", "max_frames": 16, "clip": "short"}),
    "long": ("parity", {"text": LONG, "max_frames": 60}),
    "french": (
        "parity-multilingual",
        {"text": "Où est la Forêt ?", "max_frames": 20, "language": "fr"} | PENALTY,
    ),
    "korean": (
        "parity-multilingual",
        {"text": " 안녕 good: 你好。", "max_frames": 8, "language": "ko"} | PENALTY,
    ),
    "turbo": ("parity-turbo", {"text": STORY.replace("[laughter]", "[laugh]"), "max_frames": 24}),
    "turbo_clone": ("parity-turbo", {"text": "Good morning.", "max_frames": 16, "clip": "long"}),
}
ENDED_TEXTS = tuple(f"number {i}" for i in range(60))
TEXTS = (
    STORY,
    LONG[:60],
    "ßa",
    "a - b; c: d...  e",
    "Zoë 你",
    "the [laughter] x",
    "Hello, World.",
    "[STOP",
    "x ,",
)


def noise(name: str, *shape: int) -> Tensor:
    return torch.from_numpy(synthetic.fill(f"noise {name}", shape, "parity", [("noise", 0.0, 1.0, False)]))


def clips() -> dict[str, tuple[Tensor, int]]:
    """Return clips and their rates in Hz: chirps with noise, one in stereo, one with silence at both ends."""
    made = {}
    kinds = (
        ("short", 1.2, 24000, 1),
        ("stereo", 1.37, 44100, 2),
        ("long", 11.2, 8000, 1),
        ("quiet", 3.0, 16000, 1),
    )
    for name, seconds, rate_hz, channels in kinds:
        at = torch.arange(round(seconds * rate_hz)) / rate_hz
        chirp = (2 * torch.pi * (110 + 30 * (at % 2)) * at).sin() * 0.3 * (1 + (7 * at).sin()) / 2
        samples = torch.stack([chirp + 0.02 * noise(f"{name} {i}", len(at)) for i in range(channels)])
        if name == "quiet":
            samples = samples * (0.001 + ((at > 0.7) & (at < 2.4)).float())
        made[name] = (32768 * samples).round() / 32768, rate_hz
    return made


def asked(case: dict[str, Any], place: Path) -> dict[str, Any]:
    """Return a case as the fields of serving/tools/reference.py."""
    known = ("text", "max_frames", "language", "clip")
    references = []
    if "clip" in case:
        samples, rate_hz = clips()[case["clip"]]
        np.savez(place / "clip.npz", samples=samples.numpy(), rate_hz=rate_hz)
        references = [{"clip": str(place / "clip.npz")}]
    options = {name: value for name, value in case.items() if name not in known}
    fields = {"references": references, "options": options, "language": case.get("language")}
    return fields | {"text": case["text"], "max_frames": case["max_frames"]}


def make_case(model: Model, name: str, case: dict[str, Any], place: Path) -> dict[str, Any]:
    """Write one greedy request: the text's ids, the codes and the samples; return its facts."""
    read, logits = [], []
    inference = model.tts.t3.prepare_input_embeds
    head = model.tts.t3.speech_head

    def listen(**given: Any) -> Any:
        read.append(given["text_tokens"][0])
        return inference(**given)

    hook = head.register_forward_hook(lambda module, given, made: logits.append(made[:, -1].clone()))
    with patch.object(model.tts.t3, "prepare_input_embeds", listen):
        samples = speak_from(model, asked(case, place), noise("flow", 64, 2, 80 + 480 * HARMONICS))
    hook.remove()
    tensors = {
        "ids": read[0].int(),
        "codes": model.codes.to(torch.int16),
        "logits": torch.stack(logits[::8])[..., ::COLUMNS],
        "samples": torch.from_numpy(samples)[::STRIDE].contiguous(),
    }
    save_file({key: value.contiguous() for key, value in tensors.items()}, FIXTURES / f"{name}.safetensors")
    print(name, len(model.codes), "codes", float(samples.std()))
    return {"request": case, "drawn": len(logits)}


@torch.inference_mode()
def make_voices(model: Model, name: str, place: Path) -> None:
    """Write the voices that the reference makes of the clips."""
    made = {}
    for clip, (samples, rate_hz) in clips().items():
        if model.config.is_turbo and samples.shape[1] <= 5 * rate_hz:
            continue
        model.prepare(asked({"text": "", "max_frames": 1, "clip": clip}, place))
        t3, flow = model.tts.conds.t3, model.tts.conds.gen
        made |= {
            f"{clip}.speaker": t3.speaker_emb[0],
            f"{clip}.codes": t3.cond_prompt_speech_tokens[0],
            f"{clip}.flow_codes": flow["prompt_token"][0],
            f"{clip}.mel": flow["prompt_feat"][0, ::5],
            f"{clip}.timbre": flow["embedding"][0],
        }
        if name == "voices_parity":
            made[f"{clip}.clip"] = (32768 * samples).to(torch.int16)
    save_file({key: value.contiguous() for key, value in made.items()}, FIXTURES / f"{name}.safetensors")


def find_end(model: Model, place: Path) -> dict[str, Any]:
    """Return a request that the model ends itself."""
    for text in ENDED_TEXTS:
        case = {"text": text, "max_frames": 60}
        with patch.object(torch, "multinomial", likeliest), NoRender(model), torch.inference_mode():
            model.prepare(asked(case, place))
            model.speak(asked(case, place))
        if 4 <= len(model.codes) < 55:
            return case
    raise AssertionError("no text ends")


def main() -> None:
    FIXTURES.mkdir(exist_ok=True)
    facts: dict[str, Any] = {
        "versions": VERSIONS,
        "seed": SEED,
        "stride": STRIDE,
        "columns": COLUMNS,
        "sha256": {},
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for size in dict.fromkeys(size for size, _ in CASES.values()):
            directory = demo.write(place / size, size, SEED)
            paths = (directory / t3_file(directory), *sorted(directory.glob("s3gen*")))
            for path in paths:
                facts["sha256"][f"{size}/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
            model = Model(directory)
            for name, (of, case) in CASES.items():
                if of == size:
                    facts["cases"][name] = make_case(model, name, case, place) | {"size": size}
            if size == "parity":
                facts["cases"]["ended"] = make_case(model, "ended", find_end(model, place), place) | {
                    "size": size
                }
                ids = [model.tts.tokenizer.encode(tts.punc_norm(text)) for text in TEXTS]
                facts["tokens"] = [{"text": text, "ids": each} for text, each in zip(TEXTS, ids, strict=True)]
            if size != "parity-multilingual":
                make_voices(model, f"voices_{size}", place)
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    (FIXTURES / "facts.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
