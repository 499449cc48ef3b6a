"""How CosyVoice 2 is compiled; data only."""

from compile_cache.strategy import Part, Parts, Strategy, Whole
from zoo.contract import Window
from zoo.nn.s3.parts import BATCH, FP32, ROWS, VOCODER
from zoo.nn.s3.sizes import GRID, LOOKAHEAD

MAX_FRAMES = 15_000  # ten minutes
SIZES = (GRID, 2 * GRID, 4 * GRID)
WINDOW = Window(
    sizes=SIZES,
    lookahead=LOOKAHEAD,
    grid=GRID,
    # a stretch that ends within the first length may begin with the end of the prompt
    lengths=(SIZES[-1], MAX_FRAMES),
)
# One step of the flow's solver, for any number of streams and frames. Ten steps would be too large a graph.
ADVANCE = Part(
    "flow.advance",
    (
        ("x", ROWS),
        ("pairs", ("batch", "", "frames")),
        ("seen.index", ROWS),
        ("seen.slots", BATCH),
        ("seen.start", BATCH),
        ("seen.count", BATCH),
        ("seen.num_kept", BATCH),
        ("caches.arena", ("arena",)),  # the same code for every size of the KV memory
        ("caches.pages", BATCH),
    ),
)
STRATEGY = Strategy(
    step=Whole(),
    gpu_render=Parts((ADVANCE, VOCODER)),
    cuts_renders=True,
    render_samples=1_200_000,  # 25 windows of 50 codes take a fifth less time each than 12
    fp32=FP32,
)
