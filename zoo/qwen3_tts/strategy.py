"""The compile strategy of Qwen3-TTS, as data."""

from compile_cache.strategy import Strategy, Whole
from zoo.contract import Window

WINDOW = Window(sizes=(1, 4, 25))  # the codec's state is carried, so no left context is needed
STRATEGY = Strategy(
    step=Whole(),  # prefill and render stay eager; README.md gives the reason
    fp32=("norms' mean squares", "RoPE angles", "code predictor: RoPE and attention", "logits", "codec"),
)
