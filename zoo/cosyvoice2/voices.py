"""Voices: the content of one, the voices in a model directory, and the flow's past after a prompt.

    codes of the prompt   | chunk | chunk | ... | rest, 3 .. 27 |
    read by the flow      | once per voice      | with the first stretch of the speech

The rest is not cached because its chunk sees the first codes of the speech.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.checkpoint.tensor_files import read_pickle
from zoo.cosyvoice2.config import Config
from zoo.cosyvoice2.flow import Flow, FlowCache
from zoo.nn.keys import prefix_key
from zoo.nn.s3.sizes import GRID, LOOKAHEAD, MELS, TOKEN_FRAMES
from zoo.nn.s3.stretch import Stretch
from zoo.voices.encoded_files import Encoded

VOICES_FILE = "spk2info.pt"
MAX_PROMPT = 250  # the flow reads only the last 250 codes of a prompt: 10 s
MAX_REST = GRID + LOOKAHEAD - 1


@dataclass(frozen=True)
class Voice(Encoded):
    """A recording as the model reads it. Without codes it gives only the speaker vector."""

    name: bytes  # equal for equal recordings
    codes: Tensor  # [P] int64
    mel: Tensor  # [2P, MELS] fp32
    speaker: Tensor  # [D] fp32
    transcript: tuple[int, ...] = ()  # text ids; empty if not known


@dataclass(frozen=True)
class FlowPrompt:
    """A voice as the flow reads it: num_cached codes are in its cache, the rest comes with the speech."""

    key: int  # equal for equal recordings
    num_codes: int
    num_cached: int
    rest: Tensor  # [R] int64
    rest_mel: Tensor  # [2R, MELS]
    speaker: Tensor
    cache: FlowCache | None

    @property
    def num_bytes(self) -> int:
        return self.rest_mel.nbytes + (0 if self.cache is None else self.cache.num_bytes)


@torch.inference_mode()
def flow_prompt(flow: Flow, voice: Voice) -> FlowPrompt:
    """Run the flow over the whole chunks of a voice's codes and return its cache and the remaining codes."""
    codes, mel = voice.codes[-MAX_PROMPT:], voice.mel[-TOKEN_FRAMES * MAX_PROMPT :]
    num = max(0, len(codes) - LOOKAHEAD) // GRID * GRID
    cache = None
    if num:
        cache = FlowCache(flow, 1, num + GRID)
        one = torch.ones(1, dtype=torch.int64, device=codes.device)
        stretch = Stretch(0 * one, 0 * one, num * one, num * one, num, cache.capacity)
        there = (num + LOOKAHEAD) * one
        flow(
            codes[None, : num + LOOKAHEAD],
            there,
            mel[None, : TOKEN_FRAMES * num],
            voice.speaker[None],
            stretch,
            cache,
        )
    rest_mel = mel[TOKEN_FRAMES * num :]
    return FlowPrompt(prefix_key(voice.name), len(codes), num, codes[num:], rest_mel, voice.speaker, cache)


def read_voices(directory: Path, config: Config, device: torch.device) -> dict[str, Voice]:
    """Return the voices in a directory's spk2info.pt by lower-case name, or none without that file.

    Raises ValueError. Source: FunAudioLLM/CosyVoice, cosyvoice/cli/cosyvoice.py, add_zero_shot_spk;
    frontend.py for the names of its keys. The voices of fine-tuned models have only the embedding.
    """
    path = directory / VOICES_FILE
    if not path.exists():
        return {}
    found = read_pickle(path)
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{path} does not hold voices by name")
    return {
        str(name).lower(): _voice(path, str(name), entry, config, device) for name, entry in found.items()
    }


def _voice(path: Path, name: str, entry: Any, config: Config, device: torch.device) -> Voice:
    def tensor(key: str, shape: tuple[int, ...]) -> Tensor:
        """Return the only row of the tensor [1, *shape] under a key of the entry. -1 in shape: any number."""
        value = entry.get(key)
        fits = isinstance(value, Tensor) and value.dim() == 1 + len(shape) and len(value) == 1
        if not fits or any(
            size not in (-1, given) for size, given in zip(shape, value.shape[1:], strict=True)
        ):
            came = f"{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{path}: {name!r} has {key} {came}; a tensor {[1, *shape]} is needed")
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(f"{path}: {name!r} has {key} with NaN or infinity; values must be finite")
        return value[0]

    if not isinstance(entry, dict):
        raise ValueError(f"{path}: {name!r} is a {type(entry).__name__}; a dict of tensors is needed")
    identity = f"{VOICES_FILE}:{name}".encode()
    speaker = tensor(
        "flow_embedding" if "flow_embedding" in entry else "embedding", (config.flow.speaker,)
    ).float()
    if "flow_prompt_speech_token" not in entry:
        return Voice(
            identity,
            torch.zeros(0, dtype=torch.int64, device=device),
            torch.zeros(0, MELS, device=device),
            speaker.to(device),
        )
    codes, mel = (
        tensor("flow_prompt_speech_token", (-1,)).long(),
        tensor("prompt_speech_feat", (-1, MELS)).float(),
    )
    transcript = tensor("prompt_text", (-1,)).long()
    for key, ids, rows in (
        ("flow_prompt_speech_token", codes, config.flow.num_codes),
        ("prompt_text", transcript, config.lm.text_vocab),
    ):
        if ids.numel() and not 0 <= ids.min() <= ids.max() < rows:
            came = f"{int(ids.min())} to {int(ids.max())}"
            raise ValueError(f"{path}: {name!r} has {key} from {came}; 0 to {rows - 1} are possible")
    num = min(len(codes), len(mel) // TOKEN_FRAMES)
    codes, mel = codes[:num].to(device), mel[: TOKEN_FRAMES * num].to(device)
    return Voice(identity, codes, mel, speaker.to(device), tuple(transcript.tolist()))
