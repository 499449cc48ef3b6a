"""Facts about compilation that the networks after S3 codes share; data only."""

from compile_cache.strategy import Part

BATCH, ROWS = ("batch",), ("batch", "frames")
VOCODER = Part(
    "vocoder.forward",
    (
        ("mel", ROWS),
        ("noise", ("batch", "frames and one")),
        *((name, BATCH) for name in ("first", "limit", "count", "rows", "phase")),
    ),
)
FP32 = (
    "norms' mean squares",
    "RoPE angles",
    "logits",
    "flow: states and guidance",
    "vocoder",
    "phases (fp64)",
    "prompt encoders",
)
