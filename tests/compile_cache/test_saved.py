"""Graphs of launches that will be recorded: one for each kind of arguments, kept in an entry of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compile_cache import artifacts, saved
from compile_cache.counts import Counts, counts
from compile_cache.lower import with_parts
from compile_cache.saved import Saved, kind_of
from compile_cache.strategy import Part

pytestmark = pytest.mark.compile


@dataclass
class Inputs:
    rows: Tensor  # [B, 8]
    slots: Tensor  # [B]
    scale: int = 2


class State:
    def __init__(self, slots: int):
        self.sums = torch.zeros(slots, 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def step(self, state: State, inputs: Inputs) -> Tensor:
        rows = self.linear(inputs.rows) * inputs.scale + state.sums[inputs.slots]
        state.sums[inputs.slots] = rows
        return rows.tanh()

    def only_four(self, state: State, inputs: Inputs) -> Tensor:
        return self.step(state, inputs) + 1 if len(inputs.rows) == 4 else self.step(state, inputs)


def inputs(size: int, **more: int) -> Inputs:
    """Inputs whose batch is marked as it is for a GPU."""
    made = Inputs(torch.randn(size, 8), torch.arange(size), **more)
    for tensor in (made.rows, made.slots):
        if size > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return made


def state(slots: int = 9) -> State:
    made = State(slots)
    torch._dynamo.maybe_mark_dynamic(made.sums, 0)
    return made


class Start:
    """A model as a new process starts it: what it has compiled is only in the cache."""

    def __init__(self, model: Model, place: Path, verb: str = "step"):
        torch._dynamo.reset()
        self.model, self.place, self.verb, self.num_traced = model, place, verb, 0

    def __enter__(self) -> Start:
        self.opened, self.before = artifacts.opened(self.place), counts()
        self.entry = self.opened.__enter__()
        self.saved = Saved(getattr(self.model, self.verb), self.verb, self.entry)
        self.saved.traced = self.plain
        return self

    def __exit__(self, *error: object) -> None:
        self.counts = counts() - self.before
        self.opened.__exit__(*error)

    def plain(self, *args: object) -> Tensor:
        self.num_traced += 1
        return getattr(self.model, self.verb)(*args)

    def check(self, given: Inputs, slots: int = 9) -> None:
        """Check a call, and what it leaves in the state."""
        ours, plain = state(slots), state(slots)
        made, wanted = self.saved(ours, given), getattr(self.model, self.verb)(plain, given)
        torch.testing.assert_close(made, wanted, rtol=0, atol=1e-6)
        torch.testing.assert_close(ours.sums, plain.sums, rtol=0, atol=1e-6)


@pytest.fixture
def model() -> Model:
    return Model().eval()


@torch.inference_mode()
def test_all_sizes_share_a_graph_that_the_next_start_loads_without_tracing(model, tmp_path):
    place = tmp_path / "compiled" / "model"
    with Start(model, place) as first:
        for size in (8, 4, 2):
            first.check(inputs(size))
        first.check(Inputs(torch.randn(3, 8), torch.arange(3)))  # a launch that was not recorded has no marks
    assert first.counts.graphs == 1 and first.num_traced == 0
    with Start(model, place) as second:
        for size in (2, 8):
            second.check(inputs(size), slots=21)
    assert second.counts == Counts(graphs=0, found=1, compiled=0) and second.num_traced == 0


@torch.inference_mode()
def test_another_kind_of_arguments_is_added_to_an_entry_that_exists(model, tmp_path):
    place = tmp_path / "compiled" / "model"
    with Start(model, place) as first:
        first.check(inputs(8))
    with Start(model, place) as second:
        second.check(inputs(8, scale=3))
        second.check(inputs(1))
    assert second.counts.graphs == 2 and second.num_traced == 0 and artifacts.damage(place) is None
    with Start(model, place) as third:
        for given in (inputs(8), inputs(8, scale=3), inputs(1)):
            third.check(given)
    assert third.counts == Counts(graphs=0, found=3, compiled=0)


@torch.inference_mode()
def test_a_graph_that_holds_for_one_size_is_not_used_for_another(model, tmp_path):
    with Start(model, tmp_path / "compiled" / "model", "only_four") as start:
        start.check(inputs(4))
        assert start.num_traced == 0
        start.check(inputs(8))
    assert start.num_traced == 1


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, rows: Tensor, bias: Tensor, scale: int = 2) -> Tensor:
        return self.linear(rows) * scale + bias


class Outer:
    def __init__(self) -> None:
        self.inner = Inner().eval()

    def say(self, rows: Tensor, bias: Tensor) -> Tensor:
        return self.inner(rows, bias=bias).tanh()


@torch.inference_mode()
def test_a_part_is_kept_for_all_sizes_and_for_every_way_to_call_it(tmp_path):
    outer, place = Outer(), tmp_path / "compiled" / "outer"
    part = Part("inner.forward", (("rows", ("batch",)),))
    for compiled, found in ((1, 0), (0, 1)):
        torch._dynamo.reset()
        with artifacts.opened(place) as entry:
            fast = with_parts(outer.say, [part], lambda method, part: Saved(method, part.place, entry))
            before = counts()
            for size in (5, 3):
                rows, bias = torch.randn(size, 8), torch.randn(8)
                torch._dynamo.maybe_mark_dynamic(rows, 0)
                torch.testing.assert_close(fast(rows, bias), outer.say(rows, bias), rtol=0, atol=1e-6)
        assert counts() - before == Counts(graphs=compiled, found=found, compiled=compiled)
    assert [file.name.split("-")[0] for file in place.glob("*.saved")] == ["inner.forward"]


@torch.inference_mode()
def test_a_file_that_the_manifest_does_not_list_is_not_loaded(model, tmp_path):
    place = tmp_path / "compiled" / "model"
    with Start(model, place) as first:
        first.check(inputs(8))
    [file] = place.glob("*.saved")
    (place / f"other-{file.name.split('-')[1]}").write_bytes(file.read_bytes())
    with Start(model, place) as second:
        second.saved.name = "other"
        second.check(inputs(8))
    assert second.counts.compiled > 0 and second.num_traced == 0


@torch.inference_mode()
def test_a_graph_that_cannot_be_loaded_is_made_again(model, tmp_path, capsys):
    place = tmp_path / "compiled" / "model"
    with Start(model, place) as first:
        first.check(inputs(8))
    [file] = place.glob("*.saved")
    file.write_bytes(b"of another version")
    artifacts.write_manifest(place)
    with Start(model, place) as second:
        second.check(inputs(8))
    assert "cannot be loaded or saved" in capsys.readouterr().out and artifacts.damage(place) is None
    with Start(model, place) as third:
        third.check(inputs(8))
    assert third.counts == Counts(graphs=0, found=1, compiled=0)


@torch.inference_mode()
def test_a_compilers_long_error_is_a_short_line(model, tmp_path, monkeypatch, capsys):
    def compile(*_: object, **__: object) -> None:
        raise RuntimeError("C++ compile error" + 9_000 * " source" + " No space left on device")

    monkeypatch.setattr(saved, "_compile", compile)
    with Start(model, tmp_path / "compiled" / "model") as first:
        first.check(inputs(8))
    said = capsys.readouterr().out
    assert "C++ compile error" in said and "No space left on device" in said and len(said) < 2_000


@torch.inference_mode()
def test_a_graph_that_cannot_be_saved_is_traced(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(saved, "_compile", lambda *_, **__: object())
    with Start(model, tmp_path / "compiled" / "model") as start:
        start.check(inputs(8))
    assert start.num_traced == 1 and "save_compiled_function" in capsys.readouterr().out


def test_a_kind_is_all_that_does_not_vary():
    def kind(state: State, given: Inputs) -> str:
        return kind_of((state, given), {".0.sums": {0}, ".1.rows": {0}, ".1.slots": {0}})

    usual = kind(state(), inputs(8))
    assert usual == kind(state(33), inputs(4))
    wider = Inputs(torch.randn(8, 9), torch.arange(8))
    others = [inputs(1), inputs(8, scale=3), wider, Inputs(torch.randn(8, 8).double(), torch.arange(8))]
    assert len({usual, *(kind(state(), given) for given in others)}) == 5
