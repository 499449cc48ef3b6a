"""How CosyVoice 2 is lowered; data only."""

from compile_cache.strategy import Eager, Strategy, Whole
from zoo.contract import Window

GRID = 25  # tokens of a chunk: within one, everything sees everything
LOOKAHEAD = 3  # tokens behind a chunk that its encoder reads
FRAME_SAMPLES, MEL_SAMPLES, TOKEN_FRAMES = 960, 480, 2
MAX_FRAMES = 15_000  # ten minutes
SIZES = (GRID, 2 * GRID, 4 * GRID)
WINDOW = Window(
    sizes=SIZES,
    lookahead=LOOKAHEAD,
    grid=GRID,
    lengths=(
        SIZES[-1],
        MAX_FRAMES,
    ),  # a stretch that ends in the first length may have the prompt's end before it
)
STRATEGY = Strategy(
    step=Whole(),
    gpu_render=Eager(),  # ten passes through the flow's network: too large a graph; it is recorded as it is written
    cuts_renders=True,
    fp32=(
        "norms' mean squares",
        "RoPE angles",
        "logits",
        "flow: states and guidance",
        "vocoder",
        "phases (fp64)",
        "prompt encoders",
    ),
)
