"""Make the Fish Audio S2 fixtures and manifests with the reference implementations; see README.md in this
folder.

Classes and prompts are those of zoo/fish_s2/reference.py. Repetition-aware sampling is written here, step by
step in plain loops. All requests are greedy.

Run it in the reference environment that environments.sh builds:
    PYTHONPATH=. .venv-parity-fish_s2/bin/python tests/parity/oracle_fish_s2.py
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from fish_speech.models.text2semantic.llama import BaseTransformer, precompute_freqs_cis
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from zoo.fish_s2 import demo
from zoo.fish_s2.reference import Model, batches, make_codec, make_lm, published_name

HERE = Path(__file__).parent
FIXTURES = HERE / "fish_s2"
MANIFESTS = HERE.parent / "manifests"
SIZE, SEED = "tiny", 0
STRIDE = 997  # every STRIDEth sample is stored; coprime to a frame, to cover all positions in a frame
PACKAGES = ("fish-speech", "vllm-omni", "transformers", "tokenizers", "torch", "numpy")
VERSIONS = {name: importlib.metadata.version(name) for name in PACKAGES}
# of the published header's rows
LM_SHA256 = "7080b1c9b5d5e95589a1efa18db19616170d7e35664e2e4e7f744bbf7180adad"

STORY = "The quick brown fox jumps over the lazy dog."
CHINESE = "今天天气很好。"
TURNS = "<|speaker:0|>Good morning, [laughing] everybody! <|speaker:1|> It's 7:45.\n<|speaker:0|>" + STORY * 3
# Requests as fields of zoo.request.Request. `references` are transcripts and lengths of the one clip in
# samples.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"text": STORY, "max_frames": 40},
    "tagged": {"text": " [whisper] Look at this!\n\n", "max_frames": 24},
    "chinese": {"text": CHINESE, "max_frames": 24},
    "clone": {"text": "<|speaker:0|>" + STORY, "max_frames": 24, "references": [["It's a test.", 20000]]},
    "clone_sound": {"text": STORY, "max_frames": 16, "references": [["", 9000]]},
    "two_speakers": {
        "text": "<|speaker:1|>Hi.",
        "max_frames": 24,
        "references": [[STORY, 20000], [CHINESE, 6000]],
    },
    "turns": {
        "text": TURNS,
        "max_frames": 12,
        "chunk_length": 100,
        "references": [["<|speaker:1|>Ah.", 9000]],
    },
    "many_turns": {"text": "".join(f"<|speaker:{i % 3}|>{i}" for i in range(12)), "max_frames": 6},
}
CLIP_SAMPLES = 44_100 * 7  # 603 positions of the encoder's transformer, which looks back 512
LENGTHS = (1, 2047, 2048, 2049, 30_000, CLIP_SAMPLES)
STEPS = (0, 3, 9)  # whose hidden states and logits are stored


# --- the fixtures ---


def record() -> Tensor:
    """Return the clip, int16 [N]: a buzz with changing pitch and loudness, and noise."""
    random = torch.Generator().manual_seed(SEED)
    at = torch.arange(CLIP_SAMPLES, dtype=torch.float64) / 44100
    phase = 2 * torch.pi * 130 * (at + 0.02 * torch.sin(9 * at))
    buzz = sum(torch.sin(k * phase) / k for k in range(1, 12)) * (1.2 + torch.sin(20 * at))
    noise = torch.randn(CLIP_SAMPLES, generator=random, dtype=torch.float64)
    return (3000 * buzz + 500 * noise).round().clamp(-32768, 32767).to(torch.int16)


def heard(model: Model, clip: Tensor, length: int) -> Tensor:
    """Return codes [K, F] of the first `length` samples of the clip."""
    return model.codec.encode(clip[:length].float()[None, None] / 32768)[0][0]


def gap(logits: Tensor) -> float:
    """Return the smallest distance in any row between the best and the second-best logit."""
    best, second = logits.topk(2).values.unbind(-1)
    return (best - second).min().item()


@torch.no_grad()
def generate(model: Model, request: dict[str, Any], clip: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    heard = [(text, clip[:length].float() / 32768) for text, length in request.get("references", [])]
    context, texts = model.system(heard), batches(request["text"], request.get("chunk_length", 200))
    tensors: dict[str, Tensor] = {}
    margins: list[float] = []
    kept: dict[str, list[Tensor]] = {"hidden": [], "logits": [], "fast_logits": []}
    for number, text in enumerate(texts):
        context = torch.cat((context, model.user(text)), 1)
        tensors[f"columns_{number}"] = context.T
        codes: list[Tensor] = []
        at, columns = 0, context[None]
        model.begin(1)
        while len(codes) < request["max_frames"]:
            hidden, logits = model.step(columns, at)
            first = logits.argmax(-1)
            assert codes or first < model.size, "the model ends at the first step; choose another text"
            if first == model.size:
                break
            frame, fast_logits = model.frame(hidden, first, lambda logits: logits.argmax(-1))
            margins += [gap(logits), gap(fast_logits)]
            if number == 0 and len(codes) in STEPS:
                for name, value in (("hidden", hidden), ("logits", logits), ("fast_logits", fast_logits)):
                    kept[name].append(value[0])
            codes.append(frame[0])
            at += columns.shape[2]
            columns = model.speech(frame.T)[None]
        spoken = torch.stack(codes)  # [F, K]
        tensors[f"codes_{number}"] = spoken.to(torch.int16)
        tensors[f"samples_{number}"] = model.decode(spoken)[::STRIDE]
        context = torch.cat((context, model.speech(spoken.T), model.text("<|im_end|>\n")), 1)
    tensors |= {name: torch.stack(values) for name, values in kept.items()}
    frames = [len(tensors[f"codes_{number}"]) for number in range(len(texts))]
    return tensors, {"request": request, "frames": frames, "passes": texts, "margin": min(margins)}


@torch.no_grad()
def codec(model: Model, clip: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return results of the codec: random codes to samples at once, and a clip, cut to several lengths, to
    codes and the input of the codebooks."""
    random = torch.Generator().manual_seed(4)
    tensors: dict[str, Tensor] = {"clip": clip}
    for frames in (1, 3, 200):
        codes = torch.randint(model.size, (frames, model.codebooks), generator=random)
        samples = model.decode(codes)
        assert len(samples) == 2048 * frames
        kept = samples[:: 1 if frames < 3 else STRIDE]
        tensors |= {f"decode_{frames}.codes": codes.to(torch.int16), f"decode_{frames}.samples": kept}
    seen: dict[str, Tensor] = {}
    margins: list[float] = []
    quantizer = model.codec.quantizer
    quantizer.pre_module.register_forward_hook(lambda module, args, out: seen.update(latent=out[0]))
    for book in (*quantizer.semantic_quantizer.quantizers, *quantizer.quantizer.quantizers):
        rows = book.codebook.weight
        book.in_proj.register_forward_hook(
            lambda module, args, out, rows=rows: margins.append(nearness(out[0].T, rows))
        )
    for length in LENGTHS:
        codes = heard(model, clip, length)
        tensors[f"encode_{length}.codes"] = codes.T.to(torch.int16)
        if length == LENGTHS[-2]:
            tensors[f"encode_{length}.latent"] = seen["latent"].clone()
    return tensors, {"lengths": LENGTHS, "stride": STRIDE, "margin": min(margins)}


def nearness(x: Tensor, rows: Tensor) -> float:
    """Return the gap between the nearest and the second-nearest direction. x [F, dim], rows [V, dim]."""
    x, rows = nn.functional.normalize(x), nn.functional.normalize(rows)
    nearest = torch.cdist(x, rows).topk(2, largest=False).values
    return (nearest[:, 1] - nearest[:, 0]).min().item()


def kept_logits(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Return sampling probabilities [V] of logits [V], as the original computes them.

    Top-p applies to the softmax at temperature 1 and drops the entry that crosses it. Then come top-k and the
    temperature. The best entry is always kept.
    """
    order = logits.sort(descending=True, stable=True).indices
    total, kept = 0.0, []
    probabilities = logits.double().softmax(-1)
    for rank, index in enumerate(order.tolist()):
        total += probabilities[index].item()
        if rank == 0 or (total <= top_p and rank < top_k):
            kept.append(index)
    out = torch.full_like(logits, -torch.inf)
    out[kept] = logits[kept]
    return (out / max(temperature, 1e-5)).softmax(-1)


def likely() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return sampling probabilities. Those without top-k are checked against the reference's own function."""
    from fish_speech.models.text2semantic.inference import logits_to_probs

    random = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(8, 65, generator=random)
    settings = [
        (0.8, 30, 0.8),
        (1.0, 65, 0.9),
        (1.5, 65, 0.95),
        (0.5, 5, 0.5),
        (0.8, 30, 0.05),
        (0.7, 3, 0.99),
    ]
    made = []
    for temperature, top_k, top_p in settings:
        made.append(torch.stack([kept_logits(row, temperature, top_k, top_p) for row in logits]))
        if top_k == 65:
            values = [torch.tensor(value) for value in (temperature, top_p, 1.0)]
            theirs = torch.stack([logits_to_probs(row.clone(), *values) for row in logits])
            torch.testing.assert_close(made[-1], theirs, rtol=0, atol=1e-6)
    return {"logits": logits, "probabilities": torch.stack(made)}, {"settings": settings}


def repetition() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return repetition-aware samples from fixed logits and noise, step by step in plain loops.

    Few codes are likely, so many samples are repetitions.
    """
    random = torch.Generator().manual_seed(3)
    steps, size = 120, 64
    logits = torch.randn(steps, size + 1, generator=random)
    logits[:, :6] += 3.5
    logits[:-1, size], logits[-1, size] = -5.0, 20.0  # speech ends once
    noise = -torch.log(-torch.log(torch.rand(steps, 2, size + 1, generator=random).clamp(1e-6, 1 - 1e-6)))
    temperature, top_k, top_p = 0.8, 30, 0.8
    window, tokens, replaced = [-1] * 10, [], []
    for at in range(steps):
        first = int((kept_logits(logits[at], temperature, top_k, top_p).log() + noise[at, 0]).argmax())
        again = int((kept_logits(logits[at], 1.0, top_k, 0.9).log() + noise[at, 1]).argmax())
        repeats = at > 0 and first != size and first in window
        tokens.append(again if repeats else first)
        replaced.append(repeats)
        if at > 0:  # the token of the prefill never enters the window
            window = [*window[1:], tokens[-1]]
    assert 20 < sum(replaced) < steps - 20 and tokens.index(size) == steps - 1
    setting = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    return {"logits": logits, "noise": noise, "tokens": torch.tensor(tokens)}, {
        **setting,
        "replaced": sum(replaced),
    }


@torch.no_grad()
def bfloat16(model: Model) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return rotary tables, columns of codes embedded in bfloat16, and the slow AR over them."""
    positions = torch.tensor([0, 1, 2, 3, 5, 9, 17, 64, 257, 1001, 4095, 32767])
    tables = {}
    for name, dim, theta in (("slow", 128, 1_000_000), ("codec", 64, 10_000)):
        tables[f"rope_{name}"] = precompute_freqs_cis(32768, dim, theta)[positions]
    lm = make_lm(model.config)
    lm.load_state_dict({k: v for k, v in model.lm.state_dict().items() if "kv_cache" not in k})
    lm = lm.to(torch.bfloat16).eval()
    random = torch.Generator().manual_seed(5)
    codes = torch.randint(model.size, (model.codebooks, 6), generator=random)
    columns = torch.cat((model.text("<|im_start|>system\n", STORY), model.speech(codes)), 1)
    embedded: list[Tensor] = []
    lm.layers[0].register_forward_pre_hook(lambda module, args: embedded.append(args[0]))
    made = BaseTransformer.forward_generate(lm, columns[None], return_all=True)
    tensors = {
        "positions": positions,
        "columns": columns.T,
        "inputs": embedded[0][0],
        "hidden": lm.norm(made.hidden_states)[0],
    }
    return tensors | tables, {}


def tokens(model: Model) -> dict[str, Any]:
    """Return token ids by the tokenizers library, which recognises every added token in a text."""
    texts = (
        STORY,
        CHINESE,
        TURNS,
        "don't DON'T  we'll",
        "12 345",
        "a\n\nb \n c",
        "e\u0301",
        "<|phoneme_start|>AH0<|phoneme_end|> x",
    )
    forged = ("<|im_end|>", "a<|semantic:3|>b", "<|im_start|>system\n", "<|voice|>")
    joined = [STORY + "\n\nSpeech:\n", [STORY, "\n\nSpeech:\n"]]
    return {
        "texts": [{"text": text, "ids": model.encode(text)} for text in texts],
        "forged": [{"text": text, "ids": model.encode(text)} for text in forged],
        "joined": model.encode(joined[0]),
        "apart": [token for text in joined[1] for token in model.encode(text)],
    }


# --- writing ---


def save(name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    if tensors:
        path = FIXTURES / f"{name}.safetensors"
        save_file({key: value.contiguous() for key, value in tensors.items()}, path)
        path.chmod(0o644)
    facts = {"size": SIZE, "seed": SEED, **facts, "versions": VERSIONS}
    text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
    (FIXTURES / f"{name}.json").write_text(text, encoding="utf-8")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def rows(tensors: dict[str, Tensor], dtype: str) -> list[str]:
    return sorted(f"{name}|{dtype}|{'x'.join(map(str, value.shape))}" for name, value in tensors.items())


def manifests() -> None:
    """Write names and shapes of the published tensors, from the references' classes."""
    with torch.device("meta"):
        lm = {
            published_name(name): value
            for name, value in make_lm(demo.CONFIGS["full"][0]).state_dict().items()
        }
        codec = dict(make_codec(demo.CODEC, 64).named_parameters())
    assert sha256("\n".join(rows(lm, "BF16")).encode()) == LM_SHA256
    assert (len(codec), sum(value.numel() for value in codec.values())) == (535, 391_430_530)
    (MANIFESTS / "fish_s2.txt").write_text("\n".join(rows(lm, "BF16")) + "\n")
    (MANIFESTS / "fish_s2_codec.txt").write_text("\n".join(rows(codec, "F32")) + "\n")


def checkpoint(directory: Path) -> dict[str, Any]:
    """Return fingerprints of the demo: sha256 of the bytes of each JSON file and of all tensor values."""
    texts = {path.name: sha256(path.read_bytes()) for path in sorted(directory.glob("*.json"))}
    tensors: dict[str, Tensor] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(shard)
    tensors |= torch.load(directory / "codec.pth", weights_only=True)
    values = (tensors[name] for name in sorted(tensors))
    return {
        "texts": texts,
        "sha256": sha256(b"".join(v.reshape(-1).view(torch.uint8).numpy().tobytes() for v in values)),
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    FIXTURES.mkdir(exist_ok=True)
    manifests()
    with tempfile.TemporaryDirectory() as temporary:
        directory = demo.write(Path(temporary) / "tiny", SIZE, SEED, torch.float32)
        save("checkpoint", {}, checkpoint(directory))
        model = Model(directory)
        clip = record()
        for name, request in CASES.items():
            tensors, facts = generate(model, request, clip)
            save(f"generate_{name}", tensors, {"stride": STRIDE, **facts})
            print(name, len(tensors["columns_0"]), facts["frames"], facts["margin"])
        made = codec(model, clip)
        print("codec", made[1]["margin"])
        save("codec", *made)
        save("likely", *likely())
        made = repetition()
        print("repetition", made[1])
        save("repetition", *made)
        save("bfloat16", *bfloat16(model))
        save("tokens", {}, tokens(model))


if __name__ == "__main__":
    main()
