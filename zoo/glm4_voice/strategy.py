"""How GLM-4-Voice is lowered; data only."""

from compile_cache.strategy import Parts, Strategy, Whole
from zoo.contract import Window
from zoo.nn.s3.parts import FP32, VOCODER
from zoo.nn.s3.sizes import GRID

MAX_FRAMES = 4096  # codes of an answer: more than five minutes
LOOKAHEAD = 5
WINDOW = Window(sizes=(GRID, 2 * GRID), lookahead=LOOKAHEAD, grid=GRID)
# The flow runs eagerly: the length of its lower level is half of another one, which no graph for any length knows.
STRATEGY = Strategy(
    step=Whole(), gpu_render=Parts((VOCODER,)), cuts_renders=True, fp32=(*FP32, "flow and speech tokenizer")
)
