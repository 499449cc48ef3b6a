"""What the documentation tells readers to run, runs."""

import os
import re
import shutil
import subprocess
import sys

import httpx
import pytest
import soundfile
from docs_snippets import ADDRESS, pages, snippets
from served import serving
from shell import ROOT, zoo
from uploads import NOISE, RATE_HZ

COMMAND = re.compile(r"\bzoo ([a-z][a-z-]*)\b([^\n`|]*)")


def run_pages():
    """Those with a snippet to run."""
    return [path for path in pages() if any(one.skipped is None for one in snippets(path))]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a server by name, which is started when it is first asked for."""
    started, open_ones = {}, []

    def address_of(name):
        """No page finds the voices that another one uploaded."""
        if name not in started:
            models = {"clone": {"base": "tiny-base"}, "small": {}}[name]
            server = serving(tmp_path_factory.mktemp(name), key=None, **models)
            started[name] = server.__enter__()
            open_ones.append(server)
        else:
            for voice in httpx.get(started[name] + "/v1/audio/voices").json()["data"]:
                if voice["type"] == "audio_sample":
                    httpx.delete(f"{started[name]}/v1/audio/voices/{voice['id']}").raise_for_status()
        return started[name]

    yield address_of
    for server in open_ones:
        server.__exit__(None, None, None)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """One compile cache for all pages, and not the user's."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def place(tmp_path):
    """An empty directory with the recording that readers have, and this project's commands."""
    commands = tmp_path / "bin"
    commands.mkdir()
    shims = {
        "zoo": f'"{sys.executable}" -m serving "$@"',
        "python": f'"{sys.executable}" "$@"',
        "curl": f'{shutil.which("curl")} --silent --show-error --fail-with-body "$@"',  # a refusal is a failure
    }
    for name, line in shims.items():
        (commands / name).write_text(f"#!/bin/sh\nexec {line}\n")
        (commands / name).chmod(0o755)
    (tmp_path / "here").mkdir()
    soundfile.write(tmp_path / "here" / "anna.wav", NOISE, RATE_HZ)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("path", run_pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_readers_are_told_to_run_runs(path, place, address, compiled):
    """All snippets of a page, one after the other in one directory, as a reader goes through it."""
    here, servers = place / "here", {}
    variables = {
        **os.environ,
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "ZOO_CACHE_DIR": str(compiled),
    }
    for one in snippets(path):
        if one.skipped is not None:
            continue
        code = one.code
        if ADDRESS in code:
            if one.server not in servers:
                servers[one.server] = address(one.server).removeprefix("http://")
            code = code.replace(ADDRESS, servers[one.server])
        command = ["bash", "-euo", "pipefail", "-c"] if one.language == "sh" else [sys.executable, "-c"]
        done = subprocess.run(
            [*command, code], cwd=here, env=variables, capture_output=True, text=True, timeout=240
        )
        where = f"{path.relative_to(ROOT)}, line {one.line}"
        assert done.returncode == 0, f"{where}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        for name in one.results:
            assert (here / name).stat().st_size > 0, f"{where}: {name} is empty"


def test_what_is_skipped_says_why():
    found = [one for path in pages() for one in snippets(path)]
    assert len(found) > 15
    for one in found:
        assert one.marker == "" or one.skipped or one.server == "clone", (
            f"{one.path}, line {one.line}: {one.marker}"
        )
    assert sum(one.skipped is None for one in found) > len(found) / 2


def test_every_option_that_is_named_is_one():
    """Of `zoo COMMAND --option` in whatever code of whatever page."""
    names = set(re.findall(r"^│ ([a-z][a-z-]+) ", zoo("--help").stdout, re.M))
    assert {"serve", "say", "demo-checkpoint"} <= names
    known = {name: set(re.findall(r"--[a-z][\w-]*", zoo(name, "--help").stdout)) for name in names}
    num = 0
    for path in pages():
        for code in re.findall(r"```.*?```|`[^`\n]+`", path.read_text(), re.S):
            for name, rest in COMMAND.findall(code.replace("\\\n", " ")):
                if name not in names:
                    continue
                for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest.partition("&&")[0]):
                    num += 1
                    assert option in known[name], f"{path.relative_to(ROOT)}: zoo {name} has no {option}"
    assert num > 20
