"""Make the Step-Audio 2 fixtures; see README.md in this folder.

The reference is zoo/step_audio2/reference.py, which says what of it is a package. All requests are greedy.

It runs in the reference environment that environments.sh builds:
    PYTHONPATH=. .venv-parity-step_audio2/bin/python tests/parity/oracle_step_audio2.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from zoo.step_audio2 import demo
from zoo.step_audio2.config import Config
from zoo.step_audio2.prompt import CHAT, PLAIN
from zoo.step_audio2.reference import (
    SEED,
    Listener,
    Lm,
    Stream,
    make_flow,
    make_vocoder,
    piece_of,
    samples_of,
    tensors_of,
)

HERE = Path(__file__).parent
FIXTURES = HERE / "step_audio2"
STRIDE = 7
# odd and even numbers of mel frames, another rate, and two pieces
CLIPS = {
    "short": (16_000, 40_961),
    "even": (16_000, 31_841),
    "other_rate": (24_000, 30_000),
    "pieces": (16_000, 25 * 16_000 + 2_560),
}
TEXT = "Tell me about the river, 12345 times."
MAX_TOKENS = 90
NUM_CODES = (3, 25, 28, 51, 53, 150)  # of the streamed answers; 51 codes end with a cell of 26


# --- fixtures ---


def clip(name: str) -> Tensor:
    """Return the samples [N] of a clip, which follow from its length."""
    rate_hz, num = CLIPS[name]
    t = torch.arange(num, dtype=torch.float64) / rate_hz
    hum = (2 * np.pi * (180 + 40 * torch.sin(3 * t)) * t).sin() * (0.3 + 0.2 * torch.sin(7 * t))
    return (hum * 32767).round().div(32768).float()


def codes_of(num: int) -> Tensor:
    return torch.arange(num) * 1237 % 6561


def voice(name: str, num_codes: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [P], mel [2 P, 80] and speaker of a voice, which follow from its number of codes."""
    at = torch.arange(2 * num_codes)[:, None] + torch.arange(80) / 7
    mel = (at / 5).sin() * 2 - 4
    return codes_of(num_codes) * 3 % 6561, mel, (torch.arange(width) * 0.7 + num_codes).cos()


VOICES = {"long": 83, "short": 31}  # codes; the short one has fewer than 100 frames


@torch.inference_mode()
def make_answers(directory: Path, config: Config) -> None:
    tensors = tensors_of(directory)
    lm, listener = Lm(directory, config, tensors), Listener(config, tensors)
    heard = {name: listener(clip(name), CLIPS[name][0]) for name in CLIPS}
    user, said = f"<|BOT|>human\n{TEXT}<|EOT|>", "<|BOT|>assistant\n<tts_start>"
    spoken = ["<|BOT|>human\n", *map(piece_of, heard["short"]), "<|EOT|>"]
    cases: dict[str, tuple[list[str | list[int]], list[str], dict[str, Any]]] = {
        "written": (["<|BOT|>system\nBe brief.<|EOT|>", user, said], [], {"system": "Be brief."}),
        "spoken": ([*spoken, said], ["short"], {"clip": "short"}),
        "text": (
            [*spoken[:-1], TEXT, "<|EOT|>", "<|BOT|>assistant\n"],
            ["short"],
            {"clip": "short", "output": "text"},
        ),
        "pieces": (
            ["<|BOT|>human\n", *map(piece_of, heard["pieces"]), "<|EOT|>", said],
            ["pieces"],
            {"clip": "pieces"},
        ),
        "thought": ([user, "<|BOT|>assistant\n\n<think>\n"], [], {"thinks": True}),
        "base": (
            [TEXT, *map(piece_of, heard["short"]), "<tts_start>"],
            ["short"],
            {"template": PLAIN, "clip": "short"},
        ),
    }
    facts: dict[str, Any] = {"seed": SEED, "text": TEXT, "answers": {}}
    for name, (pieces, clips, asked) in cases.items():
        ids = lm.ids(pieces)
        tokens = lm.answer(ids, [rows for each in clips for rows in heard[each]], MAX_TOKENS)
        facts["answers"][name] = {"request": {"template": CHAT} | asked, "ids": ids, "said": tokens}
    first = facts["answers"]["written"]
    pieces = [
        first["ids"][: -lm_length(lm, said)],
        "<|BOT|>assistant\n",
        "<tts_start>",
        first["said"],
        "<|EOT|>",
    ]
    ids = lm.ids([*pieces, "<|BOT|>human\nAnd then?<|EOT|>", said])
    facts["answers"]["second"] = {
        "request": {"template": CHAT},
        "ids": ids,
        "said": lm.answer(ids, [], MAX_TOKENS),
    }
    (FIXTURES / "answers.json").write_text(json.dumps(facts, ensure_ascii=False) + "\n")
    rows = {f"{name}.{i}": part for name, parts in heard.items() for i, part in enumerate(parts)}
    save_file(
        {name: part[:: 5 if len(part) > 60 else 1].contiguous() for name, part in rows.items()},
        FIXTURES / "heard.safetensors",
    )


def lm_length(lm: Lm, text: str) -> int:
    return len(lm.ids([text]))


@torch.inference_mode()
def make_speech(directory: Path, config: Config) -> None:
    from stepaudio2.flashcosyvoice.utils.audio import (
        mel_spectrogram,  # the reference script has stubbed its package
    )

    flow, vocoder = make_flow(directory, config), make_vocoder(directory, config)
    found: dict[str, Tensor] = {}
    for name, num_prompt in VOICES.items():
        codes, mel, speaker = voice(name, num_prompt, config.flow.speaker)
        for num in NUM_CODES:
            made = Stream(flow, codes, mel, speaker).all(codes_of(num))
            found[f"{name}.{num}.mel"] = made[:: 5 if num > 60 else 1]
            if num in (25, 51):
                found[f"{name}.{num}.samples"] = samples_of(vocoder, made, SEED)[::STRIDE]
    rate_hz, num = CLIPS["other_rate"]
    found["mel"] = mel_spectrogram(clip("other_rate")[None])[0].T[::5]
    assert rate_hz == 24_000 and num
    save_file({name: value.contiguous() for name, value in found.items()}, FIXTURES / "speech.safetensors")


def main() -> None:
    FIXTURES.mkdir(exist_ok=True)
    directory = demo.write(Path(tempfile.mkdtemp()) / "parity", "parity", SEED, torch.float32)
    config = Config.read(directory)
    make_answers(directory, config)
    make_speech(directory, config)


if __name__ == "__main__":
    main()
