"""The status line at the bottom of the terminal while `zoo serve` runs: running and queued requests, audio
per second, and the latest time to first audio.

    2026-11-22 20:31:07 [info     ] speech  ...            the log, line by line, above it
    2 speaking, 1 waiting   11.8 audio-s/s   first audio 23 ms

Two writers on one terminal break each other's lines. While the status line is open, stderr therefore goes
through it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import TextIOBase

from rich.console import Console
from rich.live import Live
from rich.text import Text

from serving import protocol

SPAN_S = 5.0  # audio per second is averaged over this span


class StatusLine(TextIOBase):
    """A text stream for the log; `show` draws the line below it. For use by one thread."""

    def __init__(self, console: Console):
        self.console = console
        self.counted: deque[tuple[float, float]] = deque()  # (time, seconds of audio delivered until then)
        self.unfinished = ""
        self._live: Live | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Redirect stderr through the status line. On exit the line disappears and the log stays."""
        with redirect_stderr(self):
            try:
                yield
            finally:
                self.hide()
                if self.unfinished:
                    self.write("\n")

    def isatty(self) -> bool:
        return self.console.is_terminal

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Print complete lines above the status line. An unfinished line waits for its end."""
        *lines, self.unfinished = (self.unfinished + text).split("\n")
        for line in lines:
            # Without soft_wrap a long command would be cut into lines and could not be copied.
            self.console.print(Text.from_ansi(line), soft_wrap=True)
        return len(text)

    def show(self, stats: protocol.Stats, now_s: float) -> None:
        """Draw or update the line."""
        if self._live is None:
            self._live = Live(
                console=self.console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(
            Text(self.line(stats, now_s), style="dim", no_wrap=True, overflow="ellipsis"), refresh=True
        )

    def hide(self) -> None:
        """Remove the line until `show` is called again, for example by a restarted engine."""
        self.counted.clear()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self, stats: protocol.Stats, now_s: float) -> str:
        """Return the text of the line."""
        models = stats.models.values()
        speaking = sum(model.running for model in models)
        waiting = sum(model.waiting + model.preparing for model in models)
        parts = [f"{speaking} speaking, {waiting} waiting", f"{self._rate(stats, now_s):.1f} audio-s/s"]
        soonest = {
            name: model.first_audio_s
            for name, model in stats.models.items()
            if model.first_audio_s is not None
        }
        for name, first_audio_s in soonest.items():
            of = f" ({name})" if len(stats.models) > 1 else ""
            parts.append(f"first audio {1000 * first_audio_s:,.0f} ms{of}")
        return "   ".join(parts)

    def _rate(self, stats: protocol.Stats, now_s: float) -> float:
        """Return audio seconds per second over the last SPAN_S."""
        delivered_s = sum(model.audio_s for model in stats.models.values())
        if self.counted and delivered_s < self.counted[-1][1]:  # a model was unloaded
            self.counted.clear()
        self.counted.append((now_s, delivered_s))
        while len(self.counted) > 2 and self.counted[1][0] <= now_s - SPAN_S:
            self.counted.popleft()
        (first_s, before), (last_s, after) = self.counted[0], self.counted[-1]
        return (after - before) / (last_s - first_s) if last_s > first_s else 0.0
