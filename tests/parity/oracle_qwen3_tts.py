"""Make the Qwen3-TTS fixtures and manifests with the reference package (qwen-tts 0.1.1, transformers 4.57.3);
see README.md in this folder.

Run it in the reference environment that environments.sh builds:
    PYTHONPATH=. .venv-parity-qwen3_tts/bin/python tests/parity/oracle_qwen3_tts.py
"""

# ruff: noqa: RUF001  (the Chinese texts have Chinese punctuation)
from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import json
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import librosa
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

# only the code of the 25 Hz model uses these
for absent in ("sox", "onnxruntime", "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi"):
    sys.modules[absent] = types.ModuleType(absent)
    sys.modules[absent].__spec__ = importlib.machinery.ModuleSpec(absent, None)

from qwen_tts import Qwen3TTSModel  # noqa: E402
from qwen_tts.core.models import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration  # noqa: E402
from qwen_tts.core.models import modeling_qwen3_tts as modeling  # noqa: E402
from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Config  # noqa: E402
from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Model  # noqa: E402

from zoo.qwen3_tts import demo  # noqa: E402

HERE = Path(__file__).parent
FIXTURES = HERE / "qwen3_tts"
MANIFESTS = HERE.parent / "manifests"
SEED = 0
# Every STRIDEth sample is stored where all would be too many. It is coprime to a frame, to cover all of it.
STRIDE = 97
SIZES = ("tiny", "tiny-1.7b", "tiny-base", "tiny-1.7b-base", "tiny-1.7b-design")
# the end-of-speech id is banned at step 0 and allowed at step 2; by step 31 the penalty has a large effect
STEPS = (0, 2, 31)
VERSIONS = {
    name: importlib.metadata.version(name)
    for name in ("qwen-tts", "transformers", "tokenizers", "torch", "numpy")
}

# Requests as fields and options of zoo.request.Request, all greedy. The reference counts the token that ends
# the prefill, so its max_new_tokens is max_frames + 1. The cases cover both text modes, both kinds of size,
# texts of one and of many tokens, and stops by the model and by the cap.
STORY = "The quick brown fox jumps over the lazy dog, and then the other fox says hello to the world."
HOUSE = "Once there was a small house near the river, where an old man lived with his daughter."
ODD = "It's 7:45, and my iPhone isn't ready."
CHINESE = "你好，世界！今天天气很好。"
REQUEST = {"language": None, "instructions": None, "text_mode": "full", "max_frames": 70}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "voice": ("tiny", {"text": STORY, "voice": "ryan", "language": "english"}),
    "streaming": (
        "tiny",
        {"text": STORY, "voice": "ryan", "language": "english", "text_mode": "interleaved"},
    ),
    "auto": ("tiny", {"text": ODD, "voice": "serena"}),
    "auto_streaming": ("tiny", {"text": "Good morning!", "voice": "vivian", "text_mode": "interleaved"}),
    "auto_ends": ("tiny", {"text": HOUSE, "voice": "aiden"}),
    "dialect_auto": ("tiny", {"text": CHINESE, "voice": "dylan"}),
    "dialect_chinese": (
        "tiny",
        {"text": ODD, "voice": "eric", "language": "chinese", "text_mode": "interleaved"},
    ),
    "dialect_english": ("tiny", {"text": ODD, "voice": "eric", "language": "english"}),
    "one_token": ("tiny", {"text": "a", "voice": "aiden", "text_mode": "interleaved"}),
    "long_ends": ("tiny", {"text": HOUSE, "voice": "uncle_fu", "language": "french", "max_frames": 150}),
    "wide_voice": ("tiny-1.7b", {"text": HOUSE, "voice": "ryan", "language": "english"}),
    "wide_streaming_ends": ("tiny-1.7b", {"text": HOUSE, "voice": "vivian", "text_mode": "interleaved"}),
    "wide_dialect": ("tiny-1.7b", {"text": CHINESE, "voice": "dylan", "text_mode": "interleaved"}),
    "wide_instruct_ends": ("tiny-1.7b", {"text": STORY, "voice": "aiden", "instructions": "Speak slowly."}),
    "wide_instruct_streaming": (
        "tiny-1.7b",
        {
            "text": ODD,
            "voice": "sohee",
            "language": "korean",
            "text_mode": "interleaved",
            "instructions": "用开心的语气说。",
        },
    ),
}
# Cases of the models without voices. `reference` names one of CLIPS. There are texts shorter and longer than
# the reference's codes.
SAYS = {"reference": "long", "transcript": "Good evening.", "text_mode": "interleaved"}
SOUND = SAYS | {"x_vector_only_mode": True}
WITHOUT_VOICES: dict[str, tuple[str, dict[str, Any]]] = {
    "clone_short_text": ("tiny-base", SAYS | {"text": "Hello!"}),
    "clone_long_text": ("tiny-base", SAYS | {"text": STORY, "language": "german"}),
    "clone_long_text_whole": (
        "tiny-base",
        SAYS | {"text": STORY, "language": "japanese", "text_mode": "full"},
    ),
    "clone_early_cut_ends": ("tiny-base", SAYS | {"text": HOUSE, "text_mode": "full"}),
    "clone_stereo": ("tiny-base", SAYS | {"text": HOUSE, "language": "chinese", "reference": "stereo"}),
    "clone_sound": ("tiny-base", SOUND | {"text": STORY, "language": "german"}),
    "clone_sound_whole": ("tiny-base", SOUND | {"text": ODD, "language": "korean", "text_mode": "full"}),
    "clone_wide": ("tiny-1.7b-base", SAYS | {"text": STORY, "reference": "rate"}),
    "clone_wide_whole": (
        "tiny-1.7b-base",
        SAYS | {"text": "Hello!", "reference": "short", "language": "german", "text_mode": "full"},
    ),
    "design": ("tiny-1.7b-design", {"text": STORY, "instructions": "A slow and quiet old man."}),
    "design_streaming": (
        "tiny-1.7b-design",
        {"text": ODD, "instructions": "用开心的语气说。", "text_mode": "interleaved"},
    ),
}
# name -> rate, channels, samples. The encoder's window is 5 frames of 1920 samples at 24 kHz. There are
# shorter and longer clips, with a partial frame.
CLIPS = {
    "short": (24000, 1, 7001),
    "long": (24000, 1, 31000),
    "stereo": (16000, 2, 6500),
    "rate": (44100, 1, 15000),
}


def checkpoint(size: str, directory: Path) -> dict[str, Any]:
    """Write a float32 checkpoint in the published layout with the reference's classes. Returns its facts."""
    demo.write_texts(directory, size)
    texts = {
        path.relative_to(directory).as_posix(): sha256(path.read_bytes())
        for path in sorted(directory.rglob("*.*"))
    }
    config, codec_config = (
        deep(demo.CONFIGS[size]["config.json"]),
        deep(demo.CONFIGS[size]["speech_tokenizer/config.json"]),
    )
    modules = {
        "model.safetensors": Qwen3TTSForConditionalGeneration(Qwen3TTSConfig(**config)),
        "speech_tokenizer/model.safetensors": Qwen3TTSTokenizerV2Model(
            Qwen3TTSTokenizerV2Config(**codec_config)
        ),
    }
    tensors = {}
    for name, module in modules.items():
        values = {
            key: torch.from_numpy(demo.fill(key, value.shape, SEED))
            for key, value in sorted(module.state_dict().items())
        }
        module.load_state_dict(values)
        save_file(values, directory / name, metadata={"format": "pt"})
        digest = sha256(b"".join(value.numpy().tobytes() for value in values.values()))
        tensors[name] = {"sha256": digest, "rows": rows(values, "F32")}
    return {"size": size, "seed": SEED, "dtype": "float32", "texts": texts, "tensors": tensors}


def deep(config: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy, because the reference's config classes write into their arguments."""
    return json.loads(json.dumps(config))


def rows(tensors: dict[str, Tensor], dtype: str) -> list[str]:
    return sorted(
        f"{name}|{dtype}|{'x'.join(str(n) for n in tensor.shape)}" for name, tensor in tensors.items()
    )


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def generate(
    model: Qwen3TTSModel, request: dict[str, Any], clips: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Generate one greedy request through the wrapper's own path. Returns intermediate tensors and facts.

    clips: int16 [C, N] by name.
    """
    inner, talker = model.model, model.model.talker
    seen: dict[str, Any] = {}
    depth_logits: list[Tensor] = []
    inner_generate, talker_generate = inner.generate, talker.generate

    def spy_inner(**kwargs: Any) -> Any:
        seen["ids"], seen["instruct"] = kwargs["input_ids"][0][0], kwargs.get("instruct_ids", [None])[0]
        seen["codes"], seen["hidden"] = inner_generate(**kwargs)
        return seen["codes"], seen["hidden"]

    def spy_talker(**kwargs: Any) -> Any:
        seen["inputs"], seen["trailing"] = kwargs["inputs_embeds"][0], kwargs["trailing_text_hidden"][0]
        seen["result"] = talker_generate(**kwargs, output_logits=True, output_scores=True)
        return seen["result"]

    hook = talker.code_predictor.register_forward_hook(
        lambda module, args, output: depth_logits.append(output.logits[0, -1])
    )
    with patch.object(inner, "generate", spy_inner), patch.object(talker, "generate", spy_talker):
        call, particular = calls(model, request, clips)
        waves, _ = call(
            text=request["text"],
            language=request["language"] or "auto",
            non_streaming_mode=request["text_mode"] == "full",
            do_sample=False,
            subtalker_dosample=False,
            max_new_tokens=request["max_frames"] + 1,
            **particular,
        )
    hook.remove()
    codes, result = seen["codes"][0], seen["result"]
    # the reference cuts its clip off at a rounded position, sometimes a sample too early
    early = len(waves[0]) - 1920 * len(codes)
    assert early in (0, 1)
    frames, steps = len(codes), [step for step in STEPS if step < len(result.logits)]
    # [steps, V] before and after the processors
    logits, scores = torch.cat(result.logits), torch.cat(result.scores)
    # [F, 15, V], and one more frame, which the cap cuts off
    depth = torch.stack(depth_logits).unflatten(0, (-1, 15))
    useful = talker.config.codec_eos_token_id + 1  # no id above it can be sampled
    assert scores[:, useful:].max() == -torch.inf
    tensors = {
        "ids": seen["ids"],
        "inputs": seen["inputs"],
        "trailing": seen["trailing"],
        "codes": codes.to(torch.int16),
        "hidden": seen["hidden"][0],
        "logits": logits[steps, :useful],
        "scores": scores[steps, :useful],
        "depth_logits": depth[[step for step in STEPS if step < frames]],
        "samples": torch.from_numpy(waves[0])[::STRIDE],  # of the codec's one-shot decoding
    }
    if seen["instruct"] is not None:
        tensors["instruct_ids"] = seen["instruct"][0]
    stop = "end" if result.sequences[0, -1] == talker.config.codec_eos_token_id else "cap"
    facts = {
        "request": request,
        "frames": frames,
        "stop": stop,
        "steps": steps,
        "margin": min(margin(scores), margin(depth)),
    }
    return tensors, facts | ({"early": early} if "reference" in request else {})


def calls(
    model: Qwen3TTSModel, request: dict[str, Any], clips: dict[str, Tensor]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the wrapper's method for the model's variant, and the arguments that only this method takes."""
    if "voice" in request:
        return model.generate_custom_voice, {"speaker": request["voice"], "instruct": request["instructions"]}
    if "reference" not in request:
        return model.generate_voice_design, {"instruct": request["instructions"]}
    said = {"ref_text": request["transcript"], "x_vector_only_mode": request.get("x_vector_only_mode", False)}
    return model.generate_voice_clone, {"ref_audio": mono(request["reference"], clips), **said}


def mono(name: str, clips: dict[str, Tensor]) -> tuple[np.ndarray, int]:
    return librosa.to_mono(clips[name].numpy().astype(np.float32) / 32768), CLIPS[name][0]


def record() -> dict[str, Tensor]:
    """Return the clips, int16 [C, N]: noise, and a buzz with changing pitch and loudness."""
    random = torch.Generator().manual_seed(SEED)
    clips = {}
    for i, (name, (rate, channels, samples)) in enumerate(CLIPS.items()):
        at = torch.arange(samples, dtype=torch.float64) / rate
        phase = 2 * torch.pi * (90 + 40 * i) * (at + 0.02 * torch.sin(9 * at))
        buzz = sum(torch.sin(k * phase) / k for k in range(1, 12)) * (1.2 + torch.sin((20 + i) * at))
        noise = torch.randn(channels, samples, generator=random, dtype=torch.float64)
        clips[name] = (3000 * buzz + 500 * noise).round().clamp(-32768, 32767).to(torch.int16)
    return clips


@torch.no_grad()
def references(model: Qwen3TTSModel, clips: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the Base models' mel, speaker vector and codes of the clips, and some mel filters."""
    filters = modeling.librosa_mel_fn(sr=24000, n_fft=1024, n_mels=128, fmin=0, fmax=12000)
    tensors = {"filters": torch.from_numpy(filters)[::8]}
    mels: list[Tensor] = []
    spectrogram = modeling.mel_spectrogram
    with patch.object(
        modeling,
        "mel_spectrogram",
        lambda *args, **kwargs: mels.append(spectrogram(*args, **kwargs)) or mels[-1],
    ):
        for name, clip in clips.items():
            (made,) = model.create_voice_clone_prompt(mono(name, clips), ref_text="-")
            tensors[f"{name}.audio"] = clip
            tensors[f"{name}.mel"] = mels.pop()[0, :, ::5]  # [128, T]
            tensors[f"{name}.speaker"] = made.ref_spk_embedding
            tensors[f"{name}.codes"] = made.ref_code.to(torch.int16)
    return tensors, {
        "size": "tiny-base",
        "seed": SEED,
        "stride": 5,
        "rates_hz": {name: rate for name, (rate, _, _) in CLIPS.items()},
    }


def margin(scores: Tensor) -> float:
    """Return the smallest distance in any row between the best and the second-best score."""
    first, second = scores.topk(2).values.unbind(-1)
    return (first - second).min().item()


@torch.no_grad()
def codec(model: Qwen3TTSModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return results of the codec in float32: random codes to samples at once, audio to codes, and the
    codebooks after their division."""
    tokenizer = model.model.speech_tokenizer
    decoder, encoder = tokenizer.model.decoder, tokenizer.model.encoder
    random = torch.Generator().manual_seed(4)  # its audio is not near a tie between two codes
    tensors: dict[str, Tensor] = {}
    seen: list[Tensor] = []
    hook = decoder.pre_transformer.register_forward_hook(
        lambda module, args, output: seen.append(output.last_hidden_state[0])
    )
    for frames in (1, 7, 40, 120):
        codes = torch.randint(decoder.config.codebook_size, (frames, 16), generator=random)
        samples = decoder(codes.T[None])[0, 0]
        assert samples.abs().max() < 1, "the clamp would hide errors"
        tensors[f"decode_{frames}.codes"] = codes.to(torch.int16)
        tensors[f"decode_{frames}.transformer"] = seen.pop()
        tensors[f"decode_{frames}.samples"] = samples if frames < 10 else samples[::STRIDE]
    hook.remove()
    hook = encoder.downsample.register_forward_hook(lambda module, args, output: seen.append(output[0].T))
    gaps: list[Tensor] = []
    margins: list[float] = []
    distances = torch.cdist

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        found = distances(*args, **kwargs)
        nearest = found.topk(2, largest=False).values
        gaps.append((nearest[..., 1] / nearest[..., 0] - 1).min())
        return found

    # one frame; two frames and a partial one; more than the encoder's window of 10 positions = 5 frames
    for samples in (1920, 3940, 30001):
        audio = (torch.randn(samples, generator=random) * 2000).round().clamp(-32768, 32767).to(torch.int16)
        with patch.object(torch, "cdist", spy):
            codes = tokenizer.encode((audio.float() / 32768).numpy(), sr=24000).audio_codes[0]
        margins.append(min(gaps[:16]).item())  # the codebooks that are used come first
        gaps.clear()
        tensors[f"encode_{samples}.audio"] = audio
        tensors[f"encode_{samples}.latent"] = seen.pop()  # [T, D], the input of both quantizers
        tensors[f"encode_{samples}.codes"] = codes.to(torch.int16)
    hook.remove()
    quantizers = {"decoder": decoder.quantizer, "encoder": encoder.quantizer}
    tensors["decoder.codebook_0"] = embedding(quantizers["decoder"].rvq_first.vq.layers[0]._codebook)
    tensors["decoder.codebook_15"] = embedding(quantizers["decoder"].rvq_rest.vq.layers[14]._codebook)
    tensors["encoder.codebook_0"] = (
        quantizers["encoder"].semantic_residual_vector_quantizer.layers[0].codebook.embed
    )
    tensors["encoder.codebook_15"] = (
        quantizers["encoder"].acoustic_residual_vector_quantizer.layers[14].codebook.embed
    )
    return tensors, {"size": "tiny", "seed": SEED, "stride": STRIDE, "encode_margin": min(margins)}


def embedding(codebook: Any) -> Tensor:
    return codebook.decode(torch.arange(codebook.codebook_size))


@torch.no_grad()
def bfloat16(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return results that depend on rounding in bfloat16: norms, rotary tables, normed and rotated q and k,
    text rows, and the talker over a whole prompt."""
    talker = Qwen3TTSModel.from_pretrained(str(directory), dtype=torch.bfloat16).model.talker
    random = torch.Generator().manual_seed(SEED)
    width = talker.config.hidden_size
    x = torch.randn(12, width, generator=random).to(torch.bfloat16)
    scale = torch.tensor([1e-4] * 4 + [1.0] * 4 + [300.0] * 4).to(torch.bfloat16)[:, None]
    layer = talker.model.layers[0]
    positions = torch.tensor([0, 1, 2, 3, 5, 9, 17, 64, 257, 1001, 4095, 32000])
    cos, sin = talker.model.rotary_emb(x[None], positions.expand(3, 1, -1))
    ids = torch.arange(0, talker.config.text_vocab_size, 37)
    inputs = torch.randn(1, 12, width, generator=random).to(torch.bfloat16)
    rotated: dict[str, Tensor] = {}
    rotate = modeling.apply_multimodal_rotary_pos_emb

    def spy(q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        rotated["q_normed"], rotated["k_normed"] = q[0].transpose(0, 1), k[0].transpose(0, 1)
        q, k = rotate(q, k, *args)
        rotated["q"], rotated["k"] = q[0].transpose(0, 1), k[0].transpose(0, 1)
        return q, k

    with patch.object(modeling, "apply_multimodal_rotary_pos_emb", spy):
        layer.self_attn(
            layer.input_layernorm(x[None] * scale), position_embeddings=(cos, sin), attention_mask=None
        )
    hidden = talker.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    tensors = {
        "norm.x": x * scale,
        "norm.out": layer.input_layernorm(x * scale),  # talker.model.layers.0.input_layernorm
        "rope.positions": positions,
        "rope.cos": cos[0],
        "rope.sin": sin[0],
        # [T, H, D] of layer 0, over norm.out at rope.positions
        **{f"attention.{name}": value for name, value in rotated.items()},
        "text.ids": ids,
        "text.out": talker.text_projection(talker.get_text_embeddings()(ids)),
        "talker.inputs": inputs[0],
        "talker.hidden": hidden[0],  # after the last norm
        "talker.logits": talker.codec_head(hidden)[0],
    }
    return tensors, {"size": "tiny", "seed": SEED, "dtype": "bfloat16"}


def tokens(model: Qwen3TTSModel) -> dict[str, Any]:
    """Return ids of texts.json by the checkpoint's tokenizer, split by Qwen's own rule. The other rule never
    applies to small vocabularies."""
    tokenizer = model.processor.tokenizer
    assert tokenizer.encode("iPhone") == [tokenizer.convert_tokens_to_ids("iPhone")], (
        "the text was split at capitals"
    )
    texts = json.loads((HERE / "texts.json").read_text())
    return {
        "size": "tiny",
        "texts": [{"text": text, "ids": model.processor(text=text)["input_ids"][0]} for text in texts],
    }


def manifests() -> None:
    """Write names and shapes of the published tensors, from the reference's classes on `meta`."""
    found = {}
    with torch.device("meta"):
        for size in ("0.6b", "1.7b"):
            for name, variant in ((size, "custom_voice"), (f"{size}-base", "base")):
                config = deep(demo.CONFIGS[name]["config.json"])
                found[f"{size}_{variant}"] = Qwen3TTSForConditionalGeneration(Qwen3TTSConfig(**config))
        found["codec"] = Qwen3TTSTokenizerV2Model(Qwen3TTSTokenizerV2Config(**deep(demo.CODEC)))
    MANIFESTS.mkdir(exist_ok=True)
    for name, module in found.items():
        text = "\n".join(rows(module.state_dict(), "F32" if name == "codec" else "BF16"))
        (MANIFESTS / f"qwen3_tts_{name}.txt").write_text(text + "\n")
        print(name, sha256(text.encode()))


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
        models, clips = {}, record()
        for size in SIZES:
            directory = Path(temporary) / size
            facts = checkpoint(size, directory)
            if size != "tiny-1.7b-design":  # which has the tensors of tiny-1.7b
                save(f"checkpoint_{size}", {}, facts)
            models[size] = Qwen3TTSModel.from_pretrained(str(directory), dtype=torch.float32)
        cases = {f"generate_{name}": case for name, case in CASES.items()} | WITHOUT_VOICES
        for name, (size, request) in cases.items():
            tensors, facts = generate(models[size], REQUEST | request, clips)
            save(name, tensors, {"size": size, "seed": SEED, "stride": STRIDE, **facts})
            print(name, facts["frames"], facts["stop"], facts["margin"], facts.get("early", ""))
        save("references", *references(models["tiny-base"], clips))
        save("codec", *codec(models["tiny"]))
        save("bfloat16", *bfloat16(Path(temporary) / "tiny"))
        save("tokens", {}, tokens(models["tiny"]))
    manifests()


if __name__ == "__main__":
    main()
