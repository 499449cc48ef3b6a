"""What a greedy request must agree in with the reference's fixture, whatever kind of voice it asks for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zoo
from zoo.contract import Request
from zoo.qwen3_tts import model

CLOSE = {"rtol": 0, "atol": 1e-4}


def check_prompt(ours: model.Qwen3TTS, asked: Request, found: dict[str, Tensor], atol: float) -> None:
    """What the talker reads before the first frame, and the text rows after it."""
    prompt = ours.prompt(asked)
    torch.testing.assert_close(prompt.inputs, found["inputs"], rtol=0, atol=atol)
    trailing = prompt.slot["text"]
    if not len(trailing):
        trailing = torch.tensor([ours.config.tts_pad])  # what the reference adds for ever in the whole layout
    torch.testing.assert_close(ours.talker.text(trailing), found["trailing"], rtol=0, atol=1e-6)


def check_speech(ours: model.Qwen3TTS, asked: Request, facts: dict, found: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes exactly; the talker's hidden states, all logits and the samples within 1e-4."""
    heads: list[tuple[Tensor, Tensor]] = []
    drawn: list[Tensor] = []

    def draw(logits: Tensor, *args, **kwargs) -> Tensor:
        drawn.append(logits[0])
        return real(logits, *args, **kwargs)

    real = model.draw
    monkeypatch.setattr(model, "draw", draw)
    hook = ours.talker.codec_head.register_forward_hook(lambda module, args, out: heads.append((args[0][0], out[0])))
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
    early = facts.get("early", 0)  # the reference's cut may leave a sample of the clip
    at = torch.arange(0, 1920 * frames + early, facts["stride"]) - early
    inside = at >= 0
    torch.testing.assert_close(speech.samples[at[inside]], found["samples"][inside], **CLOSE)
