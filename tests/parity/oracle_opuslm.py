"""Make the OpusLM fixtures and manifests with ESPnet's SpeechLM at 5f0a39a, codec and XEUS of espnet 202611; see
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

import joblib
import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.cluster import MiniBatchKMeans

from zoo.opuslm import demo, demo_xeus
from zoo.opuslm.listener import WEIGHTS
from zoo.opuslm.reference import STREAMS, Model, Xeus, build_codec, build_lm

HERE = Path(__file__).parent
FIXTURES = HERE / "opuslm"
MANIFESTS = HERE.parent / "manifests"
SEED = 0
VERSIONS = {name: importlib.metadata.version(name) for name in ("transformers", "torch", "tokenizers")}
SIZES, DIALOGUE = ("tiny", "tiny_smollm"), "tiny_dialogue"
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


def clip() -> torch.Tensor:
    """Return a clip [N] at 16 kHz with some frames of different kinds."""
    at = torch.arange(11_111) / 16_000
    noise = torch.randn(len(at), generator=torch.Generator().manual_seed(5))
    return torch.where(at % 0.2 < 0.1, 0.3 * noise, 0.4 * torch.sin(900 * at.square() + 700 * at))


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


def kept(model: Model, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of a prompt as the model reads them, delayed [T, 9]."""
    return model.lm.delay_interleave(rows)[0][0].to(torch.int16).contiguous()


@torch.inference_mode()
def other_modes(model: Model, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a request for a transcript, a text or a continuation."""
    codes = model.heard(clip())[: case.get("frames")]
    if case["output"] == "continuation":
        rows = model.prompt_to_continue(codes)
        found = model.codes(model.go_on(rows, case["max_frames"]))
        return {
            "rows": kept(model, rows),
            "codes": found.to(torch.int16).contiguous(),
            "samples": model.decode(found)[::STRIDE].clone(),
        }
    is_clip = case["output"] == "transcript"
    rows = model.prompt_of_clip(codes) if is_clip else model.prompt_of_text(case["text"])
    return {"rows": kept(model, rows), "words": model.words(rows, case["max_tokens"]).to(torch.int16)}


def dialogue_cases() -> dict[str, dict[str, Any]]:
    """Return requests to OpusLM-Dialogue. Each turn: role, text, and whether it has the clip."""
    user = ["user", STORY, False]
    return {
        "written": {"turns": [user], "max_tokens": 20, "max_frames": 12},
        "short": {"turns": [["user", "Go.", False]], "max_tokens": 1, "max_frames": 1},
        "spoken": {"turns": [["user", None, True]], "voice": "anna", "max_tokens": 9, "max_frames": 9},
        "later": {
            "turns": [
                ["system", "Be brief.", False],
                ["user", None, True],
                ["assistant", "It hums. 你好", True],
                ["user", "Why?", True],
                ["assistant", "So.", False],
                ["user", "Où?", False],
            ],
            "max_tokens": 15,
            "max_frames": 10,
        },
        "text": {"turns": [user, ["assistant", "No.", False], user], "output": "text", "max_tokens": 30},
    }


@torch.inference_mode()
def answers(model: Model, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a request to OpusLM-Dialogue."""
    codes, segments = model.heard(clip()), []
    for role, text, has_clip in case["turns"]:
        spoken = [(role, "codec_ssl", codes)] * has_clip
        written = [(role, "text_bpe", text)] * bool(text)
        segments += written + spoken if role == "assistant" else spoken + written
    is_text = case.get("output") == "text"
    rows = model.prompt_of_dialogue(segments, model.voice(case.get("voice")), is_text)
    made = {"rows": kept(model, rows)}
    if is_text:
        return made | {"words": model.words(rows, case["max_tokens"]).to(torch.int16)}
    words, ids = model.reply(rows, case["max_tokens"], case["max_frames"])
    found = model.codes(ids)
    return made | {
        "words": words.to(torch.int16),
        "codes": found.to(torch.int16).contiguous(),
        "samples": model.decode(found)[::STRIDE].clone(),
    }


def ended(model: Model, is_text: bool) -> tuple[list[Any], int]:
    """Return the turns of a dialogue whose text ends by itself, and after how many tokens. is_text: nothing is spoken."""
    for i in range(400):
        text = f"number {i}"
        words = model.words(model.prompt_of_dialogue([("user", "text_bpe", text)], None, is_text), 30)
        if 3 <= len(words) < 25:
            return [["user", text, False]], len(words)
    raise AssertionError("no text ends")


def ended_replies(model: Model) -> dict[str, dict[str, Any]]:
    """Return requests to OpusLM-Dialogue whose text ends by itself: before the limit, at it, and behind it."""
    turns, num = ended(model, False)
    limits = {"ended": 30, "ended_at_limit": num, "ended_behind": num - 1}
    found = {name: {"turns": turns, "max_tokens": most, "max_frames": 8} for name, most in limits.items()}
    turns, _ = ended(model, True)
    return found | {"ended_text": {"turns": turns, "output": "text", "max_tokens": 30}}


@torch.inference_mode()
def hearing(model: Model) -> dict[str, torch.Tensor]:
    """Return what the encoders make of clips: some values of the networks' outputs, and the codes."""
    whole, found = clip(), {}
    for samples in (400, 3200, 3201, 3520, len(whole)):
        part = whole[:samples]
        found |= {
            f"{samples}.xeus": model.xeus(part)[:, :6].contiguous(),
            f"{samples}.encoder": model.encoder(part[None, None])[0, :4].T.contiguous(),
            f"{samples}.codes": model.heard(part).to(torch.int16),
        }
    sets = found[f"{len(whole)}.codes"].T
    assert all(len(set(stream.tolist())) > 3 for stream in sets), "the clip has too few different codes"
    return found | {"clip": whole}


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
    for file in ("model.pth", f"codec/{demo.MODEL_FILE}", f"xeus/{WEIGHTS[1]}"):
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
        for part, module in zip(("decoder", "quantizer", "encoder"), build_codec(conf), strict=True):
            found |= {f"codec.generator.{part}.{key}": value for key, value in module.state_dict().items()}
        xeus = Xeus(demo_xeus.PUBLISHED).state_dict()
    write_manifest("opuslm_codec", found, "F32")
    write_manifest("opuslm_xeus", xeus, "F32")


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
    found["clone"] = {"text": STORY, "max_frames": 10, "voice": "clip"}
    return found


def voice_of(model: Model, name: str | None) -> torch.Tensor | None:
    if name == "clip":
        return model.heard(clip())
    return long_voice(model) if name == "long" else model.voice(name)


def mode_cases() -> dict[str, dict[str, Any]]:
    return {
        "transcript": {"output": "transcript", "max_tokens": 30},
        "text": {"output": "text", "text": STORY, "max_tokens": 30},
        "continuation": {"output": "continuation", "max_frames": 16},
        "few_frames": {"output": "continuation", "frames": 3, "max_frames": 16},
        "from_nothing": {"output": "continuation", "frames": 0, "max_frames": 16},
    }


def write_dialogues() -> dict[str, dict[str, Any]]:
    """Write the fixtures of OpusLM-Dialogue and return its requests."""
    with tempfile.TemporaryDirectory() as temporary:
        model = Model(demo.write(Path(temporary) / "demo", DIALOGUE, SEED, torch.float32))
        asked = dialogue_cases() | ended_replies(model)
        tensors = {}
        for name, case in asked.items():
            tensors |= {f"{name}.{key}": value for key, value in answers(model, case).items()}
        save_file(tensors, FIXTURES / f"{DIALOGUE}.safetensors")
    return asked


def write_clustering() -> None:
    """Write a clustering as scikit-learn and joblib do."""
    points = np.random.default_rng(0).standard_normal((60, 4)).astype(np.float32)
    found = MiniBatchKMeans(5, random_state=0, n_init=1).fit(points)
    joblib.dump(found, FIXTURES / "clusters.mdl")
    save_file({"centers": torch.from_numpy(found.cluster_centers_)}, FIXTURES / "clusters.safetensors")


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
                voice = voice_of(model, case.get("voice"))
                made = generate(model, case["text"], voice, case["max_frames"])
                tensors |= {f"{name}.{key}": value for key, value in made.items()}
                print(size, name, len(made["codes"]), "frames")
            for name, case in mode_cases().items():
                tensors |= {f"{name}.{key}": value for key, value in other_modes(model, case).items()}
            asked[size] |= mode_cases()
            save_file(tensors, FIXTURES / f"{size}.safetensors")
            if size == "tiny":
                save_file(codec(model), FIXTURES / "codec.safetensors")
                save_file(hearing(model), FIXTURES / "hearing.safetensors")
    asked[DIALOGUE] = write_dialogues()
    write_clustering()
    write_json("checkpoint", {"versions": VERSIONS, "seed": SEED, "sha256": digests, "cases": asked})


if __name__ == "__main__":
    main()
