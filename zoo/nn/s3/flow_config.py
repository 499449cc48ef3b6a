"""The block of a published yaml with the flow's sizes."""

from __future__ import annotations

from zoo.checkpoint.config import HEADS, WIDTH, ConfigBlock


def heads_and_width(flow: ConfigBlock) -> tuple[int, int]:
    """Return the heads and the width of the flow's encoder. Raises ValueError if its input has another width."""
    encoder = flow.block("encoder")
    heads = encoder.integer("attention_heads", *HEADS)
    width = encoder.integer("output_size", *WIDTH, step=2 * heads)
    for owner in (flow, encoder):
        if owner.integer("input_size", *WIDTH) != width:
            raise owner.refuse("input_size", f"the encoder is {width} wide")
    return heads, width
