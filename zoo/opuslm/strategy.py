"""The compile strategy of OpusLM, as data."""

from compile_cache.strategy import Strategy, Whole
from zoo.contract import Window

# The published codec needs four frames on both sides behind its LSTM, and three before it; render reads them from
# the tape.
CONTEXT = 7
WINDOW = Window(sizes=(4, 16, 50), lookahead=CONTEXT, left=CONTEXT)
STRATEGY = Strategy(
    step=Whole(),  # prefill and render stay eager
    fp32=("norms", "RoPE", "logits and sampling", "codec"),
)
