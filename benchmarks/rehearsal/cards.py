"""GPUs as tables, and a roofline: the least time that a launch takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# A kernel inside a replayed CUDA graph: its start and end on the device, and the gap before the next one. No
# bytes move in this time. Small kernels of a replayed step took 1.2 to 1.9 us on an H200, with gaps of 0.65
# us. A step without its bytes and without our own kernels takes 1.9 to 2.8 us a launch (benchmarks/LOG.md,
# 2026-11-22).
GRAPH_LAUNCH_US = 2.5
# A further phase of a kernel whose programs wait for each other: the wait, and the first bytes after it. It is assumed,
# and no GPU has measured it.
PHASE_US = 2.0
# An operator that Python launches: PyTorch's dispatcher, the allocator and the driver, on one thread.
EAGER_LAUNCH_US = 6.0
# The share of a card's peak that good kernels reach: streaming copies 85 to 93 % of bandwidth, cuBLAS 60 to
# 75 % of dense bf16 at large sizes and far less at small ones. fp32 convolutions on an H200 reached 51 %, and
# matrices of a step read at 83 % of bandwidth after their start. TF32 convolutions reached a quarter at most
# (benchmarks/LOG.md, 2026-11-23).
BANDWIDTH_REACHED, ARITHMETIC_REACHED = 0.8, 0.5


@dataclass(frozen=True)
class Card:
    """The properties of a GPU.

    Fields up to `gcnArchName` are those of `torch.cuda.get_device_properties`. The others are from the card's
    data sheet: bandwidth, and dense teraflops (no sparsity) with fp32 sums."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    max_threads_per_multi_processor: int
    L2_cache_size: int
    gb_per_s: float
    tflops: Mapping[str, float]
    regs_per_multiprocessor: int = 65536
    max_threads_per_block: int = 1024
    shared_memory_per_block: int = 49152
    warp_size: int = 32
    gcnArchName: str = ""

    @property
    def capability(self) -> int:
        return 10 * self.major + self.minor

    def launch_us(self, num_bytes: int, flops: int, arithmetic: str, start_us: float) -> float:
        """Return the us of a kernel: its start, then the longer of its bytes and its arithmetic."""
        return start_us + self.busy_us(num_bytes, flops, arithmetic)

    def busy_us(self, num_bytes: int, flops: int, arithmetic: str) -> float:
        """Return the us of a kernel without its start: the time in which others cannot use the device."""
        bytes_us = num_bytes / (self.gb_per_s * 1e3 * BANDWIDTH_REACHED)
        return max(bytes_us, flops / (self.tflops[arithmetic] * 1e6 * ARITHMETIC_REACHED))


def _hopper(name: str, memory_gib: int, gb_per_s: float) -> Card:
    """Return an H100 or H200.

    Source: NVIDIA H100 and H200 Tensor Core GPU data sheets (SXM); CUDA C programming guide, compute
    capabilities, 9.0."""
    tflops = {"fp8": 1978.9, "bf16": 989.4, "tf32": 494.7, "fp32": 66.9}
    return Card(name, 9, 0, 132, memory_gib << 30, 232448, 233472, 2048, 50 << 20, gb_per_s, tflops)


# Source: NVIDIA Ada GPU architecture whitepaper, appendix A, GeForce RTX 4090; CUDA C programming guide, 8.9.
_ADA = Card(
    "NVIDIA GeForce RTX 4090", 8, 9, 128, 24 << 30, 101376, 102400, 1536, 72 << 20,
    1008, {"fp8": 330.3, "bf16": 165.2, "tf32": 82.6, "fp32": 82.6},
)  # fmt: skip

CARDS = {
    "h100": _hopper("NVIDIA H100 80GB HBM3", 80, 3350),
    "h200": _hopper("NVIDIA H200", 141, 4800),
    "4090": _ADA,
}
