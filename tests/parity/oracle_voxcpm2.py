"""Make the VoxCPM2 fixtures and manifests with the reference package (voxcpm 2.0.3); see README.md in this
folder.

Run it in the reference environment that environments.sh builds:
    PYTHONPATH=. .venv-parity-voxcpm2/bin/python tests/parity/oracle_voxcpm2.py
"""

# ruff: noqa: RUF001  (the Chinese texts have Chinese punctuation)

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import json
import re
import sys
import tempfile
import types
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import soundfile
import torch
import transformers  # noqa: F401  (before the stub below, because it looks up torchaudio's version)
from safetensors.torch import save_file
from torch import Tensor


def read_wav(path: str) -> tuple[Tensor, int]:
    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    return torch.from_numpy(samples.T.copy()), rate_hz


# No release of torchaudio fits this torch. The first generation uses only its `load`.
sys.modules["torchaudio"] = types.ModuleType("torchaudio")
sys.modules["torchaudio"].load = read_wav
sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)

from voxcpm.model.voxcpm import LoRAConfig as OldLoRAConfig  # noqa: E402
from voxcpm.model.voxcpm import VoxCPMConfig as OldConfig  # noqa: E402
from voxcpm.model.voxcpm import VoxCPMModel as OldModel  # noqa: E402
from voxcpm.model.voxcpm2 import LoRAConfig, VoxCPM2Model, VoxCPMConfig  # noqa: E402
from voxcpm.modules.audiovae import AudioVAE, AudioVAEV2  # noqa: E402
from voxcpm.modules.locdit.local_dit_v2 import SinusoidalPosEmb  # noqa: E402
from voxcpm.modules.minicpm4 import MiniCPM4Config  # noqa: E402
from voxcpm.modules.minicpm4.model import MiniCPMLongRoPE  # noqa: E402

from zoo.checkpoint import synthetic  # noqa: E402
from zoo.voxcpm2 import demo  # noqa: E402

HERE = Path(__file__).parent
FIXTURES = HERE / "voxcpm2"
MANIFESTS = HERE.parent / "manifests"
# Every STRIDEth sample is stored where all would be too many. It is coprime to a frame, to cover all of it.
SEED, STRIDE = 0, 31
VERSIONS = {
    name: importlib.metadata.version(name)
    for name in ("voxcpm", "transformers", "tokenizers", "torch", "numpy", "librosa")
}

STORY = "The quick brown fox jumps over the lazy dog, and then the other fox says hello to the world."
# Requests as fields of zoo.Request. The noise of case i is `noise(i)`. `clip` names one of CLIPS.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"text": STORY, "max_frames": 40},
    "plain_chinese": {"text": "你好，世界！今天天气很好。"},
    "plain_short": {"text": "a"},
    "plain_weak_few_steps": {
        "text": "Good morning!",
        "options": {"cfg_scale": 1.25, "solver_steps": 6},
        "max_frames": 20,
    },
    "plain_strong_two_steps": {
        "text": "Good morning!",
        "options": {"cfg_scale": 3.1, "solver_steps": 2},
        "max_frames": 20,
    },
    "plain_no_guidance": {"text": "Good morning!", "options": {"cfg_scale": 1.0}, "max_frames": 20},
    "design": {"text": "How are you doing today?", "instructions": "A slow and quiet old man"},
    "reference": {"text": STORY, "references": [{"clip": "padded"}], "max_frames": 30},
    "reference_described": {
        "text": "Good evening.",
        "references": [{"clip": "stereo"}],
        "instructions": "用开心的语气说",
    },
    "continuation": {
        "text": " And then it was night.",
        "references": [{"clip": "padded", "transcript": "Once there was a house."}],
        "max_frames": 40,
    },
    "continuation_short": {
        "text": "Hello to the world.",
        "references": [{"clip": "short", "transcript": "a"}],
        "max_frames": 30,
    },
    "continuation_stereo": {
        "text": "今天天气很好",
        "references": [{"clip": "stereo", "transcript": "我们大家，"}],
    },
}
# Cases of the first generation ("tiny-1.5"), whose clips need no resampling.
OLD_CASES: dict[str, dict[str, Any]] = {
    "old": {"text": STORY, "max_frames": 40},
    "old_few_steps": {"text": "今天天气很好", "options": {"cfg_scale": 1.5, "solver_steps": 5}},
    "old_continuation": {
        "text": " And then it was night.",
        "references": [{"clip": "stereo", "transcript": "Once there was."}],
        "max_frames": 30,
    },
}
# More cases of VoxCPM2: a voice and a clip to continue, in either order.
COMBINED_CASES: dict[str, dict[str, Any]] = {
    "combined": {
        "text": "And then it was night.",
        "references": [{"clip": "stereo"}, {"clip": "padded", "transcript": "Once there was a house. "}],
        "max_frames": 30,
    },
    "combined_same_clip": {
        "text": "今天天气很好",
        "references": [{"clip": "short", "transcript": "我们大家，"}, {"clip": "short"}],
    },
}
# The adapters' configs, as fine-tuning writes them into lora_config.json. The lists differ from the
# reference's defaults.
LM_TARGETS = ["q_proj", "v_proj", "k_proj", "o_proj", "up_proj"]
DIT_TARGETS = ["q_proj", "o_proj", "down_proj", "cond_proj", "linear_2"]
PROJECTIONS = ["enc_to_lm_proj", "lm_to_dit_proj", "res_to_dit_proj", "fusion_concat_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "adapted": {
        "enable_lm": True,
        "enable_dit": True,
        "enable_proj": True,
        "r": 4,
        "alpha": 6,
        "dropout": 0.1,
        "target_modules_lm": LM_TARGETS,
        "target_modules_dit": DIT_TARGETS,
        "target_proj_modules": PROJECTIONS,
    },
    "old_adapted": {
        "enable_lm": True,
        "enable_dit": False,
        "enable_proj": True,
        "r": 3,
        "alpha": 3,
        "dropout": 0.0,
        "target_modules_lm": LM_TARGETS[:4],
        "target_modules_dit": DIT_TARGETS,
        "target_proj_modules": PROJECTIONS[:3],
    },
}
ADAPTED_CASES: dict[str, dict[str, Any]] = {
    "adapted": {
        "text": " And then it was night.",
        "references": [{"clip": "padded", "transcript": "Once there was a house."}],
        "max_frames": 20,
    },
    "old_adapted": {"text": STORY, "max_frames": 20},
}
# Keep this order: the noise of a case is named after its place.
ALL_CASES = CASES | OLD_CASES | COMBINED_CASES | ADAPTED_CASES
# name -> rate, channels, samples. A patch is 160 samples at 16 kHz, and the decoder looks back five patches.
# There are shorter and longer clips.
CLIPS = {"padded": (16000, 1, 1500), "short": (16000, 1, 330), "stereo": (44100, 2, 4001)}


def noise(case: int, frames: int) -> Tensor:
    """Return the normal noise of a case [F, P, D]. The tests compute the same."""
    return torch.from_numpy(
        synthetic.fill(f"noise {case}", (frames, 4, 8), "parity", [("noise", 0.0, 1.0, False)])
    )


def checkpoint(size: str, directory: Path) -> dict[str, Any]:
    """Write a float32 checkpoint in the published layout with the reference's classes. Returns its facts."""
    demo.write_texts(directory, size)
    texts = {path.name: sha256(path.read_bytes()) for path in sorted(directory.iterdir())}
    model = empty(size)
    values = {
        key: torch.from_numpy(demo.fill(key, value.shape, SEED))
        for key, value in sorted(state(model).items())
    }
    vae = {
        key: torch.from_numpy(demo.fill(key, value.shape, SEED))
        for key, value in vae_state(model).items()
        if value.is_floating_point()
    }
    vae |= {key: value for key, value in vae_state(model).items() if key == demo.BOUNDARIES}
    save_file(values, directory / "model.safetensors", metadata={"format": "pt"})
    torch.save({"state_dict": vae}, directory / "audiovae.pth")
    tensors = {
        name: {
            "rows": rows(held),
            "sha256": sha256(b"".join(held[key].numpy().tobytes() for key in sorted(held))),
        }
        for name, held in (("model.safetensors", values), ("audiovae.pth", vae))
    }
    return {"size": size, "seed": SEED, "texts": texts, "tensors": tensors}


def empty(size: str) -> VoxCPM2Model:
    """Return the reference's model at a demo config, without our values, in float32 on the CPU."""
    config, tokenizer = (
        demo.CONFIGS[size] | {"dtype": "float32", "max_length": 64},
        types.SimpleNamespace(vocab={}),
    )
    if config["architecture"] == "voxcpm":
        config = OldConfig.model_validate(config)
        return OldModel(config, tokenizer, AudioVAE(config.audio_vae_config), device="cpu")
    config = VoxCPMConfig.model_validate(config)
    return VoxCPM2Model(config, tokenizer, AudioVAEV2(config.audio_vae_config), device="cpu")


def state(model: VoxCPM2Model) -> dict[str, Tensor]:
    return {key: value for key, value in model.state_dict().items() if not key.startswith("audio_vae.")}


def vae_state(model: VoxCPM2Model) -> dict[str, Tensor]:
    return dict(model.audio_vae.state_dict())


def load(directory: Path, dtype: str) -> VoxCPM2Model:
    """Load a checkpoint with the reference's loader, which takes the dtype from the config."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"dtype": dtype}
    path.write_text(json.dumps(config))
    return (OldModel if config["architecture"] == "voxcpm" else VoxCPM2Model).from_local(
        str(directory), optimize=False, device="cpu"
    )


def load_adapted(directory: Path, name: str) -> tuple[VoxCPM2Model, list[str]]:
    """Load a checkpoint with a random adapter through the reference's own code.

    Also returns the adapter's rows.
    """
    is_old = name.startswith("old")
    config = (OldLoRAConfig if is_old else LoRAConfig)(**ADAPTERS[name])
    model = (OldModel if is_old else VoxCPM2Model).from_local(
        str(directory), optimize=False, device="cpu", lora_config=config
    )
    rule = ("lora_", 0.0, 0.15, False)
    shapes = {key: value.shape for key, value in model.get_lora_state_dict().items()}
    weights = {
        key: torch.from_numpy(synthetic.fill(key, shape, "parity", [rule])) for key, shape in shapes.items()
    }
    path = directory / "lora_weights.safetensors"
    save_file(weights, path)
    loaded, skipped = model.load_lora_weights(str(path))
    assert len(loaded) == len(weights) and not skipped
    return model, rows(weights)


def rows(tensors: dict[str, Tensor], dtype: str = "F32") -> list[str]:
    kind = {torch.int32: "I32"}
    return sorted(
        f"{name}|{kind.get(tensor.dtype, dtype)}|{'x'.join(str(n) for n in tensor.shape)}"
        for name, tensor in tensors.items()
    )


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def record() -> dict[str, Tensor]:
    """Return the clips, int16 [C, N]: noise, and a buzz with changing pitch and loudness."""
    random = torch.Generator().manual_seed(SEED)
    clips = {}
    for i, (name, (rate, channels, samples)) in enumerate(CLIPS.items()):
        at = torch.arange(samples, dtype=torch.float64) / rate
        phase = 2 * torch.pi * (190 + 40 * i) * (at + 0.02 * torch.sin(9 * at))
        buzz = sum(torch.sin(k * phase) / k for k in range(1, 12)) * (1.2 + torch.sin((20 + i) * at))
        hiss = torch.randn(channels, samples, generator=random, dtype=torch.float64)
        clips[name] = (3000 * buzz + 500 * hiss).round().clamp(-32768, 32767).to(torch.int16)
    return clips


@torch.inference_mode()
def generate(
    model: VoxCPM2Model, case: int, request: dict[str, Any], directory: Path
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Generate one request through the reference's own path. Returns intermediate tensors and facts.

    directory: of the clips' files.
    """
    cache, transcript, options = None, "", request.get("options", {})
    asked: dict[str, str] = {}
    for reference in request.get("references", ()):
        wav = str(directory / f"{reference['clip']}.wav")
        if "transcript" in reference:
            transcript = reference["transcript"]
            asked |= {"prompt_text": transcript, "prompt_wav_path": wav}
        else:
            asked["reference_wav_path"] = wav
    if asked:
        cache = model.build_prompt_cache(**asked)
    text = (f"({request['instructions']})" if "instructions" in request else "") + request["text"]
    cap = request.get("max_frames", 4096)
    given = iter(noise(case, 400).mT[:, None])  # of [1, D, P] each
    seen: dict[str, list[Tensor]] = {"inputs": [], "mu": [], "stop": []}
    hooks = [
        model.base_lm.register_forward_pre_hook(
            lambda module, args, kwargs: seen["inputs"].append(kwargs["inputs_embeds"][0]), with_kwargs=True
        ),
        model.feat_decoder.register_forward_pre_hook(
            lambda module, args, kwargs: seen["mu"].append(kwargs["mu"][0]), with_kwargs=True
        ),
        model.stop_head.register_forward_hook(lambda module, args, out: seen["stop"].append(out[0])),
    ]
    with patch("voxcpm.modules.locdit.unified_cfm.torch.randn", lambda *args, **kwargs: next(given)):
        samples, target, patches = model.generate_with_prompt_cache(
            text,
            cache,
            max_len=cap,
            inference_timesteps=options.get("solver_steps", 10),
            cfg_value=options.get("cfg_scale", 2.0),
        )
    for hook in hooks:
        hook.remove()
    patches = patches[-len(seen["mu"]) :]  # the first generation also returns the patches of its warm-up
    tensors = {
        "ids": torch.tensor(model.text_tokenizer(transcript + text)),
        "inputs": seen["inputs"][0],
        "mu": torch.stack(seen["mu"])[::7],
        "stop": torch.stack(seen["stop"]),
        "patches": patches,
    }
    # the reference warms its decoder up over three patches, or none when streaming; here over all of them
    if transcript:
        heard = torch.cat((cache["audio_feat"], patches))
        whole = model.audio_vae.decode(heard.flatten(0, 1).T[None].float())[0]
        samples = whole[:, -len(patches) * 4 * prod(model.audio_vae.decoder_rates) :]
    if cache:
        tensors["heard"] = torch.cat(
            [cache[part] for part in ("ref_audio_feat", "audio_feat") if part in cache]
        )
    tensors["samples"] = samples[0, ::STRIDE]
    stop = tensors["stop"]
    frames = len(patches)
    ended = bool(stop[frames - 1].argmax() == 1) and frames > 3
    counted = 6 * len(target) + 10
    facts = {
        "case": case,
        "request": request,
        "frames": frames,
        "stop": "end" if ended else "cap",
        "target_tokens": len(target),
        "cap": counted,
    }
    return tensors, facts | {"margin": (stop[:, 1] - stop[:, 0]).abs().min().item()}


@torch.inference_mode()
def vae(model: VoxCPM2Model) -> dict[str, Tensor]:
    """Return results of the VAE: latents to samples, at once and in a stream, and samples to latents."""
    latents = torch.from_numpy(
        synthetic.fill("noise vae", (1, 8, 60), "parity", [("noise", 0.0, 1.5, False)])
    )
    samples = torch.from_numpy(
        synthetic.fill("noise audio", (1, 1600), "parity", [("noise", 0.0, 0.1, False)])
    )
    with model.audio_vae.streaming_decode() as decoder:
        streamed = torch.cat([decoder.decode_chunk(latents[:, :, i : i + 4]) for i in range(0, 60, 4)], -1)
    return {
        "decoded": model.audio_vae.decode(latents)[0, 0, ::STRIDE],
        "streamed": streamed[0, 0, ::STRIDE],
        "encoded": model.audio_vae.encode(samples, 16000)[0],
    }


class Steady(torch.nn.Module):
    """A net whose velocity is one everywhere, and which records its times of evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[Tensor] = []

    def forward(self, x: Tensor, mu: Tensor, t: Tensor, cond: Tensor, dt: Tensor) -> Tensor:
        self.looks.append(t[0])
        return torch.ones_like(x)


@torch.inference_mode()
def solver() -> dict[str, Tensor]:
    """Return results that must match in every bit, at the published widths."""
    tensors: dict[str, Tensor] = {}
    cfm = empty("tiny").feat_decoder
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        for steps in (2, 3, 7, 10, 25, 49):
            cfm.estimator = Steady()
            spans: list[Tensor] = []
            solve = cfm.solve_euler
            with (
                patch.object(
                    cfm,
                    "solve_euler",
                    lambda spans=spans, solve=solve, **kw: spans.append(kw["t_span"]) or solve(**kw),
                ),
                patch(
                    "voxcpm.modules.locdit.unified_cfm.torch.randn",
                    lambda shape, device, dtype: torch.full(shape, 0.3, dtype=dtype),
                ),
            ):
                mu, cond = torch.zeros(1, 8, dtype=dtype), torch.zeros(1, 8, 4, dtype=dtype)
                went = cfm(mu=mu, n_timesteps=steps, patch_size=4, cond=cond, cfg_value=2.0)
            looks = cfm.estimator.looks
            tensors |= {
                f"{name}.{steps}.times": spans[0],
                f"{name}.{steps}.looks": torch.stack(looks),
                f"{name}.{steps}.went": went[0, 0, :1],
            }
        tensors[f"{name}.sinusoid"] = SinusoidalPosEmb(1024)(tensors[f"{name}.10.times"])[:, ::11]
        tensors[f"{name}.sinusoid_of_zero"] = SinusoidalPosEmb(1024)(torch.zeros(1, dtype=dtype))[0, ::11]
        positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 99, 1000, 4097, 8191])
        rope = MiniCPMLongRoPE(MiniCPM4Config(**demo.CONFIGS["full"]["lm_config"])).to(dtype)
        tensors[f"{name}.cos"], tensors[f"{name}.sin"] = (table[:, :64] for table in rope(positions))
    return tensors | {"positions": positions}


@torch.inference_mode()
def bfloat16(model: VoxCPM2Model) -> dict[str, Tensor]:
    """Return patches, their rows and quantised states in bfloat16, with float32 weights rounded to it."""
    made = {
        name: synthetic.fill(f"noise {name}", shape, "parity", [("noise", 0.0, 1.0, False)])
        for name, shape in BFLOAT16.items()
    }
    given = {name: torch.from_numpy(value).bfloat16() for name, value in made.items()}
    with patch("voxcpm.modules.locdit.unified_cfm.torch.randn", lambda *args, **kwargs: given["noise"].mT):
        patches = model.feat_decoder(
            mu=given["mu"], n_timesteps=10, patch_size=4, cond=given["cond"].mT.contiguous(), cfg_value=1.6
        ).mT
    row = model.enc_to_lm_proj(model.feat_encoder(given["cond"][:, None]))[:, 0]
    return {"patches": patches, "rows": row, "fsq": model.fsq_layer(given["hidden"])}


BFLOAT16 = {"noise": (3, 4, 8), "mu": (3, 48), "cond": (3, 4, 8), "hidden": (3, 32)}


def tokens(model: VoxCPM2Model) -> dict[str, Any]:
    """Return token ids by the reference's tokenizer, of texts that are made one line as in its core."""
    texts = json.loads((HERE / "texts.json").read_text())
    texts += ["你好", "你好世界", "我们", "x我们y", "我们 大家", "卡拉O", "天气 weather 天气", "饕餮"]
    texts += ["</s>", "a<|audio_start|>b", "<s>", "<0x41>", "<unk>"]
    seams = [
        ("Hello. ", "World"),
        ("Hello.", " World"),
        ("Hello.", "World"),
        ("Hello. ", " World"),
        ("Hello.\n", "World"),
    ]
    seams += [
        ("Hello.", "\nWorld"),
        (" Hello  again.\t", "World"),
        ("  Hello.", "World"),
        ("\nHello.", "World"),
        ("Hel", "lo"),
    ]
    seams += [
        ("你", "好"),
        ("我们，", "大家"),
        ("我们 ", "大家"),
        ("我们大家。", " 今天天气很好 "),
        ("今天 天", "气"),
        ("卡拉", "O"),
    ]
    joined = [
        {"transcript": before, "text": text, "ids": model.text_tokenizer(before + re.sub(r"\s+", " ", text))}
        for before, text in seams
    ]
    return {
        "texts": [{"text": text, "ids": model.text_tokenizer(re.sub(r"\s+", " ", text))} for text in texts],
        "seams": joined,
    }


def manifests() -> None:
    """Write names and shapes of the published tensors, from the reference's classes."""
    for size, prefix in (("full", "voxcpm2"), ("1.5", "voxcpm2_1.5"), ("0.5b", "voxcpm2_0.5b")):
        with torch.device("meta"):
            model = empty(size)
        for name, tensors, dtype in (
            (prefix, state(model), "BF16"),
            (f"{prefix}_vae", vae_state(model), "F32"),
        ):
            (MANIFESTS / f"{name}.txt").write_text("\n".join(rows(tensors, dtype)) + "\n")
            print(name, len(tensors))


def save(name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write NAME.safetensors and NAME.json, with the same bytes on every run."""
    FIXTURES.mkdir(exist_ok=True)
    if tensors:
        save_file(
            {key: value.contiguous().clone() for key, value in tensors.items()},
            FIXTURES / f"{name}.safetensors",
        )
    text = json.dumps({**facts, "versions": VERSIONS}, indent=1, ensure_ascii=False)
    (FIXTURES / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for size in ("tiny", "tiny-1.5"):
            save(f"checkpoint_{size}", {}, checkpoint(size, place / size))
        clips = record()
        for name, clip in clips.items():
            soundfile.write(place / f"{name}.wav", clip.T.numpy().astype(np.int16), CLIPS[name][0])
        save("clips", clips, {"rates_hz": {name: rate for name, (rate, _, _) in CLIPS.items()}})
        models = {size: load(place / size, "float32") for size in ("tiny", "tiny-1.5")}
        model = models["tiny"]
        for i, (name, request) in enumerate(ALL_CASES.items()):
            size = "tiny-1.5" if name.startswith("old") else "tiny"
            adapter: dict[str, Any] = {}
            used = models[size]
            if name in ADAPTERS:
                used, held = load_adapted(place / size, name)
                adapter = {"adapter": {"config": ADAPTERS[name], "rows": held}}
            tensors, facts = generate(used, i, request, place)
            save(name, tensors, {"size": size, "stride": STRIDE, **facts, **adapter})
            print(name, facts["frames"], facts["stop"], facts["cap"], facts["margin"])
        save("vae", vae(model), {"stride": STRIDE})
        save("tokens", {}, tokens(model))
        save("bfloat16", bfloat16(load(place / "tiny", "bfloat16")), {"shapes": BFLOAT16, "cfg_scale": 1.6})
    save("solver", solver(), {})
    manifests()


if __name__ == "__main__":
    main()
