"""The types that the engine and the families share.

    request -> Prompt -> slot -> frames on the tape -> samples

A running request holds a *slot*: one row in tensors that live on the device. Each step makes one pass through
paged layers and appends one *frame*, or a part of one, to the slot's *tape*. The renderer reads a *window* of
the tape and returns samples. The engine knows slots, pages, frames and deadlines; it never sees a logit, a
codebook or a latent.

Letters in shapes: B slots in a launch, L lanes per slot, S all slots, T positions, F frames, K codebooks, V
vocabulary, D width, H heads, C channels, N samples, P pages of one sequence.
"""

from __future__ import annotations

from zoo.contract.family import Family, FamilyFolder, Said, Speech
from zoo.contract.prompt import Lane, Prompt, following, frame_cap
from zoo.contract.spec import KV, Past, Spec, Window
from zoo.contract.state import LANE_LEAD, NEVER, Batch, State, View

__all__ = [
    "KV",
    "LANE_LEAD",
    "NEVER",
    "Batch",
    "Family",
    "FamilyFolder",
    "Lane",
    "Past",
    "Prompt",
    "Said",
    "Spec",
    "Speech",
    "State",
    "View",
    "Window",
    "following",
    "frame_cap",
]
