"""What the parity tests share: the requests and the noise of fixtures, the rows of manifests, and how Qwen3-TTS is
compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields as fields_of
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from zoo.checkpoint import synthetic
from zoo.contract import KV, Batch
from zoo.qwen3_tts import model
from zoo.request import AudioClip, Reference, Request

CLOSE = {"rtol": 0, "atol": 1e-4}
FIELDS = frozenset(field.name for field in fields_of(Request))


def rows(shapes: Mapping[str, Iterable[int]], dtype: str = "F32") -> list[str]:
    """Return the rows of a manifest: name, dtype and shape of each tensor."""
    return sorted(f"{name}|{dtype}|{'x'.join(map(str, shape))}" for name, shape in shapes.items())


@cache
def noise(name: str, *shape: int, deviation: float = 1.0) -> Tensor:
    """Return the noise of that name, which the oracles compute too."""
    rule = ("noise", 0.0, deviation, False)
    return torch.from_numpy(synthetic.fill(f"noise {name}", shape, "parity", [rule]))


def one_page(kv: KV, length: int) -> Batch:
    """Return a launch of one sequence in bf16, whose `length` positions are new and lie in one page."""
    at = torch.arange(length)
    return Batch(
        slots=torch.tensor([0]),
        positions=at,
        kv_write_index=at,
        page_table=torch.tensor([[0]]),
        kv_lens=torch.tensor([length]),
        cu_seqlens=torch.tensor([0, length]),
        kv=torch.zeros(2 * kv.num_layers * 16, kv.num_heads, kv.head_dim, dtype=torch.bfloat16),
        page=torch.arange(16),
        is_audio=torch.zeros(length, dtype=torch.bool),
    )


def request_of(asked: dict[str, Any], clip: AudioClip | None = None) -> Request:
    """Return the greedy request of a fixture. asked: fields of Request, a reference's transcript, and
    options.

    clip: the audio of its reference.
    """
    asked = {name: value for name, value in asked.items() if name != "reference"}
    transcript = asked.pop("transcript", None)
    fields = {name: value for name, value in asked.items() if name in FIELDS}
    options = {name: value for name, value in asked.items() if name not in FIELDS}
    references = () if clip is None else (Reference(clip, transcript),)
    return Request(temperature=0.0, references=references, options=options, **fields)


def check_prompt(ours: model.Qwen3TTS, asked: Request, found: dict[str, Tensor], atol: float) -> None:
    """Check the talker's prompt and the text rows that follow it."""
    prompt = ours.prompt(asked)
    torch.testing.assert_close(prompt.inputs, found["inputs"], rtol=0, atol=atol)
    trailing = prompt.slot["text"]
    if not len(trailing):
        # the reference adds it to every frame in text_mode full
        trailing = torch.tensor([ours.config.tts_pad])
    torch.testing.assert_close(ours.talker.text(trailing), found["trailing"], rtol=0, atol=1e-6)


def check_speech(
    ours: model.Qwen3TTS,
    asked: Request,
    facts: dict,
    found: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check codes exactly, and the talker's hidden states, all logits and the samples to 1e-4."""
    heads: list[tuple[Tensor, Tensor]] = []
    drawn: list[Tensor] = []

    def draw(logits: Tensor, *args, **kwargs) -> Tensor:
        drawn.append(logits[0])
        return real(logits, *args, **kwargs)

    real = model.draw
    monkeypatch.setattr(model, "draw", draw)
    hook = ours.talker.codec_head.register_forward_hook(
        lambda module, args, out: heads.append((args[0][0], out[0]))
    )
    speech = zoo.generate(ours, asked)
    hook.remove()

    frames, steps, useful = facts["frames"], facts["steps"], ours.config.control.eos + 1
    assert speech.frames.tolist() == found["codes"].tolist()
    assert len(heads) == frames + (facts["stop"] == "end")
    hidden, logits = (torch.stack(values) for values in zip(*heads, strict=True))
    first, depth = drawn[::16], [torch.stack(drawn[i + 1 : i + 16]) for i in range(0, len(drawn), 16)]
    torch.testing.assert_close(hidden[:frames], found["hidden"], **CLOSE)
    torch.testing.assert_close(logits[steps, :useful], found["logits"], **CLOSE)
    scores = torch.stack(first)[steps]
    torch.testing.assert_close(scores[:, :useful], found["scores"], **CLOSE)
    assert (scores[:, useful:] == -torch.inf).all()
    kept = [step for step in (0, 2, 31) if step < frames]
    torch.testing.assert_close(torch.stack([depth[step] for step in kept]), found["depth_logits"], **CLOSE)

    assert len(speech.samples) == 1920 * frames and speech.sample_rate_hz == 24000
    early = facts.get("early", 0)  # the reference may leave a sample of the clip
    at = torch.arange(0, 1920 * frames + early, facts["stride"]) - early
    inside = at >= 0
    torch.testing.assert_close(speech.samples[at[inside]], found["samples"][inside], **CLOSE)
