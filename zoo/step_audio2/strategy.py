"""How Step-Audio 2 is lowered; data only."""

from compile_cache.strategy import Part, Parts, Strategy, Whole
from zoo.contract import Window
from zoo.nn.s3.parts import BATCH, FP32, VOCODER
from zoo.nn.s3.sizes import GRID, LOOKAHEAD

MAX_FRAMES = 12_800  # codes of an answer: more than the context holds
WINDOW = Window(sizes=(GRID,), lookahead=LOOKAHEAD, grid=GRID)
# One step of the flow's solver, for any number of streams. All cells have the same size.
ADVANCE = Part(
    "flow.advance",
    (
        ("x", BATCH),
        ("pairs", BATCH),
        ("count", BATCH),
        ("frames.slots", BATCH),
        ("frames.index", BATCH),
        ("frames.mask", BATCH),
        ("turns", BATCH),
    ),
)
STRATEGY = Strategy(
    step=Whole(), gpu_render=Parts((ADVANCE, VOCODER)), cuts_renders=True, fp32=(*FP32, "audio encoder")
)
