"""Draw the ladder: time to first audio and viability against the load.

matplotlib has logarithmic axes and writes PNG, SVG and PDF, and most readers would use it to redraw the plot.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the result of `zoo load` into a .png, .svg or .pdf file. Raises OSError."""
    runs = result["runs"]
    is_open = runs[0]["arrivals"] == "poisson"
    load = [run["rate_requests_per_s"] if is_open else run["streams"] for run in runs]
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    for name in ("p50", "p90", "p99"):
        above.plot(load, [or_nan(run[f"ttfa_{name}_ms"]) for run in runs], marker="o", label=name)
    above.axhline(result["slo_ttfa_ms"], color="grey", linestyle=":", label="SLO")
    above.set(
        yscale="log", ylabel="time to first audio, ms", title=f"{result['model']}, {result['texts']} texts"
    )
    shares = {
        "chunk_viability": "viable chunks",
        "stream_viability": "viable streams",
        "good_share": "good requests",
    }
    for key, label in shares.items():
        below.plot(load, [100 * or_nan(run[key]) for run in runs], marker="o", label=label)
    below.set(ylim=(-3, 103), ylabel="%", xlabel="requests per second" if is_open else "concurrent streams")
    suspects = [at for at, run in zip(load, runs, strict=True) if run["client_is_limit"]]
    for axes in (above, below):
        for i, at in enumerate(suspects):
            axes.axvline(at, color="red", alpha=0.3, label="" if i else "client at its limit")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
