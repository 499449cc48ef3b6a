"""How Orpheus is lowered; data only."""

from compile_cache.strategy import Strategy, Whole
from zoo.contract import Window

# SNAC looks three frames to both sides: render reads them from the tape.
WINDOW = Window(sizes=(1, 4, 24), lookahead=3, left=3)
STRATEGY = Strategy(
    step=Whole(),  # prefill and render stay eager
    fp32=("norms' mean squares", "RoPE angles", "logits, penalty and sampling", "codec"),
)
