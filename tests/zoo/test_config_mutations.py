"""Replace every value in every family's JSON files by wrong ones: the model speaks, or a one-line error names
the fault."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import directory
from mutations import FILES, content, mutations, new_places, sizes

import zoo
from zoo.contract import Spec
from zoo.request import AudioClip, Reference, Request

pytestmark = pytest.mark.slow

WITHOUT_JSON = ("chatterbox", "cosyvoice2")
MAX_MESSAGE = 2000  # characters; an error about shapes names eight tensors
SHARE = 3  # each value is replaced by a third of the wrong ones, the next value by another third; 1 tries all
LIMIT_S = 20.0  # tens of milliseconds are usual; a loop over 10**9 items would never end
CLIP = AudioClip(np.sin(np.arange(16000) ** 1.5 / 30).astype(np.float32) / 4, 16000)


class TooLateError(Exception):
    pass


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLateError(f"no outcome after {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def requests(spec: Spec) -> list[Request]:
    """Return a request for each way to choose a voice."""
    made = []
    if "voice" in spec.modes:
        made.append(Request(text="Good morning.", voice=spec.voices[0], max_frames=2))
    if "clone" in spec.modes:
        made.append(Request(text="Good morning.", references=(Reference(CLIP, "Hm."),), max_frames=2))
    if "design" in spec.modes:
        made.append(Request(text="Good morning.", instructions="slowly", max_frames=2))
    return made


def outcome(path: Path, family: Any, plain: str) -> str:
    """Return the message of a ValueError, or "" if the model speaks. plain: the description of the unchanged
    model; a model with the same description would load the same way."""
    try:
        if repr(family.describe(path)) == plain:
            return ""
        zoo.inspect(path)
        loaded = zoo.load(path, "cpu")
        for request in requests(loaded.spec):
            zoo.generate(loaded, request)
    except ValueError as error:
        return str(error)
    return ""


def finding(path: Path, family: Any, plain: str) -> str | None:
    """Return what is wrong with the outcome, or None."""
    try:
        with limit(LIMIT_S):
            said = outcome(path, family, plain)
    except Exception as error:  # any other exception is a finding
        return f"{type(error).__name__}: {str(error)[:200]!r}"
    return repr(said) if "\n" in said or len(said) > MAX_MESSAGE else None


@pytest.mark.parametrize("name", [name for name in zoo.families() if name not in WITHOUT_JSON])
def test_every_mutation_speaks_or_gives_a_one_line_error(name, tmp_path):
    findings, num_tried = [], 0
    for size in sizes(name):
        path = Path(shutil.copytree(directory(name, size), tmp_path / size))
        for file in (file for file in FILES if new_places(name, size, file)):
            findings += findings_in(path, name, size, file)
            num_tried += 1
    assert num_tried > 0 and not findings, "\n".join(findings)


def findings_in(path: Path, name: str, size: str, file: str) -> list[str]:
    """Return all findings for one file of a copied checkpoint, and leave the copy as it was."""
    family, config = zoo.families()[name], content(name, size, file)
    plain, findings = repr(family.describe(path)), []
    changes = (
        (at, *change)
        for number, at in enumerate(new_places(name, size, file))
        for change in islice(mutations(config, at), number % SHARE, None, SHARE)
    )
    original = (path / file).read_bytes()
    for at, change, mutant in changes:
        (path / file).write_text(json.dumps(mutant))
        if wrong := finding(path, family, plain):
            findings.append(f"{size}, {file}: {'.'.join(map(str, at))} {change}: {wrong}")
    (path / file).write_bytes(original)
    return findings
