"""The compile strategy of Fish Audio S2, as data."""

from compile_cache.strategy import Strategy, Whole
from zoo.contract import Window

WINDOW = Window(sizes=(1, 4, 25))  # the codec's state is carried, so no left context is needed
STRATEGY = Strategy(
    step=Whole(),
    fp32=("norms' mean squares", "RoPE", "fast AR: attention", "logits", "codec"),
)
