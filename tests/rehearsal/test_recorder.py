"""Tests of counted launches and waits on a pretended GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

pytest.importorskip("triton", reason="pip install -e .[rehearse]")

from benchmarks.rehearsal import shapes
from benchmarks.rehearsal.device import pretend
from benchmarks.rehearsal.launches import Launch, Log, Recorder

pytestmark = pytest.mark.rehearse
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with pretend("h100"), shapes.fake(), torch.inference_mode():
        yield


def recorded(work: Callable[[], object]) -> Log:
    log = Log()
    with Recorder(log):
        work()
    return log


@pytest.mark.parametrize(("dtype", "arithmetic"), [(BF16, "bf16"), (FP32, "fp32")])
def test_a_product_moves_its_operands_and_its_result(dtype: torch.dtype, arithmetic: str) -> None:
    x, linear = torch.zeros(64, 32, dtype=dtype, device="cuda"), torch.nn.Linear(32, 16, False, "cuda", dtype)
    (launch,) = recorded(lambda: linear(x)).launches
    moved = (64 * 32 + 32 * 16 + 64 * 16) * dtype.itemsize
    assert launch == Launch("aten.mm.default", "eager", "", moved, 2 * 64 * 32 * 16, arithmetic, moved)


def test_an_out_tensor_is_not_read() -> None:
    x, y, out = (torch.zeros(64, 64, device="cuda") for _ in range(3))
    (launch,) = recorded(lambda: torch.mm(x, y, out=out)).launches
    assert launch.bytes == 3 * 64 * 64 * 4


@pytest.mark.parametrize(
    ("write", "times"),
    [(lambda x, y: x.copy_(y), 2), (lambda x, y: x.zero_(), 1), (lambda x, y: x.add_(y), 3)],
)
def test_a_tensor_that_is_overwritten_is_not_read(write: Callable[..., Tensor], times: int) -> None:
    x, y = (torch.zeros(64, 64, device="cuda") for _ in range(2))
    (launch,) = recorded(lambda: write(x, y)).launches
    assert launch.bytes == times * 64 * 64 * 4


def test_views_and_empty_tensors_launch_nothing() -> None:
    x = torch.zeros(64, 32, device="cuda")
    log = recorded(lambda: (x.view(32, 64).mT[:3].unsqueeze(0).expand(5, -1, -1), torch.empty_like(x)))
    assert not log.launches


def test_a_gather_reads_only_the_rows_that_it_returns() -> None:
    table, at = torch.zeros(1 << 20, 64, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
    (launch,) = recorded(lambda: table[at]).launches
    assert launch.bytes == 2 * 3 * 64 * 4 + 3 * 8


@pytest.mark.parametrize(
    ("copy", "expected"),
    [
        (lambda x: x.copy_(torch.zeros(8)), "unpinned copy to the device of float32[8]"),
        (lambda x: torch.zeros(8).to(x.device), "unpinned copy to the device of float32[8]"),
        (lambda x: x.copy_(torch.empty(8, pin_memory=True)), "blocking copy to the device of float32[8]"),
        (lambda x: x.copy_(torch.empty(8, pin_memory=True), non_blocking=True), None),
        (lambda x: torch.empty(8, pin_memory=True).copy_(x, non_blocking=True), None),
        (lambda x: x.cpu(), "unpinned copy to the host of float32[8]"),
    ],
)
def test_blocking_copies_are_counted(copy: Callable[[Tensor], object], expected: str | None) -> None:
    log = recorded(lambda: copy(torch.zeros(8, device="cuda")))
    assert list(log.copies) == ([] if expected is None else [expected])


def test_asking_for_a_value_is_a_wait() -> None:
    log = Log()
    with pytest.raises(DataDependentOutputException), Recorder(log):
        torch.zeros(8, device="cuda").sum().item()
    assert log.waits["aten._local_scalar_dense.default"] == 1


def test_repeated_events_count_again() -> None:
    x = torch.zeros(8, device="cuda")
    log = recorded(lambda: x + 1)
    once = log.counted()
    log.repeat(once)
    assert list(once[0].values()) == [1] and list(log.launches.values()) == [2]
