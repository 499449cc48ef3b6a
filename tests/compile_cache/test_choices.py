"""The fastest way on a device is measured once, while a model warms up, and kept with the compiled code."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from compile_cache import choices
from compile_cache.artifacts import opened


@pytest.fixture(name="device")
def _device(monkeypatch) -> SimpleNamespace:
    """A GPU on which each way takes the time in `us`; `timed` lists the ways that were measured."""
    device = SimpleNamespace(name="Card 1", us={"a": 2.0, "b": 1.0}, timed=[], is_capturing=False)

    def time_us(way):
        device.timed.append(way())
        return device.us[way()]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device.name)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.is_capturing)
    monkeypatch.setattr(choices, "time_us", time_us)
    monkeypatch.setattr(choices, "_known", {})
    return device


WAYS = {"a": lambda: "a", "b": lambda: "b"}


def restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the choices, as a new process would."""
    monkeypatch.setattr(choices, "_known", {})


def test_a_choice_is_measured_once_and_read_after_that(device, tmp_path, monkeypatch):
    with choices.kept_in(tmp_path):
        assert choices.fastest("x 8", WAYS) == choices.fastest("x 8", WAYS) == "b"
    assert device.timed == ["a", "b"]
    restart(monkeypatch)
    device.us = {"a": 1.0, "b": 2.0}
    with choices.kept_in(tmp_path):
        assert choices.fastest("x 8", WAYS) == "b"
        assert device.timed == ["a", "b"]
        assert choices.fastest("x 16", WAYS) == "a"
    assert choices.fastest("x 8", WAYS) == "b"  # while requests are served


def test_nothing_is_measured_after_the_warm_up_or_while_a_launch_is_recorded(device, tmp_path):
    assert choices.fastest("x 8", WAYS) is None
    with choices.kept_in(tmp_path):
        device.is_capturing = True
        assert choices.fastest("x 8", WAYS) is None
    assert device.timed == [] and not list(tmp_path.iterdir())


def test_each_device_has_its_own_choices(device, tmp_path, monkeypatch):
    with choices.kept_in(tmp_path):
        choices.fastest("x 8", WAYS)
    restart(monkeypatch)
    device.name, device.us = "Card 2", {"a": 1.0, "b": 2.0}
    with choices.kept_in(tmp_path):
        assert choices.fastest("x 8", WAYS) == "a"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["card-1.choices", "card-2.choices"]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"x 8": 1}', '{"x 8": "a way that is gone"}', "\udcff"])
def test_choices_in_an_unusable_file_are_measured_again(content, device, tmp_path, monkeypatch):
    (tmp_path / "card-1.choices").write_bytes(content.encode("utf-8", "surrogateescape"))
    with choices.kept_in(tmp_path):
        assert choices.fastest("x 8", WAYS) == "b"
    restart(monkeypatch)
    device.timed.clear()
    with choices.kept_in(tmp_path):
        assert choices.fastest("x 8", WAYS) == "b"
    assert device.timed == []


def test_another_measurement_does_not_damage_an_entry(device, tmp_path, capfd):
    place = tmp_path / "model-1234"
    for rows, was_found in ((8, False), (16, True), (8, True)):
        with opened(place) as entry:
            assert entry.is_found == was_found
            assert choices.fastest(f"x {rows}", WAYS) == "b"
    assert capfd.readouterr().err == "" and len(choices.read(place / "card-1.choices")) == 2


def test_without_a_gpu_there_is_nothing_to_choose(tmp_path):
    with choices.kept_in(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_an_assumed_choice_is_not_measured(device, tmp_path):
    with choices.kept_in(tmp_path), choices.assumed("a"):
        assert choices.fastest("x 8", WAYS) == "a"
    assert device.timed == [] and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("rows", "expected"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (1408, 2048)])
def test_numbers_of_rows_round_up_to_a_power_of_two(rows, expected):
    assert choices.at_most(rows) == expected


def test_a_cpu_measures_its_choices_too(tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "_known", {})
    monkeypatch.setattr(choices.processor, "model", lambda: "Processor 7")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with choices.kept_in(tmp_path):
        assert choices.fastest("x 8", {"slow": lambda: time.sleep(0.01), "fast": lambda: None}) == "fast"
    assert choices.read(tmp_path / "processor-7-avx2.choices") == {"x 8": "fast"}
