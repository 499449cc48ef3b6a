"""The snippets of the documentation run."""

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
    """Return the pages with a snippet to run."""
    return [path for path in pages() if any(one.skipped is None for one in snippets(path))]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Return a function from the name of a server to its address. A server is started on first use."""
    started, open_ones = {}, []

    def address_of(name):
        """Delete the voices that an earlier page uploaded."""
        if name not in started:
            models = {"clone": {"base": "tiny-base"}, "small": {}}[name]
            directory = tmp_path_factory.mktemp(name)
            server = serving(directory, "--no-warm", "--works-dir", directory / "works", key=None, **models)
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
    """Return a compile cache for all pages, separate from the user's."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def place(tmp_path):
    """Return a directory with this project's commands, and an empty one with a recording."""
    commands = tmp_path / "bin"
    commands.mkdir()
    shims = {
        "zoo": f'"{sys.executable}" -m serving "$@"',
        "python": f'"{sys.executable}" "$@"',
        "curl": f'{shutil.which("curl")} --silent --show-error --fail-with-body "$@"',  # an error status fails
    }
    for name, line in shims.items():
        (commands / name).write_text(f"#!/bin/sh\nexec {line}\n")
        (commands / name).chmod(0o755)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "examples").symlink_to(ROOT / "examples")
    soundfile.write(tmp_path / "here" / "anna.wav", NOISE, RATE_HZ)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("path", run_pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_snippets_of_a_page_run_in_order(path, place, address, compiled):
    """All snippets of a page run in one directory, one after the other, as for a reader."""
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


def test_skipped_snippets_give_a_reason():
    found = [one for path in pages() for one in snippets(path)]
    assert len(found) > 15
    for one in found:
        assert one.marker == "" or one.skipped or one.server == "clone", (
            f"{one.path}, line {one.line}: {one.marker}"
        )
    assert sum(one.skipped is None for one in found) >= 30


def test_options_in_the_documentation_exist():
    """Check every `zoo COMMAND --option` in the code of all pages."""
    names = commands_in(zoo("--help").stdout)
    assert {"serve", "say", "demo-checkpoint"} <= names
    known = {name: options_of(name) for name in names}
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


def options_of(*command):
    """Return the options of a command, those of its subcommands included."""
    text = zoo(*command, "--help").stdout
    options = set(re.findall(r"--[a-z][\w-]*", text))
    if len(command) == 1 and "─ Commands ─" in text:
        options.update(*(options_of(*command, name) for name in commands_in(text)))
    return options


def commands_in(text):
    return set(re.findall(r"^│ ([a-z][a-z-]+) ", text.partition("─ Commands ─")[2], re.M))
