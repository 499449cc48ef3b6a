"""Make the Higgs Audio V3 fixtures and manifest with the reference implementations; see README.md in this
folder.

No package runs the whole model, so the parts come from the packages that the model card names. Backbone and
codec are transformers' Qwen3Model and HiggsAudioV2TokenizerModel, which needs torchaudio. Prompt, delay
pattern, sampling and stop rule are files of sglang-omni, loaded one by one without its server. This file adds
the loop around them. All requests are greedy.

Run it in the reference environment that environments.sh builds; SGLANG_OMNI is the unpacked wheel:
    PYTHONPATH=. .venv-parity-higgs_v3/bin/python tests/parity/oracle_higgs_v3.py SGLANG_OMNI
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    DynamicCache,
    HiggsAudioV2TokenizerConfig,
    HiggsAudioV2TokenizerModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
)

from zoo.higgs_v3 import demo
from zoo.higgs_v3.vocabulary import tokenizer as tokenizer_json

HERE = Path(__file__).parent
FIXTURES = HERE / "higgs_v3"
MANIFESTS = HERE.parent / "manifests"
SIZE, SEED = "tiny", 0
# Every STRIDEth sample is stored where all would be too many. It is coprime to a frame, to cover all of it.
STRIDE = 97
CODEC = "tied.embedding.modality_embeddings.0.model."
BOOKS, CODES = 8, 64
BEGIN, END = CODES, CODES + 1
VERSIONS = {
    name: importlib.metadata.version(name)
    for name in ("transformers", "torchaudio", "tokenizers", "torch", "numpy")
}

STORY = "The quick brown fox jumps over the lazy dog."
TAGGED = "<|emotion:awe|>Look at this! <|sfx:laughter|>Haha<|prosody:pause|> It's 7:45."
CHINESE = "今天天气很好。"
# Requests as fields of zoo.request.Request. `reference` is the one clip; `ends` forces the end of codebook 0
# at that step.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"text": STORY, "max_frames": 40},
    "tagged": {"text": TAGGED, "max_frames": 24},
    "chinese_ends": {"text": CHINESE, "max_frames": 40, "ends": 17},
    "one_frame": {"text": "a", "max_frames": 1},
    "clone": {"text": STORY, "max_frames": 24, "reference": True},
    "clone_transcript": {"text": TAGGED, "max_frames": 24, "reference": True, "transcript": CHINESE},
    "clone_transcript_ends": {
        "text": "Hello!",
        "max_frames": 24,
        "reference": True,
        "transcript": STORY,
        "ends": 8,
    },
}
STEPS = (0, 3, 9)  # whose hidden states and logits are stored: inside the delay window and after it
CLIP_SAMPLES = 12_700
# Lengths mod 960: at 0, 118, 632 and 959 the acoustic and the semantic branch give the same number of frames,
# at 119, 400 and 631 they do not.
LENGTHS = tuple(9600 + more for more in (0, 118, 119, 400, 631, 632, 959))
TEXTS = (
    STORY,
    TAGGED,
    CHINESE,
    "don't DON'T  we'll",
    "12 345",
    "a\n\nb \n c",
    "e\u0301 naïve",
    "<|prosody:pause|> x <|style:singing|>y",
)
FORGED = ("<|audio|>", "a<|ref_audio|>b", "<|im_end|>", "<|env:music|>", "<|tts|> x", "<|emotion:joy|>")


# --- the references -----------------------------------------------------------------------------------------


def sglang(root: Path) -> dict[str, Any]:
    """Return the modules of sglang-omni that are needed, with stubs for their imports from the server."""

    def stub(name: str, **content: Any) -> None:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)

    def file(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, root / (name.replace(".", "/") + ".py"))
        assert spec and spec.loader
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    higgs = "sglang_omni.models.higgs_tts"
    for package in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang_omni", "sglang_omni.models", higgs):
        stub(package, __path__=[])
    stub("sglang.srt.layers.sampler", multinomial_with_seed=None)  # nothing is sampled here
    stub(f"{higgs}.reset_kernels", reset_sampler_row=lambda *args: False)
    stub("sglang_omni.platforms", current_platform=types.SimpleNamespace(device_type="cpu"))
    # utils.py imports the server's audio loading, so its two pure functions are cut out of the source
    source = (root / higgs.replace(".", "/") / "utils.py").read_text()
    start, stop = source.index("# Codec-vocab specials"), source.index("def delay_pattern_action_mask")
    pure = (
        source[start : source.index("_CODEC_CACHE")].split("# Note (Akazaakane)")[0]
        + source[source.index("def apply_delay_pattern") : stop]
    )
    stub(f"{higgs}.utils", torch=torch)
    exec("from __future__ import annotations\n" + pure, vars(sys.modules[f"{higgs}.utils"]))
    return {
        "renorm": file(f"{higgs}.npu_fallback"),
        "sampler": file(f"{higgs}.sampler"),
        "delay": sys.modules[f"{higgs}.utils"],
        "undelay": file("sglang_omni.utils.codec_delay"),
        "prompt": file(f"{higgs}.text_tokenizer"),
        "modeling": file(f"{higgs}.modeling"),
    }


def codec_config(config: dict[str, Any]) -> HiggsAudioV2TokenizerConfig:
    """Return transformers' config of one of our codecs.

    There the bandwidth determines the number of codebooks.
    """
    codec = copy.deepcopy(config)
    bits = (codec["codebook_size"] - 1).bit_length()
    ratios = codec["acoustic_model_config"]["downsampling_ratios"]
    return HiggsAudioV2TokenizerConfig(
        target_bandwidths=[BOOKS * 25 * bits / 1000],
        sample_rate=24000,
        semantic_sample_rate=16000,
        downsample_factor=320,
        codebook_size=codec["codebook_size"],
        codebook_dim=codec["codebook_dim"],
        acoustic_model_config={
            "model_type": "dac",
            **codec["acoustic_model_config"],
            "upsampling_ratios": ratios,
            "hop_length": 960,
        },
        semantic_model_config={
            "model_type": "hubert",
            "mask_time_prob": 0.0,
            **codec["semantic_model_config"],
        },
    )


def shapes_of(config: dict[str, Any], codec: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return published name -> shape, from the references' classes without memory.

    Tensors without a class are added by hand.
    """
    with torch.device("meta"):
        backbone = Qwen3Model(Qwen3Config(**config["text_config"])).state_dict()
        model = HiggsAudioV2TokenizerModel(codec_config(codec)).state_dict()
    shapes = {}
    for name, value in backbone.items():
        name = "tied.embedding.text_embedding.weight" if name == "embed_tokens.weight" else f"body.{name}"
        shapes[name] = tuple(value.shape)
    shapes |= {CODEC + name: tuple(value.shape) for name, value in model.items()}
    shapes[CODEC + "semantic_model.masked_spec_embed"] = (codec["semantic_model_config"]["hidden_size"],)
    audio = config["audio_encoder_config"]
    shapes[demo.CODES] = (audio["num_codebooks"] * audio["vocab_size"], audio["out_dim"])
    return shapes | {theirs: shapes[ours] for theirs, ours in demo.COPIES.items()}


class Reference:
    """The tiny checkpoint in the references' own classes, in float32."""

    def __init__(self, parts: dict[str, Any], directory: Path):
        config = json.loads((directory / "config.json").read_text())
        self.shapes = shapes_of(config, demo.TINY_CODEC)
        self.values = {
            name: torch.from_numpy(demo.fill(name, shape, SEED))
            for name, shape in sorted(self.shapes.items())
        }
        self.parts = parts
        self.backbone = Qwen3Model(Qwen3Config(**config["text_config"])).eval()
        names = {"tied.embedding.text_embedding.weight": "embed_tokens.weight"}
        own = {
            names.get(k, k.removeprefix("body.")): v
            for k, v in self.values.items()
            if k in names or k.startswith("body.")
        }
        self.backbone.load_state_dict(own)
        self.codec = HiggsAudioV2TokenizerModel(codec_config(demo.TINY_CODEC)).eval()
        own = {k.removeprefix(CODEC): v for k, v in self.values.items() if k.startswith(CODEC)}
        missing, unexpected = self.codec.load_state_dict(own, strict=False)
        assert not missing and unexpected == ["semantic_model.masked_spec_embed"], (missing, unexpected)
        modeling = parts["modeling"]
        shape = (BOOKS, CODES + 2, config["text_config"]["hidden_size"])
        self.embedding, self.head = (
            modeling.HiggsFusedMultiTextEmbedding(*shape),
            modeling.HiggsFusedMultiTextHead(*shape),
        )
        self.embedding.weight.data = self.head.weight.data = self.values[demo.CODES]
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
        self.adapter = parts["prompt"].HiggsTokenizerAdapter(self.tokenizer)


# --- the fixtures -------------------------------------------------------------------------------------------


def record() -> Tensor:
    """Return the clip, int16 [N]: a buzz with changing pitch and loudness, and noise."""
    random = torch.Generator().manual_seed(SEED)
    at = torch.arange(CLIP_SAMPLES, dtype=torch.float64) / 24000
    phase = 2 * torch.pi * 130 * (at + 0.02 * torch.sin(9 * at))
    buzz = sum(torch.sin(k * phase) / k for k in range(1, 12)) * (1.2 + torch.sin(20 * at))
    noise = torch.randn(CLIP_SAMPLES, generator=random, dtype=torch.float64)
    return (3000 * buzz + 500 * noise).round().clamp(-32768, 32767).to(torch.int16)


def spoken(rows: Tensor, parts: dict[str, Any]) -> Tensor:
    """Return codes [R - 7, K] of rows [R, K] with specials replaced by 0, as sglang-omni's vocoder does."""
    codes = parts["undelay"].reverse_delay_pattern(rows, allow_short=True)
    return torch.where(codes >= CODES, torch.zeros_like(codes), codes)


@torch.no_grad()
def generate(
    reference: Reference, request: dict[str, Any], clip: Tensor
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    parts, sampler = reference.parts, reference.parts["sampler"]
    delayed = torch.empty(0, BOOKS, dtype=torch.long)
    if request.get("reference"):
        # clips shorter than a second are padded: audio_codec.py, encode
        samples = F.pad(clip.float() / 32768, (0, 24000 - CLIP_SAMPLES))
        delayed = parts["delay"].apply_delay_pattern(
            reference.codec.encode(samples[None, None]).audio_codes[0].T
        )
        # ids are fixed in utils.py
        delayed = torch.where(delayed == 1024, BEGIN, torch.where(delayed == 1025, END, delayed))
    said = {"num_ref_tokens": len(delayed), "reference_text": request.get("transcript")}
    ids = torch.tensor(reference.adapter.build_prompt(request["text"], **said))
    x = reference.backbone.embed_tokens(ids.clamp(min=0))
    x[ids < 0] = reference.embedding(delayed)
    tensors = {"ids": ids, "inputs": x, "reference": delayed.to(torch.int16)}

    cache, state = DynamicCache(), sampler.HiggsSamplerState(BOOKS)
    rows, kept, margins = [], [], []
    while not state.generation_done and len(rows) < request["max_frames"] + BOOKS - 1:
        hidden = reference.backbone(inputs_embeds=x[None], past_key_values=cache).last_hidden_state[0, -1:]
        logits = reference.head.generate(hidden)[0].float()  # [K, V]
        if len(rows) in STEPS:
            kept.append((hidden[0], logits.clone()))
        if len(rows) == request.get("ends"):
            logits[0, END] = 1e4
        active = logits[: len(rows) + 1]
        best, second = active.topk(2).values.unbind(-1)
        margins.append((best - second).min().item())
        rows.append(sampler.step(logits, state, temperature=0.0, boc_id=BEGIN, eoc_id=END))
        x = reference.embedding(rows[-1][None])
    codes = spoken(torch.stack(rows), parts)
    samples = reference.codec.decode(codes.T[None]).audio_values[0, 0]
    tensors |= {"rows": torch.stack(rows).to(torch.int16), "codes": codes.to(torch.int16)}
    tensors |= {
        "hidden": torch.stack([h for h, _ in kept]),
        "logits": torch.stack([logits for _, logits in kept]),
    }
    tensors["samples"] = samples[::STRIDE]
    return tensors, {
        "request": request,
        "frames": len(codes),
        "steps": STEPS[: len(kept)],
        "margin": min(margins),
    }


@torch.no_grad()
def codec(reference: Reference, clip: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return results of the codec: random codes to samples at once, and a clip, cut to several lengths, to
    codes and intermediate tensors."""
    model, random = reference.codec, torch.Generator().manual_seed(4)
    tensors: dict[str, Tensor] = {"clip": clip}
    for frames in (1, 3, 30):
        codes = torch.randint(CODES, (frames, BOOKS), generator=random)
        samples = model.decode(codes.T[None]).audio_values[0, 0]
        assert len(samples) == 960 * frames
        tensors |= {
            f"decode_{frames}.codes": codes.to(torch.int16),
            f"decode_{frames}.samples": samples[:: 1 if frames < 3 else STRIDE],
        }
    seen: dict[str, Tensor] = {}
    margins: list[float] = []
    model.acoustic_encoder.register_forward_hook(
        lambda module, args, out: seen.update(acoustic=out[0], padded=args[0])
    )
    model.encoder_semantic.register_forward_hook(
        lambda module, args, out: seen.update(features=args[0][0], semantic=out[0])
    )
    for book in model.quantizer.quantizers:  # the reference computes -|x - c|^2 and takes the maximum
        book.project_in.register_forward_hook(
            lambda module, args, out, book=book: margins.append(gap(out, book.codebook.embed))
        )
    padded = []
    for length in LENGTHS:
        codes = model.encode(clip[:length].float()[None, None] / 32768).audio_codes[0].T
        tensors[f"encode_{length}.codes"] = codes.to(torch.int16)
        padded.append(seen["padded"].shape[-1] != length)
        if length in (LENGTHS[0], LENGTHS[3]):
            tensors |= {
                f"encode_{length}.{name}": seen[name].clone() for name in ("acoustic", "semantic", "features")
            }
    facts = {"lengths": LENGTHS, "padded": padded, "stride": STRIDE, "margin": min(margins)}
    return tensors, facts


def gap(x: Tensor, rows: Tensor) -> float:
    """Return by how much, relatively, the second-nearest row is farther than the nearest."""
    nearest = torch.cdist(x, rows[None]).topk(2, largest=False).values
    return (nearest[..., 1] / nearest[..., 0] - 1).min().item()


def stops(parts: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return results of the sampler for an end of codebook 0 forced at each step. The logits, in which
    specials are likely, are always the same."""
    sampler, random = parts["sampler"], torch.Generator().manual_seed(1)
    logits = torch.randint(-100, 101, (40, BOOKS, CODES + 2), generator=random).to(torch.int8)
    logits[:, 1:, CODES:] = torch.maximum(
        logits[:, 1:, CODES:], torch.randint(60, 104, (40, BOOKS - 1, 2), generator=random).to(torch.int8)
    )
    logits[:, 0, END] = -128  # codebook 0 ends only where this is overwritten
    tensors, frames, steps = {"logits": logits}, [], []
    for end in range(21):
        told = logits.clone()
        told[end, 0, END] = 127
        state, rows = sampler.HiggsSamplerState(BOOKS), []
        while not state.generation_done and len(rows) < len(logits):
            rows.append(
                sampler.step(told[len(rows)].float(), state, temperature=0.0, boc_id=BEGIN, eoc_id=END)
            )
        steps.append(len(rows))
        codes = spoken(torch.stack(rows), parts)
        frames.append(len(codes))
        if end >= BOOKS:
            tensors[f"ends_{end}.codes"] = codes.to(torch.int16)
    return tensors, {"frames": frames, "steps": steps}


def likely(parts: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return sampling probabilities after temperature, top-k and top-p."""
    renorm, random = parts["renorm"], torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(BOOKS, CODES + 2, generator=random)
    settings = [(0.8, 30, 0.8), (1.0, 66, 1.0), (1.5, 50, 0.95), (0.5, 5, 0.5), (0.8, 30, 0.05)]
    kept = []
    for temperature, top_k, top_p in settings:
        probabilities = (logits / temperature).softmax(-1)
        probabilities = renorm.top_k_renorm_prob(probabilities, torch.full((BOOKS,), top_k))
        kept.append(renorm.top_p_renorm_prob(probabilities, torch.full((BOOKS,), top_p)))
    return {"logits": logits, "probabilities": torch.stack(kept)}, {"settings": settings}


@torch.no_grad()
def bfloat16(reference: Reference) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the backbone over a whole prompt in bfloat16, its rotary table, and embedded rows of codes."""
    backbone, random = copy.deepcopy(reference.backbone).to(torch.bfloat16), torch.Generator().manual_seed(3)
    # the frequencies are float32 in a loaded checkpoint, unlike in a cast one
    backbone.rotary_emb = reference.backbone.rotary_emb
    width = backbone.config.hidden_size
    inputs = torch.randn(1, 12, width, generator=random).to(torch.bfloat16)
    positions = torch.tensor([[0, 1, 2, 3, 5, 9, 17, 64, 257, 1001, 4095, 8191]])
    cos, sin = backbone.rotary_emb(inputs, positions)
    rows = torch.randint(CODES + 2, (6, BOOKS), generator=random)
    reference.embedding.to(torch.bfloat16)
    summed = reference.embedding(rows)
    reference.embedding.to(torch.float32)
    tensors = {"positions": positions[0], "cos": cos[0], "sin": sin[0], "rows": rows, "summed": summed}
    return tensors | {"inputs": inputs[0], "hidden": backbone(inputs_embeds=inputs).last_hidden_state[0]}, {}


def tokens(reference: Reference) -> dict[str, Any]:
    """Return token ids by transformers, which recognises every added token in a text."""
    return {
        "texts": [
            {"text": text, "ids": reference.tokenizer.encode(text, add_special_tokens=False)}
            for text in TEXTS
        ],
        "forged": [
            {"text": text, "ids": reference.tokenizer.encode(text, add_special_tokens=False)}
            for text in FORGED
        ],
    }


def golden(parts: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the ids of a public golden's text, with a vocabulary of the published size."""
    (directory / "full.json").write_text(
        json.dumps(tokenizer_json(full=True), ensure_ascii=False), encoding="utf-8"
    )
    adapter = parts["prompt"].HiggsTokenizerAdapter(
        PreTrainedTokenizerFast(tokenizer_file=str(directory / "full.json"))
    )
    text = "Hello from PegaInfer."
    return {
        "text": text,
        "ids": adapter.build_prompt(text),
        "with_reference": adapter.build_prompt(text, num_ref_tokens=3, reference_text=text),
    }


# --- writing ------------------------------------------------------------------------------------------------


def save(name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    if tensors:
        path = FIXTURES / f"{name}.safetensors"
        save_file({key: value.contiguous() for key, value in tensors.items()}, path)
        path.chmod(0o644)
    facts = {"size": SIZE, "seed": SEED, **facts, "versions": VERSIONS | {"sglang-omni": "0.1.9"}}
    (FIXTURES / f"{name}.json").write_text(
        json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def rows(shapes: dict[str, tuple[int, ...]], dtype: str) -> list[str]:
    return sorted(f"{name}|{dtype}|{'x'.join(str(n) for n in shape)}" for name, shape in shapes.items())


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    FIXTURES.mkdir(exist_ok=True)
    parts = sglang(Path(sys.argv[1]))
    full = rows(shapes_of(demo.CONFIGS["full"], demo.CODEC), "BF16")
    (MANIFESTS / "higgs_v3.txt").write_text("\n".join(full) + "\n")
    with tempfile.TemporaryDirectory() as temporary:
        directory = demo.write_texts(Path(temporary) / "tiny", SIZE)
        texts = {path.name: sha256(path.read_bytes()) for path in sorted(directory.iterdir())}
        reference = Reference(parts, directory)
        digest = sha256(b"".join(value.numpy().tobytes() for value in reference.values.values()))
        save(
            "checkpoint",
            {},
            {
                "texts": texts,
                "sha256": digest,
                "rows_sha256": sha256("\n".join(rows(reference.shapes, "F32")).encode()),
            },
        )
        save("golden", {}, golden(parts, Path(temporary)))
        clip = record()
        for name, request in CASES.items():
            tensors, facts = generate(reference, request, clip)
            save(f"generate_{name}", tensors, {"stride": STRIDE, **facts})
            print(name, len(tensors["ids"]), facts["frames"], facts["margin"])
        made = codec(reference, clip)
        print("codec", made[1]["padded"], made[1]["margin"])
        save("codec", *made)
        save("stops", *stops(parts))
        save("likely", *likely(parts))
        save("bfloat16", *bfloat16(reference))
        save("tokens", {}, tokens(reference))


if __name__ == "__main__":
    main()
