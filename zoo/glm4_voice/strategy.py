"""How GLM-4-Voice is lowered; data only."""

from compile_cache.strategy import Part, Parts, Strategy, Whole
from zoo.contract import Window
from zoo.nn.s3.parts import BATCH, FP32, VOCODER

MAX_FRAMES = 4096  # codes of an answer: more than five minutes
GRID, LOOKAHEAD = 25, 5
WINDOW = Window(sizes=(GRID, 2 * GRID), lookahead=LOOKAHEAD, grid=GRID)
# One step of the flow's solver, for any number of streams. Ten steps would be too large a graph.
ADVANCE = Part("flow.advance", (("x", BATCH), ("pairs", ("", "batch")), ("mask", BATCH)))
STRATEGY = Strategy(
    step=Whole(), gpu_render=Parts((ADVANCE, VOCODER)), cuts_renders=True, fp32=(*FP32, "flow")
)
