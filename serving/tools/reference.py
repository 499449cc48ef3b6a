"""Run a family's reference implementation in an environment of its own: zoo/FAMILY/reference.py, given JSON.

    bench    {"directory", "dtype", "streams": [1, 8], "rounds", "request"}
             ->  {"name", "torch", "threads", "runs": [{"streams", "audio_s", "wall_s", "rtf", "audio_s_per_s"}, ...]}
    parity   {"directory", "requests": {NAME: request}, "out": FILE.npz}, and "noise": FILE.npy [F, *noise] for some
             ->  {"name"}, and in FILE.npz the samples [N] of each NAME

A request has the fields of `zoo.Request` (`fields`, below). The answer is the script's last line.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zoo
from zoo.request import Reference, Request


def script(family: str) -> Path:
    """Raises ValueError where the family has none."""
    path = Path(zoo.__file__).parent / family / "reference.py"
    if not path.exists():
        raise ValueError(f"{family} has no reference implementation to compare with: {path} does not exist")
    return path


def run(family: str, python: str, order: dict[str, Any]) -> dict[str, Any]:
    """python: of the reference's environment. Raises ValueError if it cannot be run."""
    path = script(family)
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [
        python,
        "-P",
        str(path),
        json.dumps(order),
    ]  # -P: the script's folder has modules of usual names
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=env, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"the reference of {family} did not run with {python}: {_why(error)}") from None
    return json.loads(ran.stdout.splitlines()[-1])


def _why(error: OSError | subprocess.CalledProcessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"exit status {error.returncode}"
    return str(error.strerror)


def fields(request: Request, place: Path, name: str) -> dict[str, Any]:
    """A request as JSON; its clips are files in `place`, called after the request's `name`."""
    references = [_reference(one, place / f"{name} {i}.npz") for i, one in enumerate(request.references)]
    return {
        "text": request.text,
        "voice": request.voice,
        "language": request.language,
        "instructions": request.instructions,
        "references": references,
        "temperature": request.temperature,
        "max_frames": request.max_frames,
        "options": request.options,
    }


def _reference(reference: Reference, path: Path) -> dict[str, Any]:
    np.savez(path, samples=reference.clip.samples, rate_hz=reference.clip.sample_rate_hz)
    return {"clip": str(path), "transcript": reference.transcript, "speaker": reference.speaker}
