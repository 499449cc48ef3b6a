"""The reference implementation of VoxCPM2, in the environment of `make fixtures`: on the work of `zoo bench --against reference`, or with
the requests of `zoo parity`, whose samples it writes to a file.

It speaks one text at a time: `streams` texts come one after the other.
"""

import importlib.machinery
import json
import sys
import tempfile
import time
import types
from pathlib import Path
from unittest.mock import patch

import numpy as np
import soundfile
import torch
import transformers  # noqa: F401  (before the stub below, for it looks for torchaudio's version)

sys.modules["torchaudio"] = types.ModuleType("torchaudio")  # no release fits this torch, and only a loader of the first generation uses it
sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)

from voxcpm.model.voxcpm import VoxCPMModel  # noqa: E402
from voxcpm.model.voxcpm2 import VoxCPM2Model  # noqa: E402

NAME = "voxcpm 2.0.3"


def main() -> None:
    order = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as place:
        model = load(Path(order["directory"]), Path(place), order.get("dtype", "float32"))
        if "requests" in order:
            np.savez(order["out"], **{name: one(model, request, Path(place)) for name, request in order["requests"].items()})
            print(json.dumps({"name": NAME}))
            return
        runs = [measure(model, order, streams) for streams in order["streams"]]
    print(json.dumps({"name": NAME, "torch": torch.__version__, "threads": torch.get_num_threads(), "runs": runs}))


def load(directory: Path, place: Path, dtype: str) -> VoxCPM2Model:
    """The reference takes the dtype from the config, so it gets a directory of links with a config of its own."""
    for file in directory.iterdir():
        (place / file.name).symlink_to(file)
    config = json.loads((directory / "config.json").read_text()) | {"dtype": dtype}
    (place / "config.json").unlink()
    (place / "config.json").write_text(json.dumps(config))
    kind = VoxCPMModel if config.get("architecture", "voxcpm") == "voxcpm" else VoxCPM2Model
    return kind.from_local(str(place), optimize=torch.cuda.is_available())


def measure(model: VoxCPM2Model, order: dict, streams: int) -> dict:
    rate, frames = model.sample_rate, order["frames"]
    speak(model, order["text"], min(frames, 2))
    began, samples = time.perf_counter(), 0
    for _ in range(order["rounds"] * streams):
        samples += speak(model, order["text"], frames)
    wall, audio = time.perf_counter() - began, samples / rate
    return {"streams": streams, "audio_s": audio, "wall_s": wall, "rtf": wall * streams / audio, "audio_s_per_s": audio / wall}


@torch.inference_mode()
def speak(model: VoxCPM2Model, text: str, frames: int) -> int:
    """-> samples. min_len keeps the stop head from ending it: `frames` patches are made."""
    return model.generate(target_text=text, min_len=frames, max_len=frames).shape[-1]


@torch.inference_mode()
def one(model: VoxCPM2Model, request: dict, place: Path) -> np.ndarray:
    """A request with its noise -> its samples [N]."""
    given = iter(torch.from_numpy(np.load(request["noise"])).mT[:, None])  # one [1, D, P] after the other
    cache = None
    if "reference" in request:
        clip = np.load(request["reference"])
        soundfile.write(place / "clip.wav", clip["samples"], int(clip["rate_hz"]), subtype="FLOAT")
        cache = model.build_prompt_cache(prompt_text=request["reference_text"], prompt_wav_path=str(place / "clip.wav"))
    text = (f"({request['instructions']})" if "instructions" in request else "") + request["text"]
    with patch("voxcpm.modules.locdit.unified_cfm.torch.randn", lambda *args, **kwargs: next(given)):
        samples, _, patches = model.generate_with_prompt_cache(text, cache, max_len=request["max_frames"])
    if cache is not None:  # the reference warms its decoder up over three patches alone
        heard = torch.cat((cache["audio_feat"], patches))
        whole = model.audio_vae.decode(heard.flatten(0, 1).T[None].float())[0]
        samples = whole[:, len(cache["audio_feat"]) * (whole.shape[-1] // len(heard)) :]
    return samples.flatten().float().cpu().numpy()


main()
