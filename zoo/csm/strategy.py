"""How CSM is lowered. Data only."""

from compile_cache.strategy import Strategy, Whole
from zoo.contract import Window

WINDOW = Window(sizes=(1, 4, 25))  # the codec's state is carried, so no left context is needed
STRATEGY = Strategy(
    step=Whole(),  # prefill and render run eagerly
    fp32=("norms' mean squares", "RoPE angles", "depth decoder: RoPE and attention", "logits", "codec"),
)
