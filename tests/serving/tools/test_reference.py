"""The process of a reference implementation: its input and its answer."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import numpy as np
import pytest

import zoo
from serving.tools import reference
from serving.tools.requests import buzz
from zoo.request import Reference, Request, Turn


def interpreter(directory: Path, code: str) -> str:
    """Write a `python` that runs `code` instead of the given script. `order` holds its JSON argument."""
    python = directory / "python"
    lines = ("#!/usr/bin/env python3", "import json, sys", "order = json.loads(sys.argv[3])", code)
    python.write_text("\n".join(lines) + "\n")
    python.chmod(python.stat().st_mode | stat.S_IEXEC)
    return str(python)


def test_the_reference_of_a_family_is_in_its_folder():
    folder = Path(zoo.__file__).parent
    there = {name for name in zoo.families() if (folder / name / "reference.py").exists()}
    assert len(there) >= 4
    for name in there:
        assert reference.script(name).parent == folder / name


def test_the_answer_is_the_last_line_of_the_output(tmp_path):
    answer = "print('loading')\nprint(json.dumps({'flag': sys.argv[1], 'script': sys.argv[2], **order}))"
    python = interpreter(tmp_path, answer)
    answer = reference.run("higgs_v3", python, {"directory": "model"})
    script = str(Path(zoo.__file__).parent / "higgs_v3" / "reference.py")
    assert answer == {"flag": "-P", "script": script, "directory": "model"}


@pytest.mark.parametrize(
    "family, python, line",
    [
        (
            "toy",
            "/bin/true",
            r"toy has no reference implementation to compare with: .*reference\.py does not exist",
        ),
        ("voxcpm2", "/bin/false", "the reference of voxcpm2 failed with /bin/false: exit status 1"),
        (
            "voxcpm2",
            "/nowhere/py",
            "the reference of voxcpm2 failed with /nowhere/py: No such file or directory",
        ),
    ],
)
def test_a_reference_that_cannot_run_is_a_clear_error(family, python, line):
    with pytest.raises(ValueError, match=f"^{line}$"):
        reference.run(family, python, {})


def test_a_reference_that_fails_gives_its_last_line(tmp_path):
    python = interpreter(tmp_path, "print(1 / 0)")
    with pytest.raises(
        ValueError, match=f"^the reference of csm failed with {python}: ZeroDivisionError: .*$"
    ):
        reference.run("csm", python, {})


def test_a_request_is_json_and_its_clips_are_files(tmp_path):
    clip = buzz(1.0, 110)
    references = (Reference(clip, "It hums."), Reference(clip))
    options = {"cfg_scale": 1.5}
    turns = (Turn("user", clip=clip), Turn("assistant", "Yes."))
    asked = {"temperature": 0.0, "max_frames": 7, "options": options, "turns": turns, "output": "text"}
    request = Request(text="Hello.", references=references, **asked)
    fields = json.loads(json.dumps(reference.fields(request, tmp_path, "clone x=true"), allow_nan=False))
    given, spoken = fields.pop("references"), fields.pop("turns")
    assert fields == {
        "text": "Hello.",
        "voice": None,
        "language": None,
        "instructions": None,
        "temperature": 0.0,
        "max_frames": 7,
        "options": {"cfg_scale": 1.5},
        "output": "text",
    }
    assert [(one["role"], one["text"]) for one in spoken] == [("user", None), ("assistant", "Yes.")]
    assert spoken[1]["clip"] is None
    assert [one["transcript"] for one in given] == ["It hums.", None]
    for one in (*given, spoken[0]):
        with np.load(one["clip"]) as kept:
            assert int(kept["rate_hz"]) == 24_000 and np.array_equal(kept["samples"], clip.samples)
