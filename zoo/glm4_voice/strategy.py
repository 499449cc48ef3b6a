"""How GLM-4-Voice is lowered; data only."""

from compile_cache.strategy import Part, Parts, Strategy, Whole
from zoo.contract import Window
from zoo.nn.s3.parts import BATCH, FP32, VOCODER

MAX_FRAMES = 4096  # codes of an answer: more than five minutes
GRID, LOOKAHEAD = 25, 5
WINDOW = Window(sizes=(GRID, 2 * GRID), lookahead=LOOKAHEAD, grid=GRID)
FLOW = Part("flow.forward", (("codes", BATCH), ("count", BATCH), ("prompt", BATCH), ("num_prompt", BATCH)))
STRATEGY = Strategy(step=Whole(), gpu_render=Parts((FLOW, VOCODER)), cuts_renders=True, fp32=(*FP32, "flow"))
