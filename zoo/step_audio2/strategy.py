"""How Step-Audio 2 is lowered; data only."""

from compile_cache.strategy import Parts, Strategy, Whole
from zoo.contract import Window
from zoo.nn.s3.parts import FP32, VOCODER
from zoo.nn.s3.sizes import GRID, LOOKAHEAD

MAX_FRAMES = 12_800  # codes of an answer: more than the context holds
WINDOW = Window(sizes=(GRID, 2 * GRID), lookahead=LOOKAHEAD, grid=GRID)
STRATEGY = Strategy(
    step=Whole(), gpu_render=Parts((VOCODER,)), cuts_renders=True, fp32=(*FP32, "audio encoder")
)
