"""Make the Bagpiper fixtures and its manifest with ESPnet's SpeechLM of espnet 202611; see README.md in this folder and
zoo/bagpiper/reference.py, which imports the reference. All requests are greedy.

It runs in the reference environment that environments.sh builds:
    PYTHONPATH=. .venv-parity-bagpiper/bin/python tests/parity/oracle_bagpiper.py
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import XcodecConfig, XcodecModel

from zoo.bagpiper import demo
from zoo.bagpiper.config import CODEC, TOWER, Config
from zoo.bagpiper.reference import Model, Thinker, audio_limit

HERE = Path(__file__).parent
FIXTURES = HERE / "bagpiper"
MANIFESTS = HERE.parent / "manifests"
SEED = 0
VERSIONS = {name: importlib.metadata.version(name) for name in ("transformers", "torch", "tokenizers")}
SIZES = ("tiny", "tiny_mute")
STORY = 'Say hello! in a warm voice: "good morning!"'
STRIDE = 11  # of the stored samples
ENDED_TEXTS = tuple(f"number {i}" for i in range(40))


def clip(num_samples: int) -> np.ndarray:
    """Return a chirp in noise, float32."""
    at = np.arange(num_samples)
    noise = np.random.default_rng(num_samples).uniform(-0.1, 0.1, num_samples)
    return (0.4 * np.sin(at**1.3 / 40) + noise).astype(np.float32)


def generate(model: Model, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a request."""
    messages: list[tuple[str, str, Any]] = []
    if "system" in case:
        messages.append(("system", "text", case["system"]))
    if "clip" in case:
        messages.append(("user", "audio", clip(case["clip"])))
    if case["text"]:
        messages.append(("user", "text", case["text"]))
    text = {"max_step": case["max_tokens"]} if "max_tokens" in case else {}
    audio = audio_limit(case.get("max_frames", 1)) | {"cfg": case.get("guidance", 3)}
    is_text = case.get("output") == "text"
    made = model.generate(
        messages, model.settings(["text"] if is_text else ["text", "audio"], text=text, audio=audio)
    )
    found = {"rows": made.rows[:, 0].to(torch.int32), "words": made.words.to(torch.int32)}
    if is_text:
        return found
    return found | {"codes": made.codes.to(torch.int16), "samples": made.samples[::STRIDE].clone()}


def probabilities(model: Model) -> dict[str, torch.Tensor]:
    """Return the likeliest probabilities, in descending order, of the first draw of text [1, 20] and of audio [8,
    20], at ESPnet's own settings."""
    seen: list[torch.Tensor] = []

    def keep(probs: torch.Tensor, **settings: Any) -> torch.Tensor:
        seen.append(probs.clone())
        return torch.zeros(len(probs), 1, dtype=torch.int64)  # the likeliest

    settings = model.settings(
        text={"temperature": 0.6, "max_step": 1}, audio={"temperature": 0.8, "cfg": 3, "max_step": 8}
    )
    with mock.patch.object(torch, "multinomial", keep):
        model.generate([("user", "text", STORY)], settings)
    return {"probabilities.text": seen[0], "probabilities.audio": seen[1]}


def cases(model: Model) -> dict[str, dict[str, Any]]:
    """Return the requests of a model. `clip`: samples of the clip that is heard."""
    found: dict[str, dict[str, Any]] = {
        "guided": {"text": STORY, "max_frames": 30},
        "unguided": {"text": STORY, "max_frames": 30, "guidance": 1},
        "one_frame": {"text": "a", "max_frames": 1},
        "scripts": {"text": "Où est la forêt? 你好 😀", "max_frames": 12, "guidance": 1.5},
        "cut": {"text": STORY, "max_frames": 12, "max_tokens": 3},
        "system": {"text": "a", "system": "You are a helpful assistant.", "max_frames": 12},
        "answer": {"text": STORY, "output": "text"},
    }
    for text in ENDED_TEXTS:
        ended = len(generate(model, {"text": text, "max_frames": 60})["codes"])
        if 5 <= ended < 50:
            break
    else:
        raise AssertionError("no answer ends")
    for name, more in (("ended", 9), ("ended_at_limit", 0), ("ended_behind", -1)):
        found[name] = {"text": text, "max_frames": ended + more, "ended": ended}
    if model.config.tower is None:
        return found
    found |= {
        "heard": {"text": "What is heard?", "clip": 32_077, "output": "text"},
        "heard_long": {"text": "", "clip": 208_005, "output": "text"},
        "heard_short": {"text": "", "clip": 3000, "output": "text"},
        "heard_and_spoken": {"text": "Say it again.", "clip": 16_000, "max_frames": 12},
    }
    return found


@torch.inference_mode()
def codec(model: Model) -> dict[str, torch.Tensor]:
    """Return random codes and their samples, from one frame on."""
    random = torch.Generator().manual_seed(3)
    tensors, num_codes = {}, model.config.codec.num_codes
    for frames in (1, 2, 12, 60):
        codes = torch.randint(num_codes, (frames, 8), generator=random)
        samples = model.io["discrete_audio"].codec_model.decode(codes.T[None]).audio_values[0, 0]
        tensors[f"{frames}.codes"] = codes.to(torch.int16)
        tensors[f"{frames}.samples"] = samples[:: 1 if frames < 5 else STRIDE].clone()
    return tensors


@torch.inference_mode()
def ear(model: Model, num_samples: int) -> torch.Tensor:
    """Return what is heard of a clip [N, D]."""
    seen: list[torch.Tensor] = []
    hook = model.lm.adaptor["continuous_audio"].register_forward_hook(
        lambda _m, _i, out: seen.append(out.clone())
    )
    model.generate([("user", "audio", clip(num_samples))], model.settings(["text"], text={"max_step": 1}))
    hook.remove()
    return seen[0]


def digest(directory: Path) -> str:
    """Return a hash of the values of all tensors of a checkpoint."""
    found = hashlib.sha256()
    for name, value in sorted(torch.load(directory / "model.pt", weights_only=True)["module"].items()):
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def write_manifest() -> None:
    """Write the name and the shape of every tensor of the published size, as the reference's classes build them."""
    size = demo.CONFIGS["full"]
    config: Config = demo.config_of(size)
    assert config.tower is not None
    with torch.device("meta"):
        codec, tower = XcodecModel(XcodecConfig()).state_dict(), Thinker(config.tower).state_dict()
    found = {f"{CODEC}.{name}": value.shape for name, value in codec.items()}
    found |= {f"{TOWER.rpartition('.')[0]}.{name}": value.shape for name, value in tower.items()}
    rows = sorted(f"{name}|{'x'.join(map(str, shape))}" for name, shape in found.items())
    (MANIFESTS / "bagpiper_audio.txt").write_text("\n".join(rows) + "\n")


def main() -> None:
    FIXTURES.mkdir(exist_ok=True)
    write_manifest()
    digests, asked = {}, {}
    for size in SIZES:
        with tempfile.TemporaryDirectory() as temporary:
            directory = demo.write(Path(temporary) / "demo", size, SEED, torch.float32)
            model = Model(directory)
            digests[size], asked[size] = digest(directory), cases(model)
            tensors = probabilities(model)
            for name, case in asked[size].items():
                made = generate(model, case)
                tensors |= {f"{name}.{key}": value.contiguous() for key, value in made.items()}
                print(size, name, len(made["words"]), "words", len(made.get("codes", ())), "frames")
            if model.config.tower is not None:
                tensors |= {f"ear.{n}": ear(model, n) for n in (3000, 32_077)}
                save_file(codec(model), FIXTURES / "codec.safetensors")
            save_file(tensors, FIXTURES / f"{size}.safetensors")
    content = {"versions": VERSIONS, "seed": SEED, "sha256": digests, "cases": asked}
    (FIXTURES / "checkpoint.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
