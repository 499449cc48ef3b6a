"""NaN and infinity inside a model end that request with an error, and no other request."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from masquerade import LateStream, masquerade
from models import NAMES, TOYS, Clock, Listener, alone, directory, family, requests, serve
from torch import Tensor, nn
from toy import FRAME_SAMPLES

import zoo
from serving.engine.engine import Engine
from zoo.contract import Family, Prompt, following
from zoo.request import Request

EACH = [name if name in TOYS else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
SICK = 77  # the seed of requests that read NaN


def engine(made: Family[Any], **settings: Any) -> Engine:
    usual = {"max_slots": 2, "compile": False, "report_lag": 0, "clock": Clock()}
    return Engine(made, **{**usual, **settings})


def sicken(made: Family[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests with the seed SICK read NaN."""
    well = made.passes

    def passes(request: Request) -> Generator[Prompt, Tensor, None]:
        given = well(request)
        prompt: Prompt | None = next(given)
        while prompt is not None:
            if request.seed == SICK:
                prompt.inputs = torch.full_like(prompt.inputs, torch.nan)
                if prompt.null is not None:
                    prompt.null = replace(prompt.null, inputs=torch.full_like(prompt.null.inputs, torch.nan))
            prompt = following(given, (yield prompt))

    monkeypatch.setattr(made, "passes", passes)


def num_failed(made: Engine) -> int:
    [stats] = made.stats()["models"].values()
    return int(stats["not_finite"])


def is_well(listener: Listener, name: str, request: Request) -> bool:
    """Return whether a request was heard as it is heard alone."""
    want = alone(name, request).samples.numpy()
    heard = listener.samples
    return listener.has_ended_well and len(heard) == len(want) and np.abs(heard - want).max(initial=0) < 1e-4


@pytest.mark.parametrize("report_lag", [0, 1])
@pytest.mark.parametrize("name", EACH)
def test_nan_ends_its_request_and_no_other(name, report_lag, monkeypatch):
    made = family(name)
    well, other = requests(name, 2, max_frames=9)
    truth = [alone(name, request) for request in (well, other)]
    assert truth
    sicken(made, monkeypatch)
    speaking = engine(made, report_lag=report_lag)
    first, sick, later = serve(speaking, {0: [well, replace(well, seed=SICK)], 1: [other]})
    assert sick.reason == "not_finite" and sick.samples.size == 0
    assert is_well(first, name, well) and is_well(later, name, other)
    assert num_failed(speaking) == 1
    [model] = speaking.models.values()
    assert speaking.pages.free == speaking.pages.num_pages and len(model.tenants.free) == 2


def test_nan_is_noticed_in_recorded_launches(monkeypatch):
    """On a GPU that is late (tests/masquerade.py)."""
    LateStream.chance.seed(3)
    well = requests("toy", 1, max_frames=9)[0]
    assert alone("toy", well)
    with masquerade():
        made = TOYS["toy"]()
        sicken(made, monkeypatch)
        speaking = engine(made, report_lag=1)
        speaking.warm(lambda *_: None)
        listeners = serve(speaking, {0: [well, replace(well, seed=SICK)], 3: [well]})
        while speaking.turn():
            pass
    assert listeners[1].reason == "not_finite"
    assert is_well(listeners[0], "toy", well) and is_well(listeners[2], "toy", well)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_samples_that_are_not_finite_are_not_delivered(bad, monkeypatch):
    """A codec makes such samples from the third frame on."""
    made = family("toy")
    render = made.render

    def broken(state: Any, view: Any) -> tuple[Tensor, Tensor]:
        samples, valid = render(state, view)
        frame = view.start[:, None] + torch.arange(samples.shape[1]) // FRAME_SAMPLES
        return torch.where(frame >= 2, bad, samples), valid

    monkeypatch.setattr(made, "render", broken)
    speaking = engine(made)
    [listener] = serve(speaking, {0: [Request(text="hmmmm", max_frames=30)]})
    assert listener.reason == "not_finite" and num_failed(speaking) == 1
    assert np.isfinite(listener.samples).all() and len(listener.samples) <= 2 * FRAME_SAMPLES


def test_latents_are_looked_at(monkeypatch):
    made = family("voxcpm2")
    solve = made.net.solver.forward
    monkeypatch.setattr(made.net.solver, "forward", lambda *given: solve(*given) + torch.inf)
    [listener] = serve(engine(made), {0: requests("voxcpm2", 1)})
    assert listener.reason == "not_finite"


@pytest.mark.parametrize(
    ("name", "depth"), [("qwen3_tts", "talker.depth"), ("fish_s2", "lm.fast"), ("csm", "lm.depth")]
)
def test_the_depth_decoder_is_looked_at(name, depth, monkeypatch):
    """The hidden states stay finite there, and so are the codes that NaN draws."""
    made = family(name)
    layer: nn.Module = made.get_submodule(f"{depth}.layers")[-1]
    weight = next(layer.parameters())
    monkeypatch.setattr(weight, "data", torch.full_like(weight, torch.nan))
    [listener] = serve(engine(made), {0: requests(name, 1)})
    assert listener.reason == "not_finite"


def sick_and_well(name, monkeypatch):
    """Return a family, a request that gives NaN, and a request with the same beginning that does not."""
    made = family(name)
    long = Request(text="hm" * 30, seed=SICK, max_frames=9)
    well = replace(long, seed=1)
    assert alone(name, well)
    sicken(made, monkeypatch)
    return made, long, well


@pytest.mark.parametrize("name", ["toy", "toy_guided"])
def test_pages_that_have_become_nan_end_one_request(name):
    """Otherwise they would end every later request with the same beginning."""
    request = Request(text="hm" * 30, seed=1, max_frames=9)
    assert alone(name, request)
    speaking = engine(family(name))
    [first] = serve(speaking, {0: [request]})
    filled = list(speaking.pages._cached)
    speaking.arena.by_page[filled] = 0xFF
    [second], [third] = serve(speaking, {0: [request]}), serve(speaking, {0: [request]})
    assert filled and second.reason == "not_finite"
    assert is_well(first, name, request) and is_well(third, name, request)
    assert speaking.pages.free == speaking.pages.num_pages


@pytest.mark.parametrize("name", ["toy", "toy_guided"])
def test_later_requests_share_no_page_of_a_request_that_left_before_its_nan_was_read(name, monkeypatch):
    made, long, well = sick_and_well(name, monkeypatch)
    speaking, left = engine(made, report_lag=1), Listener()
    speaking.speak("sick", long, left)
    speaking.turn()
    [model] = speaking.models.values()
    assert model.round.steps
    speaking.cancel("sick")
    speaking.turn()
    assert left.reason == "cancelled"
    [heard] = serve(speaking, {0: [well]})
    assert is_well(heard, name, well) and speaking.pages.shared == 0


def test_later_requests_share_no_page_of_a_request_whose_nan_is_read_meanwhile(monkeypatch):
    """The second one gets its slot after the first one's prompt was launched, and before its report is read."""
    made, long, well = sick_and_well("toy", monkeypatch)
    speaking, failed, heard = engine(made, report_lag=1), Listener(), Listener()
    speaking.speak("sick", long, failed)
    speaking.turn()
    speaking.speak("well", well, heard)
    while heard.end is None:
        speaking.turn()
    assert failed.reason == "not_finite" and is_well(heard, "toy", well)


@pytest.mark.parametrize("report_lag", [0, 1])
def test_later_requests_share_the_pages_of_a_request_after_its_first_report(report_lag):
    first = Request(text="hm" * 30, seed=1, max_frames=9)
    speaking = engine(family("toy"), report_lag=report_lag)
    listeners = serve(speaking, {0: [first], 2: [replace(first, seed=2)]})
    assert speaking.pages.shared > 0
    for listener, request in zip(listeners, (first, replace(first, seed=2)), strict=True):
        assert is_well(listener, "toy", request)


def spoil_free_pages(speaking: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each iteration, fill all pages that no request holds with bytes that are NaN in every dtype. No
    later request finds a prompt's pages."""
    run, arena, pages = speaking.rounds.run, speaking.arena, speaking.pages

    def spoiled() -> Any:
        arena.by_page[[page for page in range(arena.num_pages) if not pages._references[page]]] = 0xFF
        return run()

    monkeypatch.setattr(speaking.rounds, "run", spoiled)
    monkeypatch.setattr(pages, "publish", lambda *given: None)


@pytest.mark.parametrize("report_lag", [0, 1])
@pytest.mark.parametrize("name", EACH)
def test_a_request_reads_no_bytes_that_others_left_in_its_pages(name, report_lag, monkeypatch):
    """Nor those of scratch pages. Another model may have written them in another dtype."""
    asked = requests(name, 5, max_frames=12)
    speaking = engine(family(name), report_lag=report_lag)
    spoil_free_pages(speaking, monkeypatch)
    heard = serve(speaking, {0: asked[:3], 7: asked[3:]})
    assert all(is_well(listener, name, request) for listener, request in zip(heard, asked, strict=True))


@pytest.mark.parametrize(
    "name", ["toy_guided", "toy_late", pytest.param("cosyvoice2", marks=pytest.mark.slow)]
)
def test_a_launch_of_padded_rows_reads_no_bytes_of_others(name, monkeypatch):
    """As on a GPU, where a launch reads all pages of its page table, and a renderer its past in pages."""
    asked = requests(name, 3, max_frames=40)
    truth = [alone(name, request) for request in asked]
    assert truth
    LateStream.chance.seed(3)
    with masquerade():
        made = TOYS[name]() if name in TOYS else zoo.load(directory(name, "tiny"), "cuda", "float32")
        speaking = engine(made, report_lag=1)
        spoil_free_pages(speaking, monkeypatch)
        heard = serve(speaking, {0: asked})
    assert all(is_well(listener, name, request) for listener, request in zip(heard, asked, strict=True))
