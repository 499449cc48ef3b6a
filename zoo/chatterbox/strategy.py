"""How Chatterbox is compiled; data only."""

from compile_cache.strategy import Part, Parts, Strategy, Whole
from zoo.contract import Window
from zoo.nn.s3.parts import BATCH, FP32, ROWS, VOCODER

MAX_FRAMES = 1000  # codes of a speech: 40 s
MAX_POSITIONS = 4096  # of voice, text and codes together
LENGTHS = (200, 400, MAX_FRAMES)


def window(max_frames: int) -> Window:
    """Return the windows of a model. Every mel frame depends on every code, so a speech is one window: no
    earlier stretch ends on the grid."""
    lengths = tuple(length for length in LENGTHS if length < max_frames)
    return Window(sizes=(max_frames,), grid=max_frames, lengths=(*lengths, max_frames))


# One step of the flow's solver, for any number of streams and frames.
ADVANCE = Part("flow.advance", (("x", ROWS), ("given", ("batch", "", "frames")), ("count", BATCH)))
STRATEGY = Strategy(
    step=Whole(),
    gpu_render=Parts((ADVANCE, VOCODER)),
    cuts_renders=True,
    fp32=FP32,
)
