"""Run a family's reference implementation, zoo/FAMILY/reference.py, in a separate environment. It takes JSON:

    bench    {"directory", "dtype", "streams": [1, 8], "rounds", "request"}
             ->  {"name", "torch", "threads", "runs": [{"streams", "audio_s", "wall_s", "rtf", "audio_s_per_s"}, ...]}
    parity   {"directory", "requests": {NAME: request}, "out": FILE.npz}, for some families "noise": FILE.npy [F, *noise]
             ->  {"name", "texts": {NAME: TEXT}}, the texts of answers that have one, and FILE.npz with the samples [N]
                 of each NAME that speaks

A request has the fields of `zoo.Request` (see `fields`). The last line that the script prints is its answer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zoo
from zoo.request import AudioClip, Reference, Request, Turn


def script(family: str) -> Path:
    """Return the family's reference script. Raises ValueError if it has none."""
    path = Path(zoo.__file__).parent / family / "reference.py"
    if not path.exists():
        raise ValueError(f"{family} has no reference implementation to compare with: {path} does not exist")
    return path


def check(family: str, python: str) -> None:
    """Raise ValueError if the family has no reference script, or if there is no such Python."""
    script(family)
    if shutil.which(python) is None:
        raise ValueError(
            f"the reference of {family} needs {python}, which does not exist; `make fixtures` builds it in a "
            "source tree"
        )


def run(family: str, python: str, order: dict[str, Any]) -> dict[str, Any]:
    """Run the script with this Python and return its answer. Raises ValueError if it fails."""
    path = script(family)
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    # -P keeps the script's folder off the import path; its modules have names that would shadow others.
    command = [python, "-P", str(path), json.dumps(order)]
    try:
        ran = subprocess.run(command, capture_output=True, check=True, env=env, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"the reference of {family} failed with {python}: {_why(error)}") from None
    return json.loads(ran.stdout.splitlines()[-1])


def _why(error: OSError | subprocess.CalledProcessError) -> str:
    if isinstance(error, OSError):
        return str(error.strerror)
    told = error.stderr.strip().splitlines()
    return told[-1] if told else f"exit status {error.returncode}"


def fields(request: Request, place: Path, name: str) -> dict[str, Any]:
    """Return a request as JSON. Its clips become files in `place`, named after the request."""
    references = [_reference(one, place / f"{name} {i}.npz") for i, one in enumerate(request.references)]
    turns = [_turn(one, place / f"{name} turn {i}.npz") for i, one in enumerate(request.turns)]
    return {
        "turns": turns,
        "output": request.output,
        "text": request.text,
        "voice": request.voice,
        "language": request.language,
        "instructions": request.instructions,
        "references": references,
        "temperature": request.temperature,
        "max_frames": request.max_frames,
        "options": request.options,
    }


def _turn(turn: Turn, path: Path) -> dict[str, Any]:
    clip = None if turn.clip is None else _clip(turn.clip, path)
    return {"role": turn.role, "text": turn.text, "clip": clip}


def _clip(clip: AudioClip, path: Path) -> str:
    np.savez(path, samples=clip.samples, rate_hz=clip.sample_rate_hz)
    return str(path)


def _reference(reference: Reference, path: Path) -> dict[str, Any]:
    return {
        "clip": _clip(reference.clip, path),
        "transcript": reference.transcript,
        "speaker": reference.speaker,
    }
