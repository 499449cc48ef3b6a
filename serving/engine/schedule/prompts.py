"""Prompts: which positions are prefilled in an iteration. Pure functions of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence

from serving.engine.device.launches import Chunk
from serving.engine.schedule.slots import PromptRows


def chunks_of(
    prompt: PromptRows, order: Sequence[int], max_tokens: int, chunk_tokens: int | None
) -> list[Chunk]:
    """Return the chunks of one iteration: short prompts share it, long ones take several.

    order: slots, the first to be filled first; a slot's lanes are filled one after the other. chunk_tokens:
    prompts are cut at its multiples whatever else is prefilled; None: wherever there is room.
    """
    chunks: list[Chunk] = []
    left = max_tokens
    for slot in order:
        lanes = zip(prompt.num_prefilled[slot].tolist(), prompt.num_tokens[slot].tolist(), strict=True)
        for lane, (start, end) in enumerate(lanes):
            stop = chunk_end(start, end, left, chunk_tokens)
            if start < stop:
                chunks.append(Chunk(slot, start, stop, is_last=stop == end, lane=lane))
                left -= stop - start
        if left <= 0:
            break
    return chunks


def chunk_end(start: int, end: int, left: int, chunk_tokens: int | None) -> int:
    """Return where a chunk ends that has room for `left` positions. Chunks of equal lengths may exceed the
    room."""
    if chunk_tokens is None:
        return min(start + left, end)
    if left <= 0:
        return start
    return min(start - start % chunk_tokens + chunk_tokens, end)
