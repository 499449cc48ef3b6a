"""The form of log lines."""

import json
import subprocess
import sys

import pytest
from shell import ROOT

SAID = """
import logging, structlog
from serving import logs, supervisor
logs.configure("http")
structlog.get_logger().info("speech", frames=3)
logging.getLogger("library").warning("careful")
supervisor.log_line("ready on http://127.0.0.1:1\\n\\n    curl\\n")
"""


def lines(form):
    variables = {"ZOO_LOG": form} if form else {}
    done = subprocess.run(
        [sys.executable, "-c", SAID],
        cwd=ROOT,
        env={"PATH": "", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr.splitlines()


def test_with_json_every_line_is_json():
    speech, library, supervisor = map(json.loads, lines("json"))
    assert speech.items() >= {"process": "http", "event": "speech", "frames": 3, "level": "info"}.items()
    assert library.items() >= {"event": "careful", "level": "warning"}.items()
    assert supervisor.items() >= {"process": "supervisor", "event": "ready on http://127.0.0.1:1"}.items()
    assert {"timestamp"} < set(speech) & set(library) & set(supervisor)


def test_text_is_for_people():
    speech, library, supervisor, *tried = lines("text")
    assert "speech" in speech and "frames=3" in speech and "\x1b" not in speech
    assert "careful" in library and supervisor == "zoo: ready on http://127.0.0.1:1"
    assert tried == ["", "    curl", ""]


def test_a_log_that_cannot_be_written_ends_nothing():
    program = SAID + "print('goes on')"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env={"PATH": ""}, stdout=subprocess.PIPE, stderr=full
        )
    assert done.stdout == b"goes on\n"


@pytest.mark.parametrize("form", [None, ""])
def test_a_pipe_gets_json_by_default(form):
    speech, _, supervisor, *_ = lines(form)
    assert json.loads(speech)["frames"] == 3
    assert supervisor == "zoo: ready on http://127.0.0.1:1"
