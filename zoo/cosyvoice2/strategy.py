"""How CosyVoice 2 is lowered; data only."""

from compile_cache.strategy import Part, Parts, Strategy, Whole
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
BATCH, ROWS = ("batch",), ("batch", "frames")
# Ten passes through the flow's network are too large a graph: one step of its solver, for any number of streams and frames.
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
    ),
)
ENCODER = Part(
    "flow.encoder.forward",
    (
        ("x", ("batch", "codes")),
        ("is_there", ("batch", "codes")),
        ("stretch.slots", BATCH),
        ("stretch.start", BATCH),
        ("stretch.count", BATCH),
        ("stretch.num_kept", BATCH),
        ("state.rows", BATCH),
        ("state.count", BATCH),
    ),
)
VOCODER = Part(
    "vocoder.forward",
    (
        ("mel", ROWS),
        ("noise", ("batch", "frames and one")),
        ("phase", BATCH),
        ("place.first", BATCH),
        ("place.limit", BATCH),
        ("state.rows", BATCH),
        ("state.count", BATCH),
    ),
)
STRATEGY = Strategy(
    step=Whole(),
    gpu_render=Parts((ENCODER, ADVANCE, VOCODER)),
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
