"""How Fish Audio S2 is lowered; data only."""

from compile_cache.strategy import Strategy, Whole
from zoo.contract import Window

WINDOW = Window(sizes=(1, 4, 25))  # the codec's past is carried, so no left context is needed
STRATEGY = Strategy(
    step=Whole(),
    fp32=("norms' mean squares", "RoPE", "fast AR: attention", "logits", "codec"),
)
