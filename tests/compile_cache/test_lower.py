"""Lowered functions do not interfere with each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from compile_cache import lower as lowering
from compile_cache.counts import counts
from compile_cache.lower import lower
from compile_cache.strategy import Eager, Part, Parts, Whole


class Model:
    def __init__(self, weight: int):
        self.weight = weight

    def step(self, x: Tensor, *, more: int = 1) -> Tensor:
        return x * self.weight + more


@pytest.mark.compile
def test_a_process_may_load_any_number_of_models(monkeypatch):
    """Dynamo allows eight graphs per function, and all these models share one function."""
    compiled = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **how: compiled(function, backend="eager", fullgraph=True, dynamic=False),
    )
    steps = [lower(Model(weight).step, Whole()) for weight in range(12)]
    assert [int(step(torch.tensor(10))) for step in steps] == [10 * weight + 1 for weight in range(12)]
    assert int(steps[3](torch.tensor(10), more=5)) == 35


@pytest.mark.compile
def test_code_of_another_instruction_set_is_not_taken_from_inductors_cache(monkeypatch, tmp_path):
    """As with ATEN_CPU_CAPABILITY=avx2 on a machine with AVX-512, or a cache that two machines share."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    misses = []
    for machine in ("x86_64-avx2", "x86_64-avx512", "x86_64-avx2"):
        monkeypatch.setattr(lowering.artifacts, "target", lambda device, machine=machine: machine)
        torch._dynamo.reset()
        counters.clear()
        assert int(lower(Model(3).step, Whole())(torch.tensor(5))) == 16
        misses.append(counters["inductor"]["fxgraph_cache_miss"])
    assert misses == [1, 1, 0]


@pytest.mark.compile
def test_a_function_of_two_graphs_is_an_error_that_says_where():
    class Broken(Model):
        def step(self, x: Tensor, *, more: int = 1) -> Tensor:
            torch._dynamo.graph_break()
            return x * self.weight + more

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\._dynamo\.graph_break\(\)"):
        lower(Broken(3).step, Whole())(torch.tensor(5))


@pytest.mark.compile
def test_each_size_that_nobody_marked_has_a_graph():
    """Dynamo would make it a variable at the second one."""
    step, before = lower(Model(3).step, Whole()), counts().graphs
    for size in (2, 3, 4):
        step(torch.ones(size))
    assert counts().graphs - before == 3


def test_an_eager_function_is_the_function_itself():
    step = Model(3).step
    assert lower(step, Eager()) is step


class Inner:
    def __init__(self, weight: int):
        self.weight = weight

    def pass_on(self, x: Tensor, more: Model, times: int = 1) -> Tensor:
        return x * self.weight + more.weight * times


class Outer:
    def __init__(self) -> None:
        self.inner = Inner(3)

    def say(self, x: Tensor, more: Model) -> float:
        for times in (2, 2, 2):
            x = self.inner.pass_on(x, more, times)
        return float(x.sum())  # a graph cannot do this


def more(*values: int) -> Model:
    made = Model(0)
    made.weight = torch.tensor(values)
    return made


@pytest.mark.compile
def test_only_the_parts_of_a_function_are_compiled(monkeypatch):
    compiled, seen = torch.compile, list[bool]()

    def backend(graph, inputs):
        seen.append(True)
        return graph

    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **how: compiled(function, backend=backend, fullgraph=True, dynamic=False),
    )
    monkeypatch.setattr(
        lowering, "any_size", lambda tensors, dim, name: [torch._dynamo.mark_dynamic(x, dim) for x in tensors]
    )
    torch._dynamo.reset()
    outer = Outer()
    part = Part("inner.pass_on", (("x", ("rows",)), ("more.weight", ("rows",))))
    fast, before = lower(outer.say, Parts((part,))), counts().graphs
    for values in ((1, 2, 3), (4, 5, 6, 7), (8, 9)):
        x, given = torch.tensor(values), more(*values)
        assert fast(x, given) == outer.say(x, given) == float(sum(27 * n + 26 * n for n in values))
    assert counts().graphs - before == 1 and seen == [True]
    assert vars(outer.inner) == {"weight": 3}


def test_a_part_that_raises_leaves_the_plain_part_in_place():
    outer = Outer()

    def fail(x: Tensor, given: Model, times: int) -> Tensor:
        raise ValueError("as it must")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **how: fail)
        fast = lower(outer.say, Parts((Part("inner.pass_on"),)))
    with pytest.raises(ValueError, match="as it must"):
        fast(torch.ones(2), more(1, 1))
    assert outer.say(torch.ones(2), more(1, 1)) == 2 * 53
    with pytest.raises(AttributeError, match="missing"):
        lower(outer.say, Parts((Part("inner.missing"),)))


def test_another_thread_calls_the_plain_part(monkeypatch):
    class Elsewhere(Outer):
        def say(self, x: Tensor, more: Model) -> float:
            here = super().say(x, more)
            with ThreadPoolExecutor(1) as pool:
                there = pool.submit(super().say, x, more)
            return 1000 * here + there.result()

    monkeypatch.setattr(torch, "compile", lambda function, **how: lambda x, more, times: x + 1)
    fast = lower(Elsewhere().say, Parts((Part("inner.pass_on"),)))
    assert fast(torch.ones(2), more(1, 1)) == 1000 * 2 * 4 + 2 * 53
