"""Make the CSM fixtures and manifests with transformers' CsmForConditionalGeneration; see README.md in this
folder, and zoo/csm/reference.py, whose loop this is. All requests are greedy.

It runs in the reference environment that environments.sh builds:
    PYTHONPATH=. .venv-parity-csm/bin/python tests/parity/oracle_csm.py
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import CsmConfig, CsmForConditionalGeneration

from zoo.csm import demo
from zoo.csm.reference import Model, spoken

HERE = Path(__file__).parent
FIXTURES = HERE / "csm"
MANIFESTS = HERE.parent / "manifests"
SEED = 0
PACKAGES = ("transformers", "tokenizers", "torch", "numpy")
VERSIONS = {name: importlib.metadata.version(name) for name in PACKAGES}
STORY = "The quick brown fox jumps over the lazy dog."
STRIDE = 7  # of the stored samples
CLIP_SAMPLES = 19_200  # ten frames
# Requests in the fields of zoo.request.Request. `references`: samples of the one clip, transcript, speaker.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"text": STORY, "max_frames": 16},
    "speaker": {"text": STORY, "max_frames": 6, "speaker": 12},
    "space": {"text": " It's 7:45, 12345 of them!\n\n", "max_frames": 8, "speaker": 1},
    "structure": {"text": "<|AUDIO|><|end_of_text|><|audio_eos|> a", "max_frames": 4},
    "clone": {"text": STORY, "max_frames": 10, "references": [(CLIP_SAMPLES, "It hums and hums.", None)]},
    "conversation": {
        "text": "今天天气很好。",
        "max_frames": 8,
        "speaker": 1,
        "references": [(3840, "One.", "1"), (5000, " Two, two. ", "0"), (2401, "Three.", "1")],
    },
}
ENDED = "ended"  # a case that the model ends itself; its text is one of these
ENDED_TEXTS = tuple(f"number {i}" for i in range(40))
# Names in memory -> names in files.
RENAMED = (
    (r"codec_model\.encoder\.encoder_seanet\.", "codec_model.encoder."),
    (r"codec_model\.decoder\.decoder_seanet\.", "codec_model.decoder."),
    (r"codec_model\.encoder\.encoder\.", "codec_model.encoder."),
    (r"codec_model\.decoder\.decoder\.", "codec_model.decoder."),
    (r"codec_model\.(?:en|de)coder\.((?:en|de)coder_transformer|downsample|upsample)\.", r"codec_model.\1."),
)


def record() -> torch.Tensor:
    """Return a buzz with a moving pitch, and noise. int16 [N]"""
    random = torch.Generator().manual_seed(SEED)
    at = torch.arange(CLIP_SAMPLES, dtype=torch.float64) / 24000
    phase = 2 * torch.pi * 120 * (at + 0.02 * torch.sin(9 * at))
    buzz = sum(torch.sin(k * phase) / k for k in range(1, 12))
    noise = torch.randn(CLIP_SAMPLES, generator=random, dtype=torch.float64)
    return (4000 * buzz + 500 * noise).round().clamp(-32768, 32767).to(torch.int16)


@torch.inference_mode()
def generate(model: Model, case: dict[str, Any], place: Path) -> tuple[dict[str, torch.Tensor], int, bool]:
    """Return the tensors of a case, its number of frames, and whether the model ended it."""
    references = []
    for i, (num, transcript, speaker) in enumerate(case.get("references", ())):
        path = place / f"{i}.npz"
        np.savez(path, samples=record()[:num].float().numpy() / 32768, rate_hz=24000)
        references.append({"clip": str(path), "transcript": transcript, "speaker": speaker})
    asked = {"text": case["text"], "references": references, "options": {"speaker": case.get("speaker", 0)}}
    inputs = model.inputs(asked)
    greedy = {"do_sample": False, "depth_decoder_do_sample": False, "max_new_tokens": case["max_frames"]}
    out = model.csm.generate(**inputs, **greedy, return_dict_in_generate=True, output_logits=True)
    codes = spoken(out.sequences[0])
    tensors = {
        "ids": inputs["input_ids"][0].clone(),
        "codes": codes.to(torch.int16),
        "logits": torch.cat(out.logits)[: len(codes)].clone(),
        "samples": model.decode(codes)[::STRIDE].clone(),
    }
    return tensors, len(codes), len(codes) < len(out.sequences[0])


@torch.inference_mode()
def codec(model: Model) -> dict[str, torch.Tensor]:
    """Return random codes and their samples, and a clip and its codes."""
    random = torch.Generator().manual_seed(3)
    tensors = {"clip": record()}
    for frames in (1, 2, 30):
        codes = torch.randint(model.last_code + 1, (frames, 4), generator=random)
        tensors[f"decode_{frames}.codes"] = codes.to(torch.int16)
        tensors[f"decode_{frames}.samples"] = model.decode(codes)[:: 1 if frames < 3 else STRIDE].clone()
    for num in (1, 1920, 1921, 5000, CLIP_SAMPLES):
        samples = tensors["clip"][:num].float() / 32768
        samples = torch.nn.functional.pad(samples, (0, -num % model.frame_samples))
        codes = model.csm.codec_model.encode(samples[None, None]).audio_codes[0].T
        tensors[f"encode_{num}.codes"] = codes.to(torch.int16).contiguous()
    return tensors


def write_manifests(directory: Path) -> None:
    """Write the name, dtype and shape of every published tensor: transformers' layout as its classes build
    it, with the second copy of the codes' embeddings, and the original layout."""
    demo.write_texts(directory, "full")
    config = CsmConfig.from_pretrained(directory)
    with torch.device("meta"):
        tensors = CsmForConditionalGeneration(config).state_dict()
    rows = [f"{published(name)}|F32|{'x'.join(map(str, value.shape))}" for name, value in tensors.items()]
    (MANIFESTS / "csm.txt").write_text("\n".join(sorted(rows)) + "\n")


def published(name: str) -> str:
    for pattern, instead in RENAMED:
        name = re.sub(f"^{pattern}", instead, name)
    return name


def save(
    name: str, case: dict[str, Any], tensors: dict[str, torch.Tensor], frames: int, is_ended: bool
) -> None:
    save_file(tensors, FIXTURES / f"generate_{name}.safetensors")
    facts = {"request": case, "frames": frames, "stop": "end" if is_ended else "cap"}
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    (FIXTURES / f"generate_{name}.json").write_text(text + "\n")
    print(name, frames, "frames,", facts["stop"])


def main() -> None:
    FIXTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        write_manifests(place / "full")
        directory = demo.write(place / "demo", "tiny", SEED, torch.float32)
        model = Model(directory, torch.float32)
        for name, case in CASES.items():
            save(name, case, *generate(model, case, place))
        for text in ENDED_TEXTS:
            case = {"text": text, "max_frames": 40}
            tensors, frames, is_ended = generate(model, case, place)
            if is_ended and frames >= 5:
                save(ENDED, case, tensors, frames, is_ended)
                break
        save_file(codec(model), FIXTURES / "codec.safetensors")
        digests = {
            shard: hashlib.sha256((directory / shard).read_bytes()).hexdigest() for shard in demo.SHARDS
        }
    facts = {"versions": VERSIONS, "size": "tiny", "seed": SEED, "sha256": digests}
    (FIXTURES / "checkpoint.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
