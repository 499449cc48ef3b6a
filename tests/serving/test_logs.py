"""The form of log lines."""

import json
import subprocess
import sys

import pytest
import structlog
from shell import ROOT, zoo

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


def test_the_log_of_a_command_is_on_stderr(monkeypatch):
    """Programs read the JSON of commands from stdout."""

    def looked(*_):
        structlog.get_logger().info("looked")
        raise ValueError("there is nothing")

    monkeypatch.setattr("zoo.inspect", looked)
    monkeypatch.setenv("ZOO_LOG", "json")
    done = zoo("inspect", "--json")
    said, error = done.stderr.splitlines()
    assert done.stdout == "" and error == "zoo: there is nothing"
    assert json.loads(said).items() >= {"process": "inspect", "event": "looked"}.items()


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
