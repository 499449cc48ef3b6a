"""How Chatterbox is compiled; data only."""

from compile_cache.strategy import Part, Parts, Strategy, Whole
from zoo.contract import Window

MAX_FRAMES = 1000  # codes of a speech: 40 s
MAX_POSITIONS = 4096  # of voice, text and codes together
LENGTHS = (200, 400, MAX_FRAMES)


def window(max_frames: int) -> Window:
    """Return the windows of a model. Every mel frame depends on every code, so a speech is one window: no earlier
    stretch ends on the grid."""
    lengths = tuple(length for length in LENGTHS if length < max_frames)
    return Window(sizes=(max_frames,), grid=max_frames, lengths=(*lengths, max_frames))


BATCH, ROWS = ("batch",), ("batch", "frames")
# One step of the flow's solver, for any number of streams and frames.
ADVANCE = Part("flow.advance", (("x", ROWS), ("given", ("batch", "", "frames")), ("count", BATCH)))
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
    gpu_render=Parts((ADVANCE, VOCODER)),
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
