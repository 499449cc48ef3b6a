"""Measure the memory of a model's weights on a CPU: as `zoo serve` keeps them, and as a plain fp32 copy.

    python -m benchmarks.memory DIR...

DIR: a model's directory. A process of its own loads each form, and reports by how much its anonymous memory grew
after all packages were imported and the kernels built. Nothing is served. This needs Linux.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import zoo
from compile_cache import artifacts
from serving.engine.device.prepare_for_host import keep_freed_memory, prepare_for_host
from zoo import kernels

HEADER = "| model | fp32, MB | served, MB | share |\n|---|---|---|---|"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directories", nargs="+", metavar="DIR")
    parser.add_argument("--form", choices=("plain", "served"), help="only this one, in this process")
    options = parser.parse_args()
    for directory in options.directories:
        try:
            zoo.find(directory)
        except ValueError as error:
            parser.error(str(error))
    if options.form is not None:
        for directory in options.directories:
            print(grown(directory, options.form == "served"))
        return
    print(HEADER, flush=True)
    for directory in options.directories:
        plain, served = (measured(directory, form) for form in ("plain", "served"))
        print(f"| {Path(directory).name} | {plain / 1e6:,.0f} | {served / 1e6:,.0f} | {served / plain:.0%} |")


def measured(directory: str, form: str) -> int:
    """Return the bytes of a form, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", directory, "--form", form]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def grown(directory: str, is_served: bool) -> int:
    """Return by how many bytes this process grows while it loads a model."""
    with artifacts.opened(artifacts.place("kernels", kernels.key())):
        kernels.build()
    zoo.load(directory, "meta", "float32")  # imports all packages
    keep_freed_memory()  # before it gives back what the imports left
    before = anonymous_bytes()
    family = zoo.load(directory, "cpu", "float32", keeps_bf16=is_served)
    if is_served:
        prepare_for_host(family)
    else:
        keep_freed_memory()
    return anonymous_bytes() - before


def anonymous_bytes() -> int:
    """Return the bytes of this process's memory that no file backs. Raises FileNotFoundError except on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith("RssAnon")]
    return int(kilobytes) * 1024


if __name__ == "__main__":
    main()
