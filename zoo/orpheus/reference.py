"""Orpheus as a plain loop around transformers' Llama and snac, as serving/tools/reference.py orders it: for `zoo bench
--against reference` and `zoo parity`. It runs as a script in a separate environment, which
tests/parity/environments.sh builds. The original package cannot be imported without downloading a model.

`streams` requests are one static batch, and the codec decodes each at the end. For parity SNAC's noise is ours, since
the original draws it anew at each call; the benchmark draws its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from snac import SNAC, layers
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from zoo.nn.sampling import normal
from zoo.reference_script import answer, speed

NAME = "transformers 5.23 and snac 1.2.1"
RATE_HZ = 24000
# The last MARKED ids of the vocabulary are special tokens and codes. The others count from the first of
# those, which is 128,000 in the published vocabulary; demos have fewer words.
MARKED = 28_940
BEGIN, PAD, STOP, FIRST = 0, 4, 258, 266
ENDS = (STOP, 1, 9)
BEFORE_TEXT, AFTER_TEXT, AFTER_CODES = (259, BEGIN), (9, 260, 261, 257), (STOP, 262)
CODES, PLACES = 4096, 7
NOISE_SALT = 0x5A4E4143
TEMPERATURE, TOP_P, PENALTY = 0.6, 0.8, 1.3


class Model:
    def __init__(self, directory: Path, dtype: torch.dtype):
        self.lm = LlamaForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa").eval()
        folders = [parent / "snac_24khz" for parent in (directory, directory.parent)]
        codec = next(folder for folder in folders if folder.is_dir())
        self.codec = SNAC(**json.loads((codec / "config.json").read_text()))
        self.codec.load_state_dict(torch.load(codec / "pytorch_model.bin", weights_only=True))
        self.codec.eval()
        self.words = self.lm.config.vocab_size - MARKED
        content = json.loads((directory / "tokenizer.json").read_text())
        self.tokenizer = Tokenizer.from_str(
            json.dumps(content | {"added_tokens": [], "post_processor": None})
        )

        listed = json.loads((directory / "config.json").read_text()).get("voices") or ()
        self.voices = {name.lower(): name for name in listed}

    def prompt(self, request: dict[str, Any]) -> list[int]:
        voice = (request.get("voice") or "default").lower()
        spelled = self.voices.get(voice, voice)
        text = request["text"] if voice == "default" else f"{spelled}: {request['text']}"
        ids: list[int] = []
        for reference in request.get("references", ()):
            clip = np.load(reference["clip"])
            assert int(clip["rate_hz"]) == RATE_HZ, "the plain loop does not resample"
            ids += [*self.human(reference["transcript"]), *self.encode(clip["samples"])]
            ids += self.marked(AFTER_CODES)
        return ids + self.human(text)

    def human(self, text: str) -> list[int]:
        words = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [*self.marked(BEFORE_TEXT), *words, *self.marked(AFTER_TEXT)]

    def marked(self, marks: Sequence[int]) -> list[int]:
        return [self.words + mark for mark in marks]

    @torch.inference_mode()
    def encode(self, samples: np.ndarray) -> list[int]:
        first, second, third = (
            level[0].tolist() for level in self.codec.encode(torch.from_numpy(samples)[None, None])
        )
        ids: list[int] = []
        for i, code in enumerate(first):
            a, b = second[2 * i : 2 * i + 2]
            c, d, e, f = third[4 * i : 4 * i + 4]
            ids += [FIRST + CODES * place + code for place, code in enumerate((code, a, c, d, b, e, f))]
        return self.marked(ids)

    @torch.inference_mode()
    def generate(self, prompt: list[int], frames: int, streams: int, **sampling: Any) -> list[list[int]]:
        ids = torch.tensor([prompt]).repeat(streams, 1)
        written = self.lm.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=PLACES * frames,
            eos_token_id=self.words + STOP,
            pad_token_id=self.words + PAD,
            use_cache=True,
            **sampling,
        )
        return written[:, len(prompt) :].tolist()

    @torch.inference_mode()
    def decode(self, codes: torch.Tensor, seed: int | None) -> torch.Tensor:
        """codes [F, 7] -> samples [N]. seed: of our noise; None: snac draws it."""
        if not len(codes):
            return torch.zeros(0)
        levels = [codes[:, :1], codes[:, [1, 4]], codes[:, [2, 3, 5, 6]]]
        if seed is not None:
            give_noise(self.codec, len(codes), seed)
        return self.codec.decode([level.reshape(1, -1) for level in levels])[0, 0]


def frames_of(tokens: list[int], words: int) -> torch.Tensor:
    """Read the whole frames out of the tokens of a speech. [F, 7]

    A token for the first place begins a frame wherever it comes. Any other token out of place drops the frame
    that was begun.
    """
    frames: list[list[int]] = []
    begun: list[int] = []
    for token in tokens:
        mark = token - words
        if mark in ENDS:
            break
        place, code = divmod(mark - FIRST, CODES)
        if place == len(begun):
            begun.append(code)
        else:
            begun = [code] if place == 0 else []
        if len(begun) == PLACES:
            frames.append(begun)
            begun = []
    return torch.tensor(frames, dtype=torch.int64).view(-1, PLACES)


def give_noise(codec: SNAC, frames: int, seed: int) -> None:
    """The noise blocks take the draws that our decoder takes, whose order is by frame, then by block."""
    blocks = [module for module in codec.decoder.modules() if isinstance(module, layers.NoiseBlock)]
    widths, rate = [], 4
    for stride in codec.decoder_rates:
        rate *= stride
        widths.append(rate)
    at = torch.arange(frames)
    draws = normal(torch.full((frames,), seed ^ NOISE_SALT), at, sum(widths)).split(widths, -1)
    for block, draw in zip(blocks, draws, strict=True):
        noise = draw.reshape(1, 1, -1)
        block.forward = lambda x, noise=noise, linear=block.linear: x + noise.to(x.dtype) * linear(x)


def speak(model: Model, request: dict[str, Any]) -> np.ndarray:
    """A greedy request -> its samples [N]."""
    penalty = request["options"].get("repetition_penalty", PENALTY)
    [tokens] = model.generate(
        model.prompt(request), request["max_frames"], 1, do_sample=False, repetition_penalty=penalty
    )
    return model.decode(frames_of(tokens, model.words), request.get("seed", 0)).numpy()


def measure(model: Model, request: dict[str, Any], streams: int, rounds: int) -> dict[str, float]:
    """The stop token is suppressed, since the length of a benchmark is fixed."""
    prompt = model.prompt(request)
    sampling = {
        "do_sample": True,
        "temperature": TEMPERATURE,
        "top_k": 0,
        "top_p": TOP_P,
        "repetition_penalty": PENALTY,
        "suppress_tokens": [model.words + STOP],
    }
    model.generate(prompt, 1, streams, **sampling)
    began_s, samples = time.perf_counter(), 0
    for _ in range(rounds):
        for tokens in model.generate(prompt, request["max_frames"], streams, **sampling):
            samples += len(model.decode(frames_of(tokens, model.words), None))
    return speed(streams, time.perf_counter() - began_s, samples / RATE_HZ)


def main() -> None:
    order = json.loads(sys.argv[1])
    model = Model(Path(order["directory"]), getattr(torch, order.get("dtype", "float32")))
    print(json.dumps(answer(order, NAME, partial(speak, model), partial(measure, model))))


if __name__ == "__main__":
    main()
