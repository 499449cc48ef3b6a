"""Makes the Orpheus fixtures from the reference implementations; see README.md in this folder, and
zoo/orpheus/reference.py, whose loop and classes these are. All requests are greedy.

Runs in the reference environment that environments.sh builds:
    PYTHONPATH=. .venv-parity-orpheus/bin/python tests/parity/oracle_orpheus.py
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
from snac import SNAC
from transformers import LlamaConfig, LlamaForCausalLM

from zoo.orpheus import demo
from zoo.orpheus.reference import Model, frames_of, give_noise
from zoo.orpheus.tokens import VOCABULARY

HERE = Path(__file__).parent
FIXTURES = HERE / "orpheus"
MANIFESTS = HERE.parent / "manifests"
SEED = 0
PACKAGES = ("snac", "transformers", "tokenizers", "torch", "numpy")
VERSIONS = {name: importlib.metadata.version(name) for name in PACKAGES}
STORY = "The quick brown fox jumps over the lazy dog."
TRANSCRIPT = "It hums and hums."
CLIP_SAMPLES = 24_000
# Requests in the fields of zoo.request.Request; `reference` is a transcript of the one clip.
CASES: dict[str, dict[str, Any]] = {
    "voice": {"text": STORY, "voice": "tara", "max_frames": 12},
    "no_voice": {"text": " It's 7:45, 12345 of them!\n\n", "voice": "default", "max_frames": 8},
    "penalty": {"text": STORY, "voice": "leo", "max_frames": 10, "repetition_penalty": 1.02},
    "unpenalised": {
        "text": "今天天气很好。 <laugh>",
        "voice": "zoe",
        "max_frames": 6,
        "repetition_penalty": 1.0,
    },
    "structure": {"text": "<custom_token_10><|eot_id|> a", "voice": "mia", "max_frames": 4},
    "clone": {"text": STORY, "voice": "default", "max_frames": 8, "reference": TRANSCRIPT},
}


def record() -> torch.Tensor:
    """A buzz whose pitch moves, and noise. int16 [N]"""
    random = torch.Generator().manual_seed(SEED)
    at = torch.arange(CLIP_SAMPLES, dtype=torch.float64) / 24000
    phase = 2 * torch.pi * 120 * (at + 0.02 * torch.sin(9 * at))
    buzz = sum(torch.sin(k * phase) / k for k in range(1, 12))
    noise = torch.randn(CLIP_SAMPLES, generator=random, dtype=torch.float64)
    return (4000 * buzz + 500 * noise).round().clamp(-32768, 32767).to(torch.int16)


@torch.inference_mode()
def generate(
    model: Model, case: dict[str, Any], clip: Path
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    references = [{"clip": str(clip), "transcript": case["reference"]}] if "reference" in case else []
    prompt = model.prompt(case | {"references": references})
    penalty = case.get("repetition_penalty", 1.3)
    [tokens] = model.generate(prompt, case["max_frames"], 1, do_sample=False, repetition_penalty=penalty)
    codes = frames_of(tokens, model.words)
    logits = model.lm(torch.tensor([prompt])).logits[0, -1]
    tensors = {"prompt": torch.tensor(prompt), "tokens": torch.tensor(tokens), "codes": codes.to(torch.int16)}
    tensors["logits"] = logits[::97].clone()  # coprime to 4096: every place is seen
    tensors["samples"] = model.decode(codes, SEED)[::13].clone()
    return tensors, {"request": case, "frames": len(codes)}


@torch.inference_mode()
def codec(model: Model, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random codes to samples in one go, with noise and without; a clip to codes, with the latent."""
    random = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for frames in (1, 2, 9):
        codes = torch.randint(4096, (frames, 7), generator=random)
        tensors[f"decode_{frames}.codes"] = codes.to(torch.int16)
        tensors[f"decode_{frames}.samples"] = model.decode(codes, 5).clone()
    silent = SNAC(**config).eval()
    silent.load_state_dict(model.codec.state_dict())
    silent.double()
    give_noise(silent, 9, 0)
    for module in silent.decoder.modules():
        if hasattr(module, "linear"):
            module.forward = lambda x: x
    codes = tensors["decode_9.codes"].long()
    levels = [codes[:, :1], codes[:, [1, 4]], codes[:, [2, 3, 5, 6]]]
    tensors["silent.samples"] = silent.decode([level.reshape(1, -1) for level in levels])[0, 0].float()
    clip = record()
    tensors["clip"] = clip
    for length in (1, 2048, 2049, CLIP_SAMPLES):
        first, second, third = model.codec.encode(clip[:length].float()[None, None] / 32768)
        second, third = second[0].view(-1, 2), third[0].view(-1, 4)
        places = (first[0], second[:, 0], third[:, 0], third[:, 1], second[:, 1], third[:, 2], third[:, 3])
        tensors[f"encode_{length}.codes"] = torch.stack(places, -1).to(torch.int16)
    return tensors


def write_manifests() -> None:
    """Name, dtype and shape of every tensor of the published size, as the reference classes build them."""
    config = demo.CONFIGS["full"]
    with torch.device("meta"):
        lm = LlamaForCausalLM(LlamaConfig(**config["config.json"])).state_dict()
        snac = SNAC(**config["codec"]).state_dict()
    for name, tensors in (("orpheus", lm), ("orpheus_snac", snac)):
        rows = sorted(f"{key}|F32|{'x'.join(map(str, value.shape))}" for key, value in tensors.items())
        (MANIFESTS / f"{name}.txt").write_text("\n".join(rows) + "\n")


def main() -> None:
    FIXTURES.mkdir(exist_ok=True)
    write_manifests()
    with tempfile.TemporaryDirectory() as temporary:
        directory = demo.write(Path(temporary) / "demo", "tiny", SEED, torch.float32, vocab_size=VOCABULARY)
        model = Model(directory, torch.float32)
        clip = Path(temporary) / "clip.npz"
        np.savez(clip, samples=record().float().numpy() / 32768, rate_hz=24000)
        for name, case in CASES.items():
            tensors, facts = generate(model, case, clip)
            save_file(tensors, FIXTURES / f"generate_{name}.safetensors")
            text = json.dumps(facts, indent=1, ensure_ascii=False)
            (FIXTURES / f"generate_{name}.json").write_text(text + "\n")
            print(name, facts["frames"], "frames")
        config = json.loads((directory / "snac_24khz" / "config.json").read_text())
        save_file(codec(model, config), FIXTURES / "codec.safetensors")
        digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    facts = {"versions": VERSIONS, "size": "tiny", "seed": SEED, "sha256": digest}
    (FIXTURES / "checkpoint.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
