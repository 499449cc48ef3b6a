"""Runs the reference implementation, qwen-tts 0.1.1, for `zoo bench --against reference` and `zoo parity`.
serving/tools/reference.py starts this script in a separate environment, which tests/parity/remake.sh builds.

The reference has no server and no streaming: `streams` texts form one static batch, and audio arrives only at
the end.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import time
import types
from functools import partial
from typing import Any

import numpy as np
import torch

from zoo.reference_script import answer, speed

NAME = "qwen-tts 0.1.1"
# Modules that only the reference's 25 Hz code uses; empty modules take their place.
ABSENT = ("sox", "onnxruntime", "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")
FRAME_SAMPLES, RATE_HZ = 1920, 24000


def load(directory: str, dtype: str) -> Any:
    """Return a Qwen3TTSModel."""
    for absent in ABSENT:
        sys.modules[absent] = types.ModuleType(absent)
        sys.modules[absent].__spec__ = importlib.machinery.ModuleSpec(absent, None)
    from qwen_tts import Qwen3TTSModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Qwen3TTSModel.from_pretrained(directory, dtype=getattr(torch, dtype), device_map=device)


def speak(model: Any, request: dict[str, Any], streams: int = 1) -> list[np.ndarray]:
    """Run the request `streams` times in one batch. Return the samples [N] of each."""
    options, language = request["options"], request["language"] or "auto"
    how: dict[str, Any] = {"text": [request["text"]] * streams, "language": [language] * streams}
    how["max_new_tokens"] = request["max_frames"] + 1  # the reference counts the end too
    if request["temperature"] == 0:
        how |= {"do_sample": False, "subtalker_dosample": False}
    if "text_mode" in options:
        how["non_streaming_mode"] = options["text_mode"] == "full"
    if request["references"]:
        return clone(model, request, how)
    instructions = [request["instructions"] or ""] * streams
    if request["voice"] is None:
        return model.generate_voice_design(**how, instruct=instructions)[0]
    return model.generate_custom_voice(**how, speaker=[request["voice"]] * streams, instruct=instructions)[0]


def clone(model: Any, request: dict[str, Any], how: dict[str, Any]) -> list[np.ndarray]:
    """Return the samples of cloned speech. The reference cuts the prompt's audio off the front; its division
    can leave one sample too many, which is dropped here."""
    [reference] = request["references"]
    clip = np.load(reference["clip"])
    waves, _ = model.generate_voice_clone(
        **how,
        ref_audio=(clip["samples"], int(clip["rate_hz"])),
        ref_text=reference["transcript"],
        x_vector_only_mode=request["options"].get("x_vector_only_mode", False),
    )
    return [wave[len(wave) % FRAME_SAMPLES :] for wave in waves]


def measure(model: Any, request: dict[str, Any], streams: int, rounds: int) -> dict[str, float]:
    """Return the speed of `rounds` batches of `streams` requests, after a short warm-up."""
    speak(model, request | {"max_frames": 4}, streams)
    began_s, samples = time.perf_counter(), 0
    for _ in range(rounds):
        samples += sum(map(len, speak(model, request, streams)))
    return speed(streams, time.perf_counter() - began_s, samples / RATE_HZ)


def main() -> None:
    order = json.loads(sys.argv[1])
    model = load(order["directory"], order.get("dtype", "float32"))
    print(json.dumps(answer(order, NAME, lambda request: speak(model, request)[0], partial(measure, model))))


if __name__ == "__main__":
    main()
