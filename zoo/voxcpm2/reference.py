"""Run the reference implementation, voxcpm 2.0.3, for `zoo bench --against reference` and `zoo parity`.

serving/tools/reference.py starts this file as a script, in a separate environment that tests/parity/remake.sh
builds. The reference generates one text at a time, so `streams` texts run one after the other.
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
import transformers  # noqa: F401  (before the stub below, because it looks up torchaudio's version)

from zoo.reference_script import answer, speed

NAME = "voxcpm 2.0.3"


def read_wav(path: str) -> tuple[torch.Tensor, int]:
    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    return torch.from_numpy(samples.T.copy()), rate_hz


def load(directory: Path, place: Path, dtype: str) -> Any:
    """Return the reference's model, of either generation.

    The reference reads the dtype from the config, so `place` becomes a directory of links with an edited
    config. No release of torchaudio fits this torch; it is replaced by a stub with `load`, all that the first
    generation uses.
    """
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
    """Generate one request with the reference and return samples [N]."""
    options, names = request["options"], {"cfg_scale": "cfg_value", "solver_steps": "inference_timesteps"}
    how = {names[name]: value for name, value in options.items() if name in names}
    text = (f"({request['instructions']})" if request["instructions"] else "") + request["text"]
    cache = prompt_cache(model, request, place)
    how |= {"min_len": min_frames, "max_len": request["max_frames"]}
    samples, _, patches = model.generate_with_prompt_cache(text, cache, **how)
    # the reference warms its decoder up over only three patches
    if cache is not None and "audio_feat" in cache:
        heard = torch.cat((cache["audio_feat"], patches))
        whole = model.audio_vae.decode(heard.flatten(0, 1).T[None].float())[0]
        samples = whole[:, len(cache["audio_feat"]) * (whole.shape[-1] // len(heard)) :]
    return samples.flatten().float().cpu().numpy()


def prompt_cache(model: Any, request: dict[str, Any], place: Path) -> Any:
    """Return the prompt cache: a clip with a transcript is continued, another gives only its voice."""
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
    """Generate one request from given noise [F, P, D] instead of random noise, and return samples [N]."""
    given: Iterator[torch.Tensor] = iter(torch.from_numpy(noise).mT[:, None])  # of [1, D, P] each
    with patch("voxcpm.modules.locdit.unified_cfm.torch.randn", lambda *args, **kwargs: next(given)):
        return speak(model, request, place)


def measure(model: Any, request: dict[str, Any], place: Path, streams: int, rounds: int) -> dict[str, float]:
    """Time the reference. A minimum length keeps the stop head from ending a text early."""
    frames = request["max_frames"]
    speak(model, request | {"max_frames": min(frames, 2)}, place)
    began_s, samples = time.perf_counter(), 0
    for _ in range(rounds * streams):
        samples += len(speak(model, request, place, min_frames=frames))
    return speed(streams, time.perf_counter() - began_s, samples / model.sample_rate)


def main() -> None:
    order = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        model = load(Path(order["directory"]), place, order.get("dtype", "float32"))

        def spoken(request: dict[str, Any]) -> np.ndarray:
            return speak_from(model, request, place, np.load(order["noise"]))

        def measured(request: dict[str, Any], streams: int, rounds: int) -> dict[str, float]:
            return measure(model, request, place, streams, rounds)

        print(json.dumps(answer(order, NAME, spoken, measured)))


if __name__ == "__main__":
    main()
