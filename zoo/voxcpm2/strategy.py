"""How VoxCPM2 is compiled; data only."""

from compile_cache.strategy import Strategy, Whole
from zoo.contract import Window

# patches of 160 ms; the decoder's past is carried, so no left context is needed
WINDOW = Window(sizes=(1, 2, 6))
STRATEGY = Strategy(
    step=Whole(),
    fp32=(
        "norms' mean squares",
        "RoPE angles and rotation",
        "noise before it is rounded",
        "guidance",
        "AudioVAE",
    ),
)
