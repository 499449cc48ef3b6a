"""How Chatterbox is compiled; data only."""

from dataclasses import replace

from compile_cache.strategy import Part, Parts, Strategy, Whole
from zoo.contract import Window
from zoo.nn.s3.parts import BATCH, FP32, ROWS, VOCODER

MAX_FRAMES = 1000  # codes of a speech: 40 s
MAX_POSITIONS = 4096  # of voice, text and codes together
LENGTHS = (200, 400, MAX_FRAMES)
CHUNK, AHEAD = 25, 10  # codes of a chunk, and behind it, that the flow reads


def window(max_frames: int) -> Window:
    """Return the windows of a model. Every mel frame depends on every code, so a speech is one window: no
    earlier stretch ends on the grid."""
    lengths = tuple(length for length in LENGTHS if length < max_frames)
    return Window(sizes=(max_frames,), grid=max_frames, lengths=(*lengths, max_frames))


def chunks(max_frames: int, hold_samples: int) -> Window:
    """Return the windows of a model whose speeches are rendered in chunks. All have one size: how a speech is
    cut changes its samples."""
    return replace(window(max_frames), sizes=(CHUNK,), grid=CHUNK, lookahead=AHEAD, hold_samples=hold_samples)


# One step of the flow's solver, for any number of streams and frames.
ADVANCE = Part("flow.advance", (("x", ROWS), ("given", ("batch", "", "frames")), ("count", BATCH)))
STRATEGY = Strategy(
    step=Whole(),
    gpu_render=Parts((ADVANCE, VOCODER)),
    cuts_renders=True,
    fp32=FP32,
)
