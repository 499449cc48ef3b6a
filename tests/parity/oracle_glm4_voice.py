"""Make the GLM-4-Voice fixtures; see README.md in this folder.

The reference is zoo/glm4_voice/reference.py, which says what of it is a package. All requests are greedy.

It runs in the reference environment that environments.sh builds:
    PYTHONPATH=. .venv-parity-glm4_voice/bin/python tests/parity/oracle_glm4_voice.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchaudio
from safetensors.torch import save_file
from torch import Tensor

from zoo.glm4_voice import demo
from zoo.glm4_voice.reference import SEED, Model, samples_of

HERE = Path(__file__).parent
FIXTURES = HERE / "glm4_voice"
STRIDE = 7  # of the stored samples
CLIPS = {"short": (16_000, 40_961), "other_rate": (24_000, 30_000), "pieces": (16_000, 30 * 16_000 + 2_560)}
TEXT = "Tell me about the river, 12345 times."
MAX_TOKENS = 130


# --- fixtures ---


def clip(name: str) -> Tensor:
    """Return the samples [N] of a clip, which follow from its length."""
    rate_hz, num = CLIPS[name]
    t = torch.arange(num, dtype=torch.float64) / rate_hz
    hum = (2 * np.pi * (180 + 40 * torch.sin(3 * t)) * t).sin() * (0.3 + 0.2 * torch.sin(7 * t))
    return (hum * 32767).round().div(32768).float()


@torch.inference_mode()
def main() -> None:
    FIXTURES.mkdir(exist_ok=True)
    directory = demo.write(Path(tempfile.mkdtemp()) / "parity", "parity", SEED, torch.float32)
    model = Model(directory)
    config, vocabulary = model.config, model.vocabulary
    flow, vocoder, listener = model.flow, model.vocoder, model.listener
    heard = {}
    for name, (rate_hz, _) in CLIPS.items():
        samples = clip(name)
        if rate_hz != 16_000:
            samples = torchaudio.transforms.Resample(rate_hz, 16_000)(samples)
        heard[name] = listener(samples).tolist()
    first, special = vocabulary.first_code, vocabulary.special
    prompts = {"written": (demo.WRITTEN, vocabulary(TEXT))}
    spoken = [
        special["<|begin_of_audio|>"],
        *(first + code for code in heard["short"]),
        special["<|end_of_audio|>"],
    ]
    prompts["spoken"] = (demo.SPOKEN, spoken)
    facts: dict[str, Any] = {"seed": SEED, "text": TEXT, "heard": heard, "answers": {}}
    tensors: dict[str, Tensor] = {}
    for name, (line, turn) in prompts.items():
        ids = [special["[gMASK]"], special["<sop>"], special["<|system|>"], *vocabulary(f"\n{line}")]
        ids += [special["<|user|>"], *vocabulary("\n"), *turn]
        ids += [special["<|assistant|>"], *vocabulary("streaming_transcription\n")]
        said = model.answer(ids, MAX_TOKENS)
        facts["answers"][name] = {"ids": ids, "said": said}
        codes = torch.tensor([token - first for token in said if token >= first])
        tensors[f"{name}_samples"] = samples_of(vocoder, flow.cells(codes), SEED)[::STRIDE]
    codes = torch.arange(24) * 7 % config.flow.codes
    tensors["mel"] = flow(codes, torch.zeros(0, 80))
    tensors["continued"] = flow(codes, tensors["mel"][:61].flip(1))
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, FIXTURES / "samples.safetensors")
    (FIXTURES / "answers.json").write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
