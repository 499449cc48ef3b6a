"""How GLM-4-Voice is lowered; data only."""

from compile_cache.strategy import Part, Parts, Strategy, Whole
from zoo.contract import Window
from zoo.nn.s3.parts import BATCH, FP32, VOCODER
from zoo.nn.s3.sizes import GRID

MAX_FRAMES = 4096  # codes of an answer: more than five minutes
LOOKAHEAD = 5
WINDOW = Window(sizes=(GRID, 2 * GRID), lookahead=LOOKAHEAD, grid=GRID)
# One step of the flow's solver, for any number of streams. On a GPU all renders have as many mel frames.
ADVANCE = Part("flow.advance", (("x", BATCH), ("pairs", ("", *BATCH)), ("mask", BATCH)))
STRATEGY = Strategy(
    step=Whole(),
    gpu_render=Parts((ADVANCE, VOCODER)),
    cuts_renders=True,
    fp32=(*FP32, "flow and speech tokenizer"),
)
