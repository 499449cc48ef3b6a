"""The reference implementation of VoxCPM2, voxcpm 2.0.3, as serving/tools/reference.py orders it: for `zoo
bench --against reference` and `zoo parity`. It runs as a script in an environment of its own, which
tests/parity/remake.sh builds.

It speaks one text at a time: `streams` texts come one after the other.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import soundfile
import torch
import transformers  # noqa: F401  (before the stub below, for it looks for torchaudio's version)

NAME = "voxcpm 2.0.3"


def read_wav(path: str) -> tuple[torch.Tensor, int]:
    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    return torch.from_numpy(samples.T.copy()), rate_hz


def load(directory: Path, place: Path, dtype: str) -> Any:
    """-> a VoxCPMModel of either generation. It takes the dtype from the config, so it gets a directory of
    links, in `place`, with a config of its own. Of torchaudio, of which no release fits this torch, the first
    generation uses `load` alone."""
    torchaudio = types.ModuleType("torchaudio")
    torchaudio.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    vars(torchaudio)["load"] = read_wav
    sys.modules["torchaudio"] = torchaudio
    from voxcpm.model.voxcpm import VoxCPMModel
    from voxcpm.model.voxcpm2 import VoxCPM2Model

    for file in directory.iterdir():
        (place / file.name).symlink_to(file)
    config = json.loads((directory / "config.json").read_text()) | {"dtype": dtype}
    (place / "config.json").unlink()
    (place / "config.json").write_text(json.dumps(config))
    kind = VoxCPMModel if config.get("architecture", "voxcpm") == "voxcpm" else VoxCPM2Model
    return kind.from_local(str(place), optimize=torch.cuda.is_available())


@torch.inference_mode()
def speak(model: Any, request: dict[str, Any], place: Path, min_frames: int = 2) -> np.ndarray:
    """-> samples [N]"""
    options, names = request["options"], {"cfg_scale": "cfg_value", "solver_steps": "inference_timesteps"}
    how = {names[name]: value for name, value in options.items() if name in names}
    text = (f"({request['instructions']})" if request["instructions"] else "") + request["text"]
    cache = prompt_cache(model, request, place)
    how |= {"min_len": min_frames, "max_len": request["max_frames"]}
    samples, _, patches = model.generate_with_prompt_cache(text, cache, **how)
    if cache is not None and "audio_feat" in cache:  # its decoder is warmed up over three patches alone
        heard = torch.cat((cache["audio_feat"], patches))
        whole = model.audio_vae.decode(heard.flatten(0, 1).T[None].float())[0]
        samples = whole[:, len(cache["audio_feat"]) * (whole.shape[-1] // len(heard)) :]
    return samples.flatten().float().cpu().numpy()


def prompt_cache(model: Any, request: dict[str, Any], place: Path) -> Any:
    """What the model keeps of the reference: speech goes on from one whose words are given; of others it
    takes the sound."""
    given: dict[str, str] = {}
    for i, reference in enumerate(request["references"]):
        clip, wav = np.load(reference["clip"]), str(place / f"clip-{i}.wav")
        soundfile.write(wav, clip["samples"], int(clip["rate_hz"]), subtype="FLOAT")
        if reference["transcript"] and not request["options"].get("x_vector_only_mode"):
            given |= {"prompt_text": reference["transcript"], "prompt_wav_path": wav}
        else:
            given["reference_wav_path"] = wav
    return model.build_prompt_cache(**given) if given else None


def speak_from(model: Any, request: dict[str, Any], place: Path, noise: np.ndarray) -> np.ndarray:
    """noise [F, P, D], which takes the place of what is drawn -> samples [N]"""
    given: Iterator[torch.Tensor] = iter(torch.from_numpy(noise).mT[:, None])  # one [1, D, P] after the other
    with patch("voxcpm.modules.locdit.unified_cfm.torch.randn", lambda *args, **kwargs: next(given)):
        return speak(model, request, place)


def measure(model: Any, request: dict[str, Any], place: Path, streams: int, rounds: int) -> dict[str, float]:
    """The stop head is kept from ending a text before its time: all of its frames are made."""
    frames = request["max_frames"]
    speak(model, request | {"max_frames": min(frames, 2)}, place)
    began_s, samples = time.perf_counter(), 0
    for _ in range(rounds * streams):
        samples += len(speak(model, request, place, min_frames=frames))
    wall_s, audio_s = time.perf_counter() - began_s, samples / model.sample_rate
    speed = {"rtf": wall_s * streams / audio_s, "audio_s_per_s": audio_s / wall_s}
    return {"streams": streams, "audio_s": audio_s, "wall_s": wall_s} | speed


def answer(order: dict[str, Any], place: Path) -> dict[str, Any]:
    model = load(Path(order["directory"]), place, order.get("dtype", "float32"))
    if "requests" in order:
        noise, requests = np.load(order["noise"]), order["requests"].items()
        spoken: dict[str, Any] = {
            name: speak_from(model, request, place, noise) for name, request in requests
        }
        np.savez(order["out"], **spoken)
        return {"name": NAME}
    runs = [measure(model, order["request"], place, streams, order["rounds"]) for streams in order["streams"]]
    facts = {"name": NAME, "torch": torch.__version__, "threads": torch.get_num_threads()}
    return facts | {"runs": runs}


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(answer(json.loads(sys.argv[1]), Path(place))))


if __name__ == "__main__":
    main()
