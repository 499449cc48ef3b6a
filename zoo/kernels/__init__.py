"""Kernels for what torch runs slowly: C++ on a CPU (cpu.py), Triton on a GPU (gpu.py), and the custom operators
through which compiled code reaches them (operator.py).

An operator is written in torch first. `know` and `use_gpu` say when a kernel takes its place; `plain` says never.
"""

from __future__ import annotations

from zoo.kernels.cpu import (
    ELU,
    Past,
    Pointwise,
    Wave,
    attend_stretch,
    build,
    convolution_filters,
    convolve_snake,
    depthwise_unit,
    group_norm_mish,
    has,
    has_operators,
    in_blocks,
    keep_likely,
    keep_likely_before_temperature,
    keep_nucleus,
    key,
    know,
    level,
    nine_filters,
    norm_mish,
    normal,
    panels,
    scales_in_blocks,
    snake,
    uniform,
)
from zoo.kernels.gpu import of_gpu, on_gpu, use_gpu
from zoo.kernels.operator import cpp_operator, plain

__all__ = [
    "ELU",
    "Past",
    "Pointwise",
    "Wave",
    "attend_stretch",
    "build",
    "convolution_filters",
    "convolve_snake",
    "cpp_operator",
    "depthwise_unit",
    "group_norm_mish",
    "has",
    "has_operators",
    "in_blocks",
    "keep_likely",
    "keep_likely_before_temperature",
    "keep_nucleus",
    "key",
    "know",
    "level",
    "nine_filters",
    "norm_mish",
    "normal",
    "of_gpu",
    "on_gpu",
    "panels",
    "plain",
    "scales_in_blocks",
    "snake",
    "uniform",
    "use_gpu",
]
