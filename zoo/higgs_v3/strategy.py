"""The compile strategy of Higgs Audio V3, as data."""

from compile_cache.strategy import Strategy, Whole
from zoo.contract import Window

# The codec needs as many frames on the left as on the right; render reads both from the tape.
WINDOW = Window(sizes=(4, 25, 75), lookahead=10, left=10)
STRATEGY = Strategy(
    step=Whole(),  # prefill and render stay eager
    fp32=("norms' mean squares", "RoPE angles", "logits and sampling", "codec"),
)
