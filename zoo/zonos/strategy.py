"""The compile strategy of Zonos, as data."""

from compile_cache.strategy import Strategy, Whole
from zoo.contract import Window

CONTEXT = 10  # frames that the codec needs on both sides; render reads them from the tape
WINDOW = Window(sizes=(8, 43, 86), lookahead=CONTEXT, left=CONTEXT)
STRATEGY = Strategy(
    step=Whole(),  # prefill and render stay eager
    fp32=("RoPE", "logits, guidance and sampling", "codec", "speaker encoder"),
)
