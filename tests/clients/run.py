"""Run the programs of other servers against `zoo serve`, each project in a separate environment.

The checkouts are never part of this repository. Their programs run as they are; only the names of models are ours.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import wave
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import av
import numpy as np
from served import serving

import zoo
from tests.clients.suites import BASE, CUSTOM, DESIGN, ERRORS, Case, Suite, TestSuite
from zoo.fish_s2 import write_demo as write_fish
from zoo.qwen3_tts import write_demo as write_qwen
from zoo.voxcpm2 import write_demo as write_voxcpm

HERE = Path(__file__).parent
CASE_S = 180.0
VOICES = (
    "vivian",
    "ryan",
    "af_bella",
    "af_heart",
    "echo",
)  # which the clients name; the small voice has others
WORDS = "The old man told the children a story. It was about the sea.\n\nThe children listened to him."


@dataclass(frozen=True)
class Result:
    """The outcome of a case. why: what went wrong. because: why it is known to go wrong."""

    case: str
    is_passed: bool
    why: str = ""
    because: str | None = None


class Servers:
    """The servers of a run, started when the first case needs them."""

    def __init__(self, directory: Path, stack: ExitStack):
        self.directory, self.stack = directory, stack
        self.urls: dict[str, str] = {}

    def url(self, name: str) -> str:
        if name not in self.urls:
            home = self.directory / name
            home.mkdir(parents=True)
            self.urls[name] = self.stack.enter_context(serving(home, *self.options(name, home), key=None))
        return self.urls[name]

    def options(self, name: str, home: Path) -> list[str]:
        recordings = ["--reference-dir", str(self.directory), "--no-warm", "--max-ttfa", "60"]
        if name == "small":
            aliases = [word for voice in VOICES for word in ("--alias-voice", f"{voice}=slt")]
            models = ("hexgrad/Kokoro-82M", "speaches-ai/Kokoro-82M-v1.0-ONNX")
            return [
                *recordings,
                *aliases,
                *(word for m in models for word in ("--alias", f"{m}=small_voice")),
            ]
        return [*(f"{id}={path}" for id, path in self.demos(name, home)), *recordings]

    def demos(self, name: str, home: Path) -> Iterator[tuple[str, Path]]:
        if name == "noise":
            yield CUSTOM, write_qwen(home / "custom", "tiny-1.7b")
            yield DESIGN, write_qwen(home / "design", "tiny-1.7b-design")
            yield "voxcpm2", write_voxcpm(home / "voxcpm2", "tiny")
            yield "fishaudio/s2-pro", write_fish(home / "fish", "tiny")
        if name in ("noise", "clone"):
            yield BASE, write_qwen(home / "base", "tiny-1.7b-base")


@contextmanager
def servers(directory: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(directory, stack)


def run(suite: Suite | TestSuite, code: Path, work: Path, running: Servers) -> list[Result]:
    """Run all cases of a suite."""
    python = environment(work / "venv", suite.packages)
    if isinstance(suite, TestSuite):
        return run_tests(suite, python, code, work / "tests", running.url(suite.server))
    files = write_files(running.directory)
    return [
        run_case(case, python, code, work / str(i), running.url(case.server), files)
        for i, case in enumerate(suite.cases)
    ]


def environment(directory: Path, packages: Sequence[str]) -> Path:
    """Return the Python of a virtual environment with these packages."""
    python, stamp = directory / "bin" / "python", directory / "packages"
    wanted = " ".join(packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.create(directory, with_pip=True, clear=True)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    subprocess.run(command, check=True)
    stamp.write_text(wanted)
    return python


def write_files(directory: Path) -> dict[str, str]:
    """Write what the cases read, and return their words for it."""
    recording, words, listed = (directory / name for name in ("voice.wav", "book.txt", "meta.lst"))
    if not recording.exists():
        speech = zoo.generate(zoo.load(zoo.SMALL_VOICE), zoo.Request(text=WORDS, voice="slt", seed=7))
        pcm = (np.asarray(speech.samples) * 32767).astype("<i2")[: 4 * speech.sample_rate_hz]
        with wave.open(str(recording), "wb") as file:
            file.setparams((1, 2, speech.sample_rate_hz, 0, "NONE", ""))
            file.writeframes(pcm.tobytes())
        words.write_text(WORDS)
        listed.write_text("".join(f"s{i}|The old man.|{recording}|Sentence {i}.\n" for i in range(2)))
        (directory / "embedding.json").write_text(json.dumps([0.1] * 1024))
    return {
        "recording": str(recording),
        "recordings": str(listed),
        "text": str(words),
        "embedding": str(directory / "embedding.json"),
        "url_of_recording": recording.as_uri(),
    }


def run_case(case: Case, python: Path, code: Path, work: Path, url: str, files: dict[str, str]) -> Result:
    """Run a program, and look at what it printed and wrote."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    address = urlsplit(url)
    words = files | {
        "url": url,
        "ws": url.replace("http", "ws") + "/v1/audio/speech/stream",
        "host": str(address.hostname),
        "port": str(address.port),
        "code": str(code),
        "work": str(work),
    }
    command = [str(python), *(word.format(**words) for word in case.argv)]
    env = {**os.environ, "PYTHONPATH": str(code), "OPENAI_API_KEY": "none"}
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=CASE_S, env=env)
    except subprocess.TimeoutExpired:
        return Result(case.name, False, f"it took longer than {CASE_S:g} s", case.because)
    why = problem(case, done, work)
    return Result(case.name, why is None, why or "", case.because)


def problem(case: Case, done: subprocess.CompletedProcess[str], work: Path) -> str | None:
    """Return what went wrong with a case; None if nothing did."""
    printed = done.stdout + done.stderr
    wrong = [line.strip() for line in printed.splitlines() if line.startswith(ERRORS) or "HTTP 4" in line]
    if done.returncode or wrong:
        return (wrong or printed.strip().splitlines() or [f"status {done.returncode}"])[-1][:300]
    if " ".join(case.wanted.split()) not in " ".join(printed.split()):
        return f"it did not print {case.wanted!r}: {printed.strip()[-200:]}"
    if case.audio is None:
        return None
    target = work / case.audio
    found = [target] if target.is_file() else [path for path in target.glob("*.*") if path.suffix != ".json"]
    if not found:
        return f"it wrote no {case.audio}"
    return next((why for why in map(unheard, found) if why is not None), None)


def unheard(path: Path) -> str | None:
    """Return what is wrong with a file of audio; None if it can be heard."""
    if path.stat().st_size == 0:
        return f"{path.name} is empty"
    try:
        with av.open(str(path)) as container:
            samples = sum(frame.samples for frame in container.decode(audio=0))
    except av.FFmpegError:
        return (
            None if path.stat().st_size % 2 == 0 else f"{path.name} is no audio"
        )  # 16-bit PCM has no header
    return None if samples else f"{path.name} has no samples"


def run_tests(suite: TestSuite, python: Path, code: Path, work: Path, url: str) -> list[Result]:
    """Run a project's own tests, and return a result for each."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for name in suite.files:
        shutil.copy(code / name, work)
    if suite.conftest is not None:
        shutil.copy(HERE / suite.conftest, work / "conftest.py")
    (work / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    integration: needs a server\n    requires_openai: needs OpenAI's server\n"
    )
    env = {**os.environ, **{name: value.format(url=url, code=code) for name, value in suite.environ}}
    env.pop("PYTHONPATH", None)
    report = work / "report.xml"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", "."]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=10 * CASE_S, env=env)
    if not report.exists():
        return [Result("pytest", False, (done.stdout + done.stderr).strip()[-300:])]
    known = dict(suite.known)
    return [result_of(case, known) for case in ElementTree.parse(report).iter("testcase")]


def result_of(case: ElementTree.Element, known: dict[str, str]) -> Result:
    name = case.get("name", "")
    wrong = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
    why = "" if wrong is None else wrong.get("message", "").splitlines()[0][:300]
    return Result(name, wrong is None, why, known.get(name.partition("[")[0]))


def checkout_of(suite: Suite | TestSuite) -> Path | None:
    """Return the checkout of a project, as its variable names it."""
    given = os.environ.get(suite.variable)
    return None if not given else Path(given).resolve()


def table(found: dict[str, list[Result]]) -> str:
    """Return the results as Markdown."""
    lines = ["| project | pass | of | % |", "|---|---|---|---|"]
    for name, results in found.items():
        num = sum(result.is_passed for result in results)
        lines.append(f"| {name} | {num} | {len(results)} | {100 * num / max(len(results), 1):.0f} |")
    for name, results in found.items():
        for result in results:
            if not result.is_passed:
                known = f" Known: {result.because}." if result.because else ""
                lines.append(f"\n- {name}, {result.case}: {result.why}.{known}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit("run it as: python -m tests.clients")
