"""Flags of `zoo serve` that limit clients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from serving import settings
from serving.cli.common import LIMITS, MAX_REFERENCE_S, num_bytes
from serving.cli.serve_flags import Security

FINITE = ("max_unread", "max_stall", "max_text_idle", "max_session_idle")


@dataclass(frozen=True)
class Limits:
    """Flags that limit clients."""

    max_waiting: Annotated[
        int,
        Option(
            min=1,
            help="Each model queues at most this many requests. Further ones get 503.",
            rich_help_panel=LIMITS,
        ),
    ] = 256
    max_flex_wait: Annotated[
        float,
        Option(
            min=0,
            help="A flexible request (service_tier flex) whose audio has not begun after this many seconds gets "
            "503. With 0 it waits without a limit.",
            rich_help_panel=LIMITS,
        ),
    ] = 540
    max_unread: Annotated[
        float,
        Option(
            min=1,
            help="The server pauses a stream while its client has this many seconds of audio unread.",
            rich_help_panel=LIMITS,
        ),
    ] = 30
    max_stall: Annotated[
        float,
        Option(
            min=1,
            help="The server disconnects a client that reads nothing, or leaves its stream paused, for this "
            "many seconds.",
            rich_help_panel=LIMITS,
        ),
    ] = 60
    max_text: Annotated[
        int,
        Option(
            min=1,
            help="The input of a request has at most this many characters.",
            rich_help_panel=LIMITS,
        ),
    ] = 8000
    max_voices: Annotated[
        int,
        Option(min=0, help="The server stores at most this many uploaded voices.", rich_help_panel=LIMITS),
    ] = 1000
    max_reference_bytes: Annotated[
        str,
        Option(help="A reference recording has at most this size (10MiB or bytes).", rich_help_panel=LIMITS),
    ] = "10MiB"
    max_reference_s: Annotated[
        float,
        Option(
            min=1,
            max=MAX_REFERENCE_S,
            help="A reference recording lasts at most this many seconds.",
            rich_help_panel=LIMITS,
        ),
    ] = MAX_REFERENCE_S
    max_reading: Annotated[
        int,
        Option(
            min=1,
            help="The server reads at most this many large bodies, and as many recordings, at once. Further "
            "ones get 503.",
            rich_help_panel=LIMITS,
        ),
    ] = 16
    max_sessions: Annotated[
        int,
        Option(
            min=0,
            help="At most this many WebSocket sessions are open. Further ones get 503.",
            rich_help_panel=LIMITS,
        ),
    ] = 256
    max_text_idle: Annotated[
        float,
        Option(
            min=0.1,
            help="The server closes a WebSocket whose open utterance receives no text for this many seconds.",
            rich_help_panel=LIMITS,
        ),
    ] = 30
    max_session_idle: Annotated[
        float,
        Option(
            min=0.1,
            help="The server closes a WebSocket that sends and receives nothing for this many seconds.",
            rich_help_panel=LIMITS,
        ),
    ] = 600

    def settings(self, security: Security, memory_bytes: int) -> settings.Limits:
        """Raises ValueError."""
        for name in FINITE:
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"--{name.replace('_', '-')} must be a finite number of seconds")
        return settings.Limits(
            waiting=self.max_waiting,
            flex_wait_s=self.max_flex_wait or None,
            unread_s=self.max_unread,
            stall_s=self.max_stall,
            text_chars=self.max_text,
            reference_bytes=num_bytes(self.max_reference_bytes),
            reference_s=self.max_reference_s,
            allows_url_references=security.allow_url_references,
            reference_dir=None if security.reference_dir is None else str(security.reference_dir),
            voices=self.max_voices,
            reading=self.max_reading,
            sessions=self.max_sessions,
            memory_bytes=memory_bytes,
            text_idle_s=self.max_text_idle,
            session_idle_s=self.max_session_idle,
        )
