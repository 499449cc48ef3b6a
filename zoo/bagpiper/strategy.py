"""The compile strategy of Bagpiper, as data."""

from compile_cache.strategy import Strategy, Whole
from zoo.contract import Window

# The published codec reads ten frames on both sides; render reads them from the tape.
CONTEXT = 10
WINDOW = Window(sizes=(4, 16, 50), lookahead=CONTEXT, left=CONTEXT)
STRATEGY = Strategy(
    step=Whole(),  # prefill and render stay eager
    fp32=("norms' mean squares", "RoPE angles", "logits and sampling", "codec", "audio encoder"),
)
