"""The reference implementation of Qwen3-TTS, in the environment of `make fixtures`: on the work of `zoo bench --against reference`, or with
the requests of `zoo parity`, whose samples it writes to a file.

It has no server and no streaming: `streams` texts are one static batch, and first audio is all audio.
"""

import importlib.machinery
import json
import sys
import time
import types

import numpy as np
import torch

for absent in ("sox", "onnxruntime", "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi"):  # only 25 Hz code uses them
    sys.modules[absent] = types.ModuleType(absent)
    sys.modules[absent].__spec__ = importlib.machinery.ModuleSpec(absent, None)

from qwen_tts import Qwen3TTSModel  # noqa: E402

NAME = "qwen-tts 0.1.1"


def main() -> None:
    order = json.loads(sys.argv[1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, order.get("dtype", "float32"))
    model = Qwen3TTSModel.from_pretrained(order["directory"], dtype=dtype, device_map=device)
    if "requests" in order:
        np.savez(order["out"], **{name: one(model, request) for name, request in order["requests"].items()})
        print(json.dumps({"name": NAME}))
        return
    runs = []
    for streams in order["streams"]:
        speak(model, order, streams, 4)
        began, samples = time.perf_counter(), 0
        for _ in range(order["rounds"]):
            samples += speak(model, order, streams, order["frames"])
        wall, audio = time.perf_counter() - began, samples / 24000
        runs.append({"streams": streams, "audio_s": audio, "wall_s": wall, "rtf": wall * streams / audio, "audio_s_per_s": audio / wall})
    print(json.dumps({"name": NAME, "torch": torch.__version__, "threads": torch.get_num_threads(), "runs": runs}))


def speak(model: Qwen3TTSModel, order: dict, streams: int, frames: int) -> int:
    """-> samples in all."""
    waves, _ = model.generate_custom_voice(
        text=[order["text"]] * streams, speaker=[order["voice"]] * streams, language=["auto"] * streams, max_new_tokens=frames + 1
    )
    return sum(len(wave) for wave in waves)


def one(model: Qwen3TTSModel, request: dict) -> np.ndarray:
    """A greedy request -> its samples [N]."""
    how = {"text": request["text"], "language": "auto", "max_new_tokens": request["max_frames"] + 1}
    how |= {"do_sample": False, "subtalker_dosample": False}
    if "reference" in request:
        clip = np.load(request["reference"])
        waves, _ = model.generate_voice_clone(**how, ref_audio=(clip["samples"], int(clip["rate_hz"])), ref_text=request["reference_text"])
    elif "instructions" in request:
        waves, _ = model.generate_voice_design(**how, instruct=request["instructions"])
    else:
        waves, _ = model.generate_custom_voice(**how, speaker=request["voice"])
    return waves[0]


main()
