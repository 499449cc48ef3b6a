"""Make the OpusLM fixtures and manifests with ESPnet's SpeechLM at 5f0a39a and the codec of espnet 202611; see
README.md in this folder and zoo/opuslm/reference.py, which imports the reference. All requests are greedy.

It runs in the reference environment that environments.sh builds:
    PYTHONPATH=. .venv-parity-opuslm/bin/python tests/parity/oracle_opuslm.py
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from zoo.opuslm import demo
from zoo.opuslm.reference import STREAMS, Model, build_codec, build_lm

HERE = Path(__file__).parent
FIXTURES = HERE / "opuslm"
MANIFESTS = HERE.parent / "manifests"
SEED = 0
VERSIONS = {name: importlib.metadata.version(name) for name in ("transformers", "torch", "tokenizers")}
SIZES = ("tiny", "tiny_smollm")
STORY = "The quick brown fox jumps over the lazy dog."
STRIDE = 11  # of the stored samples
STEPS = 3  # whose logits are stored
LONG = 20  # frames of a voice that is longer than a voice prompt
ENDED_TEXTS = tuple(f"number {i}" for i in range(60))


def long_voice(model: Model) -> torch.Tensor:
    """Return random codes [LONG, 9]."""
    sizes = model.sizes()
    random = torch.Generator().manual_seed(SEED)
    return torch.stack([torch.randint(int(size), (LONG,), generator=random) for size in sizes], 1)


def allowed(model: Model, logits: torch.Tensor) -> torch.Tensor:
    """Return the logits [S, 9, V] of the ids that each stream may draw but the end, in the order of their ids,
    padded with zeros."""
    free = ~model.mask
    width = int(free.sum(1).max())
    rows = torch.zeros(len(logits), STREAMS, width)
    for s in range(STREAMS):
        found = logits[:, s, free[s]]
        rows[:, s, : found.shape[1]] = found
    return rows


@torch.inference_mode()
def generate(model: Model, text: str, voice: torch.Tensor | None, frames: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a greedy request."""
    seen: list[torch.Tensor] = []
    hook = model.lm.lm_head.register_forward_hook(lambda _m, _i, output: seen.append(output[0, 0].clone()))
    rows = model.prompt(text, voice)
    [ids] = model.generate(rows, frames)
    hook.remove()
    codes = model.codes(ids)
    return {
        "rows": model.lm.delay_interleave(rows)[0][0].to(torch.int16).contiguous(),
        "codes": codes.to(torch.int16).contiguous(),
        "logits": allowed(model, torch.stack(seen[:STEPS])),
        "samples": model.decode(codes)[::STRIDE].clone(),
    }


@torch.inference_mode()
def probabilities(model: Model) -> torch.Tensor:
    """Return the likeliest probabilities [9, 30] of the first step's draws, in descending order, at ESPnet's
    own settings."""
    seen: list[torch.Tensor] = []
    real = torch.multinomial

    def keep(probs: torch.Tensor, **settings: Any) -> torch.Tensor:
        seen.append(probs.clone())
        return real(probs, **settings)

    with mock.patch.object(torch, "multinomial", keep):
        model.generate(model.prompt(STORY, None), 1, topk=30, sampling_temperature=0.8)
    return seen[0]


@torch.inference_mode()
def codec(model: Model) -> dict[str, torch.Tensor]:
    """Return random codes and their samples, from one frame on."""
    random = torch.Generator().manual_seed(3)
    tensors = {}
    for frames in (1, 2, 3, 4, 11, 60):
        codes = torch.stack(
            [torch.randint(int(size), (frames,), generator=random) for size in model.sizes()], 1
        )
        tensors[f"{frames}.codes"] = codes.to(torch.int16)
        tensors[f"{frames}.samples"] = model.decode(codes)[:: 1 if frames < 5 else STRIDE].clone()
    return tensors


def digest(directory: Path) -> str:
    """Return a hash of the values of all tensors of a checkpoint."""
    found = hashlib.sha256()
    for file in ("model.pth", f"codec/{demo.MODEL_FILE}"):
        for name, value in sorted(torch.load(directory / file, weights_only=True).items()):
            found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def write_manifest(name: str, tensors: dict[str, torch.Tensor], dtype: str) -> None:
    rows = [f"{key}|{dtype}|{'x'.join(map(str, value.shape))}" for key, value in tensors.items()]
    (MANIFESTS / f"{name}.txt").write_text("\n".join(sorted(rows)) + "\n")


def write_manifests() -> None:
    """Write the name, dtype and shape of every tensor, as the reference's classes build them."""
    with torch.device("meta"):
        for size, name in (("full", "opuslm"), ("full_smollm", "opuslm_smollm")):
            lm = build_lm(demo.CONFIGS[size]()[0], None).state_dict()
            write_manifest(name, {f"corelm.{key}": value for key, value in lm.items()}, "BF16")
        found = {}
        conf = demo.PUBLISHED_CODEC["codec_conf"]["generator_params"]
        for part, module in zip(("decoder", "quantizer"), build_codec(conf), strict=True):
            found |= {f"codec.generator.{part}.{key}": value for key, value in module.state_dict().items()}
    write_manifest("opuslm_codec", found, "F32")


def write_json(name: str, content: Any) -> None:
    (FIXTURES / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def cases(model: Model) -> dict[str, dict[str, Any]]:
    """Return the requests of a model. `voice`: the name of a voice, or "long"."""
    found: dict[str, dict[str, Any]] = {
        "plain": {"text": STORY, "max_frames": 30},
        "one_frame": {"text": "a", "max_frames": 1},
        "voice": {"text": "It's 7:45, isn't it?", "max_frames": 24, "voice": "anna"},
        "long_voice": {"text": "Où est la forêt? 你好", "max_frames": 24, "voice": "long"},
    }
    for text in ENDED_TEXTS:
        ended = len(generate(model, text, None, 60)["codes"])
        if 8 <= ended < 40:
            break
    else:
        raise AssertionError("no text ends")
    # the end far before the limit, at it, one step behind it, and two
    for name, more in (("ended", 20), ("ended_at_limit", 0), ("ended_behind", -1), ("ended_late", -2)):
        found[name] = {"text": text, "max_frames": ended + more, "ended": ended}
    return found


def main() -> None:
    FIXTURES.mkdir(exist_ok=True)
    write_manifests()
    digests, asked = {}, {}
    for size in SIZES:
        with tempfile.TemporaryDirectory() as temporary:
            directory = demo.write(Path(temporary) / "demo", size, SEED, torch.float32)
            model = Model(directory)
            digests[size], asked[size] = digest(directory), cases(model)
            tensors = {"long": long_voice(model).to(torch.int16), "probabilities": probabilities(model)}
            for name, case in asked[size].items():
                voice = long_voice(model) if case.get("voice") == "long" else model.voice(case.get("voice"))
                made = generate(model, case["text"], voice, case["max_frames"])
                tensors |= {f"{name}.{key}": value for key, value in made.items()}
                print(size, name, len(made["codes"]), "frames")
            save_file(tensors, FIXTURES / f"{size}.safetensors")
            if size == "tiny":
                save_file(codec(model), FIXTURES / "codec.safetensors")
    write_json("checkpoint", {"versions": VERSIONS, "seed": SEED, "sha256": digests, "cases": asked})


if __name__ == "__main__":
    main()
