"""Run a complete `zoo serve` with demo checkpoints."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
from shell import ROOT

from zoo.qwen3_tts import write_demo

KEY = "sk-demo"


@contextmanager
def serving(directory, *options, key=KEY, models=(), **sizes):
    """Run a server and yield its address once it is ready. The server must exit cleanly afterwards.

    It serves `models` and demo checkpoints (name=size), or the bundled small voice if neither is given.
    Nothing is compiled without "--compile". key: the API key, or None for a server without one.
    """
    models = [*models, *(f"{name}={write_demo(directory / name, size)}" for name, size in sizes.items())]
    command = [
        sys.executable,
        "-m",
        "serving",
        "serve",
        *models,
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    command += [] if "--compile" in options else ["--no-compile"]
    command += ["--voices-dir", directory / "voices", *options]
    env = {**os.environ, "ZOO_API_KEY": key} if key else None
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env)
    lines = []
    while "ready on" not in (line := process.stderr.readline()):
        lines.append(line)
        assert line, "".join(lines)
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(process.stderr.read)  # keeps the pipe from filling up
        try:
            yield line.split()[-1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0, rest.result()
        finally:
            process.kill()


def connected(url):
    return openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0, timeout=60)
