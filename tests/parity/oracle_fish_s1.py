"""Make the OpenAudio S1-mini fixtures with fish-speech 0.1.0's own loader, tokenizer, prompt and loop; see
README.md in this folder. All requests are greedy.

Run it in the reference environment that environments.sh builds:
    PYTHONPATH=. .venv-parity-fish_s2/bin/python tests/parity/oracle_fish_s1.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import oracle_fish_s2 as s2
import torch
from fish_speech.models.text2semantic.inference import logits_to_probs
from fish_speech.tokenizer import FishTokenizer
from torch import Tensor

from zoo.fish_s2 import demo
from zoo.fish_s2.reference import ModelS1, decode

SIZE, SEED = "tiny-s1", 0
CASES: dict[str, dict[str, Any]] = {
    "plain": {"text": s2.STORY, "max_frames": 40},
    "marked": {"text": "(excited) Look at this?!  ok", "max_frames": 24},
    "chinese": {"text": s2.CHINESE, "max_frames": 24},
    "clone": {"text": s2.STORY, "max_frames": 24, "references": [["It's a test.", 20000]]},
    "clone_sound": {"text": s2.STORY, "max_frames": 20, "references": [["", 9000]]},
    "two_references": {
        "text": "Hi.",
        "max_frames": 24,
        "references": [[s2.STORY, 20000], [s2.CHINESE, 6000]],
    },
}
TEXTS = (
    s2.STORY, s2.CHINESE, "don't DON'T  we'll", "12 345", "a\n\nb \n c", "e\u0301 \u00e9", "(sad) no?!x  ?!y",
    "<|phoneme_start|>AH0<|phoneme_end|> x", "  \t mixed\r\n\r\n", "<|speaker:0|>",
    "Speech:\n\n. the", "\U0001f600!",
)  # fmt: skip


@torch.no_grad()
def generate(
    model: ModelS1, request: dict[str, Any], clip: Tensor
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    read: list[Tensor] = []
    hidden: list[Tensor] = []
    hooks = [
        model.lm.embeddings.register_forward_pre_hook(lambda module, args: read.append(args[0][0])),
        model.lm.fast_layers[0].register_forward_pre_hook(lambda module, args: hidden.append(args[0][0, 0])),
    ]
    heard = [(text, clip[:length].float() / 32768) for text, length in request.get("references", [])]
    codes = model.speak(request["text"], heard, request["max_frames"], greedy=True)
    for hook in hooks:
        hook.remove()
    assert len(codes), "the model ends at the first step; choose another text"
    steps = [step for step in (0, 3, 9, 18) if step < len(codes)]
    passes = codes.shape[1]  # passes of the fast AR per frame
    tensors = {
        "ids": read[0],
        "codes": codes.to(torch.int16),
        "samples": decode(model.codec, codes)[:: s2.STRIDE],
        "hidden": torch.stack([hidden[passes * step] for step in steps]),
        "logits": torch.stack([model.seen[step] for step in steps]),
    }
    return tensors, {"request": request, "frames": len(codes), "steps": steps, "stride": s2.STRIDE}


def tokens(directory: Path) -> dict[str, Any]:
    """Return ids by tiktoken, which recognises every special token in a text."""
    encode = FishTokenizer.from_pretrained(str(directory)).encode
    forged = ("<|im_end|>", "a<|semantic:3|>b", "<|interleave|>")
    return {
        "texts": [{"text": text, "ids": encode(text)} for text in TEXTS],
        "forged": [{"text": text, "ids": encode(text)} for text in forged],
    }


def likely() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return sampling probabilities by the reference's own function: penalty, top-p, temperature."""
    random = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(8, 65, generator=random)
    previous = torch.randint(65, (8, 16), generator=random)
    settings = [(0.8, 0.8, 1.1), (1.0, 0.9, 1.0), (1.5, 0.95, 1.9), (0.5, 0.5, 0.6)]
    made = []
    for setting in settings:
        values = [torch.tensor(value) for value in setting]
        rows = zip(logits, previous, strict=True)
        made.append(torch.stack([logits_to_probs(row.clone(), *values, seen) for row, seen in rows]))
    tensors = {"logits": logits, "previous": previous, "probabilities": torch.stack(made)}
    return tensors, {"settings": settings}


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    s2.FIXTURES, s2.SIZE, s2.SEED = s2.HERE / "fish_s1", SIZE, SEED
    s2.FIXTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        directory = demo.write(Path(temporary) / SIZE, SIZE, SEED, torch.float32)
        s2.save("tokens", {}, tokens(directory))
        model, clip = ModelS1(directory), s2.record()
        for name, request in CASES.items():
            tensors, facts = generate(model, request, clip)
            s2.save(f"generate_{name}", tensors, facts)
            print(name, len(tensors["ids"]), facts["frames"])
        s2.save("likely", *likely())


if __name__ == "__main__":
    main()
