"""How GLM-4-Voice is lowered; data only."""

from compile_cache.strategy import Part, Parts, Strategy, Whole
from zoo.contract import Window
from zoo.nn.s3.parts import FP32, VOCODER
from zoo.nn.s3.sizes import GRID

IN_COLUMNS = ("batch", "", "frames")
MAX_FRAMES = 4096  # codes of an answer: more than five minutes
LOOKAHEAD = 5
# Codes of a cell, but for the first one, which has GRID for early audio. Larger cells compute fewer codes again.
CELL = 2 * GRID
# A launch is as long as an answer up to its end, until the past is as long as any. Those of the second length have two
# cells, for an answer that ends in the second one.
LENGTHS = (GRID, CELL, GRID + CELL, GRID + 2 * CELL, MAX_FRAMES)
WINDOW = Window(sizes=(CELL,), lookahead=LOOKAHEAD, grid=CELL, grid_offset=GRID, lengths=LENGTHS)
# One step of the flow's solver, for any number of streams and mel frames.
ADVANCE = Part(
    "flow.advance",
    (("x", IN_COLUMNS), ("pairs", ("", *IN_COLUMNS)), ("mask", IN_COLUMNS)),
)
STRATEGY = Strategy(
    step=Whole(),
    gpu_render=Parts((ADVANCE, VOCODER)),
    cuts_renders=True,
    fp32=(*FP32, "flow and speech tokenizer"),
)
