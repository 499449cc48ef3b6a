"""A GPU's stack of blocks in one launch, in Triton's interpreter, compared with the plain operator.
test_triton.py runs this file in a new process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from bf16_products import multiply_numbers
from torch import Tensor
from triton.runtime import interpreter

from zoo.kernels import triton_whole_stack
from zoo.nn.whole_stack import whole_stack

NUM_PROGRAMS = 3
PASSES = (2, 1, 1)  # tokens
STACKS = {  # hidden size, inner size, query heads, key heads, size of a head, and the treatment of heads
    "normed": (48, 80, 4, 2, 16, (True, False, False)),
    "paired": (64, 24, 6, 2, 8, (False, True, True)),
    "plain": (40, 136, 2, 2, 20, (False, False, False)),
}
LAYERS = 2


@pytest.fixture(autouse=True)
def _numbers(monkeypatch):
    multiply_numbers(monkeypatch)
    monkeypatch.setattr(triton_whole_stack, "num_programs", lambda x: NUM_PROGRAMS)


@pytest.mark.parametrize(("batch", "dtype"), [(1, torch.float32), (9, torch.float32), (9, torch.float16)])
@pytest.mark.parametrize("name", STACKS)
def test_phase_by_phase_the_kernel_gives_what_the_plain_operator_gives(name, batch, dtype):
    run(name, batch, dtype, is_whole=False)


def test_more_rows_than_a_tile_has():
    run("normed", 70, torch.float32, is_whole=False)


@pytest.mark.parametrize("name", STACKS)
def test_in_one_launch_programs_wait_for_each_other(name, monkeypatch):
    """Each program is a process, so that all run at once, as on a GPU."""
    monkeypatch.setattr(
        triton_whole_stack, "room", lambda x, width: shared(x.new_full((*x.shape[:-1], width), torch.nan))
    )
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", at_once(interpreter.GridExecutor.__call__))
    run(name, 9, torch.float32, is_whole=True)


def at_once(run_in_turn: Any) -> Any:
    """Return a replacement of `GridExecutor.__call__` that runs each program in a process of its own."""

    def run_programs(self: Any, *args: Any, **kwargs: Any) -> None:
        (num,) = self.grid
        kwargs["IS_ASKED_FOR"] = False  # the interpreter has no L2 cache
        children = []
        for program in range(num):
            if not (child := os.fork()):
                code = 1
                try:
                    self.grid = (1,)
                    pretend(program, num)
                    run_in_turn(self, *args, **kwargs)
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0] * num

    return run_programs


def pretend(program: int, num: int) -> None:
    """Make this process one of so many programs."""
    builder = interpreter.interpreter_builder
    builder.set_grid_dim = lambda *_: setattr(builder, "grid_dim", (num, 1, 1))
    builder.set_grid_idx = lambda *_: setattr(builder, "grid_idx", (program, 0, 0))


def run(name: str, batch: int, dtype: torch.dtype, is_whole: bool) -> None:
    width, inner, heads, kv_heads, dim, treatment = STACKS[name]
    g = torch.Generator().manual_seed(batch)
    weights = []
    for _ in range(LAYERS):
        for n in (width, width, *([dim, dim] if treatment[0] else [0, 0])):
            weights.append(torch.rand(n, generator=g).to(dtype) + 0.5)
        for rows, columns in (
            ((heads + 2 * kv_heads) * dim, width), (width, heads * dim), (2 * inner, width), (width, inner)
        ):  # fmt: skip
            weights.append((torch.randn(rows, columns, generator=g) * columns**-0.5).to(dtype))
    table = torch.tensor([w.data_ptr() for w in weights]).view(LAYERS, -1)
    room = sum(PASSES) + 2
    angle = torch.rand(room, dim // 2, generator=g)
    angle = angle.repeat_interleave(2, 1) if treatment[1] else angle.repeat(1, 2)
    rotary = angle.cos(), angle.sin()
    ours, plain = (shared(torch.full((LAYERS, batch, 2, kv_heads, room, dim), torch.nan)) for _ in range(2))
    arrived, first = shared(torch.zeros(1, dtype=torch.int32)), 0
    for tokens in PASSES:
        x = torch.randn(batch, tokens, width, generator=g).to(dtype)
        expected = whole_stack(
            x, *rotary, first, plain, arrived, table, weights, heads, 0.3, 1e-6, *treatment[1:]
        )
        found = triton_whole_stack.run_stack(
            x, *rotary, first, ours, arrived, table, inner, heads, 0.3, 1e-6, *treatment, is_whole=is_whole
        )
        first += tokens
        near(found, expected, dtype)
        near(ours[..., :first, :], plain[..., :first, :], dtype)
        assert ours[..., first:, :].isnan().all()


def shared(tensor: Tensor) -> Tensor:
    return tensor.share_memory_()


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == expected.dtype and found.isfinite().all()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
