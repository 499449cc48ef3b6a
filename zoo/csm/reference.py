"""CSM as a plain loop around transformers' CsmForConditionalGeneration, called as serving/tools/reference.py
describes, for `zoo bench --against reference` and `zoo parity`. It runs as a script in a separate
environment, which tests/parity/environments.sh builds.

The original implementation needs torchtune, torchao and moshi; it was only read. `streams` requests are one
static batch, and the codec decodes each at the end.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import CsmForConditionalGeneration

from zoo.csm.clone import REFERENCE_S
from zoo.csm.voices import RANDOM, read
from zoo.voices.references import mono_by_sinc

NAME = "transformers 5.23"
RATE_HZ = 24000
BEGIN, END, AUDIO, AUDIO_END = "<|begin_of_text|>", "<|end_of_text|>", "<|AUDIO|>", "<|audio_eos|>"


class Model:
    def __init__(self, directory: Path, dtype: torch.dtype):
        self.csm = CsmForConditionalGeneration.from_pretrained(directory, dtype=dtype).eval()
        self.csm.codec_model.float()
        config = self.csm.config.codec_config
        self.last_code = config.codebook_size - 1
        self.frame_samples = config.frame_size
        content = json.loads((directory / "tokenizer.json").read_text())
        self.special = {token["content"]: token["id"] for token in content["added_tokens"]}
        plain = content | {"added_tokens": [], "post_processor": None}
        self.tokenizer = Tokenizer.from_str(json.dumps(plain))
        self.voices = read(directory)

    def inputs(self, request: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the inputs of `generate`: ids [1, T], and the joined clips with their ends."""
        ids: list[int] = []
        clips: list[np.ndarray] = []
        for speaker, words, samples in self.segments(request):
            clips.append(np.pad(samples, (0, -len(samples) % self.frame_samples)))
            ids += self.text(speaker, words)
            frames = len(clips[-1]) // self.frame_samples
            ids += [self.special[AUDIO]] * frames + [self.special[AUDIO_END]]
        ids += self.text(request["options"].get("speaker", 0), request["text"])
        found = {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
        }
        if clips:
            found["input_values"] = torch.from_numpy(np.concatenate(clips))[None, None]
            found["input_values_cutoffs"] = torch.tensor([np.cumsum([len(clip) for clip in clips]).tolist()])
        return found

    def segments(self, request: dict[str, Any]) -> Iterator[tuple[int, str, np.ndarray]]:
        """Yield speaker, words and samples [N] of the voice's recording, or else of each reference."""
        voice = self.voices.get((request.get("voice") or RANDOM).lower())
        if voice is not None:
            samples = mono_by_sinc(voice.clip, RATE_HZ, REFERENCE_S).numpy()
            yield request["options"].get("speaker", 0), voice.transcript or "", samples
        for reference in request.get("references", ()):
            clip = np.load(reference["clip"])
            assert int(clip["rate_hz"]) == RATE_HZ, "the plain loop does not resample"
            samples = clip["samples"].astype(np.float32)
            yield int(reference["speaker"] or 0), reference["transcript"], samples

    def text(self, speaker: int, text: str) -> list[int]:
        words = self.tokenizer.encode(f"[{speaker}]{text}", add_special_tokens=False).ids
        return [self.special[BEGIN], *words, self.special[END]]

    @torch.inference_mode()
    def generate(self, inputs: dict[str, torch.Tensor], frames: int, is_greedy: bool) -> torch.Tensor:
        """Return codes [B, F, K], the frame that stopped it included."""
        draws = {"do_sample": not is_greedy, "depth_decoder_do_sample": not is_greedy}
        return self.csm.generate(**inputs, **draws, max_new_tokens=frames)

    @torch.inference_mode()
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the samples [N] of codes [F, K]. Codes that the codec does not have become its last one."""
        if not len(codes):
            return torch.zeros(0)
        codes = codes.clamp(max=self.last_code)
        return self.csm.codec_model.decode(codes.T[None]).audio_values[0, 0]


def spoken(codes: torch.Tensor) -> torch.Tensor:
    """Return the frames [F, K] before the first one of zeros."""
    zeros = (codes == 0).all(1).nonzero()
    return codes[: int(zeros[0])] if len(zeros) else codes


def speak(model: Model, request: dict[str, Any]) -> np.ndarray:
    """Return the samples [N] of a greedy request."""
    [codes] = model.generate(model.inputs(request), request["max_frames"], is_greedy=True)
    return model.decode(spoken(codes)).numpy()


def measure(model: Model, request: dict[str, Any], streams: int, rounds: int) -> dict[str, float]:
    """Measure with a fixed length: no frame stops a speech."""
    model.csm.config.codebook_eos_token_id = -1
    inputs = {
        name: value.repeat(streams, *[1] * (value.dim() - 1)) for name, value in model.inputs(request).items()
    }
    model.generate(inputs, 1, is_greedy=False)
    began_s, samples = time.perf_counter(), 0
    for _ in range(rounds):
        for codes in model.generate(inputs, request["max_frames"], is_greedy=False):
            samples += len(model.decode(codes))
    wall_s, audio_s = time.perf_counter() - began_s, samples / RATE_HZ
    speed = {"rtf": wall_s * streams / audio_s, "audio_s_per_s": audio_s / wall_s}
    return {"streams": streams, "audio_s": audio_s, "wall_s": wall_s} | speed


def main() -> None:
    order = json.loads(sys.argv[1])
    model = Model(Path(order["directory"]), getattr(torch, order.get("dtype", "float32")))
    if "requests" in order:
        samples: dict[str, Any] = {name: speak(model, request) for name, request in order["requests"].items()}
        np.savez(order["out"], **samples)
        print(json.dumps({"name": NAME}))
        return
    runs = [measure(model, order["request"], streams, order["rounds"]) for streams in order["streams"]]
    facts = {"name": NAME, "torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps(facts | {"runs": runs}))


if __name__ == "__main__":
    main()
