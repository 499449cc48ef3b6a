"""What a server is for: the policies there are, and the numbers that they have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class Policy:
    """`Policy.named` finds one by name and raises ValueError for a name that is none."""

    name: str
    prefill_tokens: int  # prompt positions per turn, at most
    # a listener with less audio than this is served early; None: nobody listens yet, so windows are full
    at_risk_s: float | None
    # without regard to anybody's time: prompts in order of arrival, windows of one shape as soon as they are there
    is_fifo: bool = False

    STREAMING: ClassVar[Policy]
    THROUGHPUT: ClassVar[Policy]
    FIFO: ClassVar[Policy]  # what the others are compared with

    @classmethod
    def named(cls, name: str) -> Policy:
        policies = {policy.name: policy for policy in (cls.STREAMING, cls.THROUGHPUT, cls.FIFO)}
        if name not in policies:
            raise ValueError(f"policy {name!r} is unknown; there are: {', '.join(policies)}")
        return policies[name]

    @property
    def is_timed(self) -> bool:
        """Whether who is about to run dry goes first."""
        return self.at_risk_s is not None and not self.is_fifo


Policy.STREAMING = Policy("streaming", prefill_tokens=256, at_risk_s=1.0)
Policy.THROUGHPUT = Policy("throughput", prefill_tokens=1024, at_risk_s=None)
Policy.FIFO = Policy("fifo", prefill_tokens=256, at_risk_s=np.inf, is_fifo=True)
PATIENCE = 3  # late deliveries in a row after which a listener's windows grow by a shape
RENDERS_UNDER_WAY = 4  # of a GPU; meanwhile more windows are due, and one launch of many rows takes less time than many of few
PREFILL_TURNS = 3  # of a GPU, from one launch of a few prompts to the next
FIRST_TURNS = 6  # that a listener's first audio lasts for, to the nearest frame
JOINED = 0.75  # of the middle shape: so many frames go along with others' windows of it, which costs less than a launch of their own
PATIENT_TURNS = 20  # that a prompt waits at most for those who listen to have something in hand
AGEING = 32  # positions by which a prompt counts as shorter, for each turn that it has waited
