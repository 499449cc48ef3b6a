"""Several models in one engine: on one arena of pages, each speaks as it does alone, and none can
keep another waiting for ever."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from models import NAMES, Clock, Listener, family, requests
from test_promises import at_rest
from toy import HUM, Toy

import zoo
from compile_cache.strategy import Whole
from serving.engine.device.arena import PAGE_TOKENS, Arena, common_page_bytes, row_bytes, token_bytes
from serving.engine.device.lowered import Lowered
from serving.engine.device.prepare_for_host import cache_place, cached, prepare_for_host
from serving.engine.engine import Engine, Finished, Full
from serving.engine.memory.memory_plan import usual_kv_bytes
from serving.engine.schedule.numbers import MAX_SKIPS
from zoo.contract import KV
from zoo.request import Request

# a row of 80 bytes beside the hum's 64, and 480 bytes a position beside 256
BUZZ = KV(num_layers=3, num_heads=1, head_dim=20)
FAMILIES = {"hum": family("toy"), "buzz": Toy(seed=9, kv=BUZZ), "qwen": family("qwen3_tts")}
LAGS = pytest.mark.parametrize("report_lag", [0, 1])
Asked = tuple[str, Request]  # of which model what is asked


def engine(*names: str, **settings) -> Engine:
    return Engine(
        {name: FAMILIES[name] for name in names},
        **{"max_slots": 2, "compile": False, "report_lag": 0, "clock": Clock(), **settings},
    )


def speak(engine: Engine, asked: Iterable[Asked]) -> list[Listener]:
    listeners = []
    for model, request in asked:
        listeners.append(Listener())
        engine.speak(f"{model}-{id(listeners[-1])}", request, listeners[-1], model)
    return listeners


def run(engine: Engine) -> None:
    for _ in range(2000):
        if not engine.turn():
            return
        engine.clock.now_s += 0.03
    raise AssertionError("the engine does not come to an end")


def same(listener: Listener, family: zoo.Family, request: Request) -> None:
    """It heard all that the request is alone, in the plain loop."""
    speech = zoo.generate(family, request)
    assert isinstance(listener.end, Finished) and listener.end.frames == len(speech.frames)
    np.testing.assert_allclose(listener.samples, speech.samples, rtol=0, atol=5e-5)


def long(**fields) -> Request:
    """One that speaks until its cap."""
    return Request(**{"text": "hmmmmmmmmmm", "temperature": 0.0, **fields})


# each as alone


@pytest.mark.slow
@LAGS
def test_each_model_speaks_as_it_does_alone(report_lag):
    """Every family there is, and one whose rows are odd. Requests come a few at a time, in no order, onto
    fewer slots and few pages."""
    families = {"buzz": FAMILIES["buzz"], **{name: family(name) for name in NAMES}}
    kv_memory_bytes = 12 * len(families) * common_page_bytes(list(families.values()))
    together = Engine(
        families,
        max_slots=2,
        kv_memory_bytes=kv_memory_bytes,
        compile=False,
        report_lag=report_lag,
        clock=Clock(),
    )
    assert len({model.runner.page_tokens for model in together.models.values()}) > 2
    asked = [
        (name, request) for name in families for request in requests("toy" if name == "buzz" else name, 4)
    ]
    chance = random.Random(report_lag)
    chance.shuffle(asked)
    listeners = []
    for i in range(0, len(asked), 3):
        listeners += speak(together, asked[i : i + 3])
        for _ in range(chance.randrange(6)):
            together.turn()
    run(together)
    for listener, (name, request) in zip(listeners, asked, strict=True):
        same(listener, families[name], request)


@LAGS
def test_models_of_two_dtypes_read_nothing_that_the_other_wrote(report_lag, monkeypatch):
    """All pages hold bytes that are NaN in both. The short requests' rows read on to the length of the long
    one's."""
    half = Toy(dtype=torch.bfloat16, kv=BUZZ)
    both = Engine(
        {"full": FAMILIES["hum"], "half": half},
        max_slots=3,
        kv_memory_bytes=16 * 16 * 480,
        compile=False,
        report_lag=report_lag,
        clock=Clock(),
    )
    both.arena.bytes.fill_(0xFF)
    monkeypatch.setattr(both.models["half"].runner.sizes, "step_rows", lambda count: 4)
    asked = [long(text=text, max_frames=10) for text in ("a", "b" * 40, "c")]
    for name, model in (("half", half), ("full", FAMILIES["hum"]), ("half", half)):
        listeners = speak(both, [(name, request) for request in asked])
        run(both)
        for listener, request in zip(listeners, asked, strict=True):
            same(listener, model, request)


@pytest.mark.slow
@LAGS
def test_prefix_pages_are_shared_by_one_models_requests_and_never_across(report_lag):
    """Two models with other weights and equal keys."""
    families = {"one": Toy(seed=1), "other": Toy(seed=2)}
    both = Engine(families, compile=False, report_lag=report_lag, clock=Clock())
    request = Request(text="x" * (2 * PAGE_TOKENS + 1), seed=1)
    shared = []
    for name in ("one", "other", "other", "one"):
        [listener] = speak(both, [(name, request)])
        run(both)
        same(listener, families[name], request)
        shared.append(both.stats()["pages_shared"])
    assert shared == [0, 0, 2, 4]


@pytest.mark.slow
@LAGS
def test_random_cancels_leave_every_page_and_slot_where_it_was(report_lag):
    both = engine(
        "hum",
        "buzz",
        max_slots=4,
        kv_memory_bytes=20 * common_page_bytes([FAMILIES["hum"], FAMILIES["buzz"]]),
        report_lag=report_lag,
    )
    before, chance = at_rest(both), random.Random(report_lag)
    listeners: dict[str, Listener] = {}
    cancels: dict[int, list[str]] = {}
    kinds = requests("toy", 20, max_frames=10)
    for turn in range(1500):
        for _ in range(
            min(chance.choice((0, 0, 1, 2)), 250 - len(listeners)) if len(both.intake.known) < 16 else 0
        ):
            model, id = chance.choice(("hum", "buzz")), f"request-{len(listeners)}"
            listeners[id] = Listener()
            both.speak(id, replace(chance.choice(kinds), seed=chance.getrandbits(62)), listeners[id], model)
            cancels.setdefault(turn + chance.choice((0, 1, 2, 5, 13, 1000)), []).append(id)
        for id in cancels.get(turn, ()):
            both.cancel(id)
        if not both.turn() and len(listeners) == 250:
            break
        both.clock.now_s += 0.05
    both.turn()  # what was in flight when the last one ended
    ends = Counter(listener.reason for listener in listeners.values())
    assert len(listeners) == 250 and min(ends["cancelled"], ends["length"]) > 50
    assert both.stats()["pages_shared"] > 0
    both.inbox.news.cancelled.clear()  # some cancel long after their end
    assert at_rest(both) == before


def test_the_end_of_a_request_frees_its_own_pages_alone():
    both = engine("hum", "buzz")
    everything = both.pages.free
    listeners = speak(both, [("hum", long()), ("hum", long(seed=1)), ("hum", long(seed=2)), ("buzz", long())])
    for _ in range(5):
        both.turn()
    [held] = both.models["buzz"].running[0].pages.lanes
    assert both.pages.free < everything - len(held)
    for job in [*both.models["hum"].running.values(), *both.models["hum"].queue.jobs]:
        both.cancel(job.id)
    both.turn()
    assert both.pages.free == everything - len(held) and [listener.end is None for listener in listeners] == [
        False,
        False,
        False,
        True,
    ]
    run(both)
    same(listeners[3], FAMILIES["buzz"], long())


# nobody waits for ever


def holder(engine: Engine, listener: Listener) -> bool:
    """Whether this listener's request has a slot."""
    return any(
        job.request.deliver is listener for model in engine.models.values() for job in model.running.values()
    )


def test_requests_of_another_model_skip_one_that_lacks_pages_a_bounded_number_of_times():
    """The request at the head of the queue needs most of the arena. The other model could always use the free
    pages, and gets new requests without end."""
    both = engine(
        "hum",
        "buzz",
        max_slots=4,
        kv_memory_bytes=8 * common_page_bytes([FAMILIES["hum"], FAMILIES["buzz"]]),
        swap_memory_bytes=0,
    )
    # a page each
    small = [("hum", long(max_frames=12, text=text)) for text in ("aaaa", "bbbb", "cccc", "dddd")]
    early = speak(both, small[:3])
    both.turn()
    [large] = speak(both, [("buzz", long(text="0123456789", max_frames=60))])  # five of six pages
    late = speak(both, small)
    turns = 0
    while not holder(both, large):
        both.turn()
        late += speak(both, small[:1])
        passed = sum(bool(holder(both, listener) or listener.end) for listener in late)
        assert passed <= MAX_SKIPS or holder(both, large)
        turns += 1
        assert turns < 100, "overtaken for ever"
    assert turns > 5 and all(listener.end for listener in early[:2])
    run(both)
    assert all(isinstance(listener.end, Finished) for listener in (*early, large, *late))


def test_a_model_without_a_free_slot_does_not_delay_others():
    both = engine("hum", "buzz", max_slots=1)
    first, second, other = speak(both, [("hum", long()), ("hum", long(seed=1)), ("buzz", long())])
    both.turn()
    assert [holder(both, listener) for listener in (first, second, other)] == [True, False, True]
    assert [model["waiting"] for model in both.stats()["models"].values()] == [1, 0]


def test_a_full_queue_refuses_requests_of_its_own_model_alone():
    both = engine("hum", "buzz", max_waiting=2)
    speak(both, [("hum", long()), ("hum", long(seed=1))])
    with pytest.raises(Full, match="2 requests are waiting already"):
        both.speak("third", long(), Listener(), "hum")
    speak(both, [("buzz", long())])
    both.turn()
    assert {name: (model["running"], model["waiting"]) for name, model in both.stats()["models"].items()} == {
        "hum": (2, 0),
        "buzz": (1, 0),
    }


def test_each_model_with_work_has_one_round_an_iteration(monkeypatch):
    three = engine(*FAMILIES)
    calls: Counter[str] = Counter()
    for name, model in three.models.items():
        monkeypatch.setattr(model.runner, "step", counted(model.runner.step, calls, name, "step"))
        for question in ("next_chunks", "take_due_windows", "finished_slots"):
            monkeypatch.setattr(
                model.scheduler, question, counted(getattr(model.scheduler, question), calls, name, question)
            )
    speak(three, [("hum", long()), ("hum", long(seed=1)), ("buzz", long())])
    for _ in range(10):
        three.turn()
    assert len(calls) == 8 and set(calls.values()) == {10} and {name for name, _ in calls} == {"hum", "buzz"}


def counted(function, calls, *key):
    def call(*args):
        calls[key] += 1
        return function(*args)

    return call


# pages


SHAPES = [
    [HUM],
    [HUM, BUZZ],
    [KV(28, 8, 128), KV(24, 2, 64), KV(36, 8, 80)],
    [KV(1, 1, 2), KV(40, 16, 128)],
    [KV(2, 3, 6), KV(2, 5, 10)],
]


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16, torch.float32]], ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_a_page_holds_whole_rows_of_every_model_and_wastes_little(shapes, dtypes):
    with torch.device("meta"):
        families = [Toy(kv=kv, dtype=dtypes[i % len(dtypes)]) for i, kv in enumerate(shapes)]
    size, largest = common_page_bytes(families), max(map(token_bytes, families))
    assert PAGE_TOKENS * largest <= size <= 2 * PAGE_TOKENS * largest
    if len(shapes) == 1:
        assert size == PAGE_TOKENS * largest
    for each in families:
        assert size % row_bytes(each) == 0
        assert size % token_bytes(each) < size / PAGE_TOKENS


def test_rows_that_fit_no_page_are_refused():
    families = [Toy(kv=KV(1, 1, 254)), Toy(kv=KV(1, 1, 262))]  # 8 * 127 and 8 * 131 bytes
    with pytest.raises(
        ValueError,
        match=r"toy 1016, toy 1048, so a page of whole rows takes 133096, where 33536 are needed: serve them apart",
    ):
        Arena(families, 1 << 30)


def test_the_arena_has_room_for_all_models():
    both = engine("hum", "buzz", max_slots=3)
    wanted = sum(usual_kv_bytes(FAMILIES[name], 3) for name in ("hum", "buzz"))
    assert wanted - both.arena.page_bytes < both.arena.bytes.numel() <= wanted
    assert both.stats()["pages"] == both.arena.num_pages - 2  # a scratch page for each
    with pytest.raises(
        ValueError,
        match="100 bytes of KV memory hold no page: a page of these models takes 7680, and 3 are the least",
    ):
        engine("hum", "buzz", kv_memory_bytes=100)


# names, warmth


def test_a_model_is_chosen_by_its_name():
    both = engine("hum", "buzz")
    for name in (None, "tts-1"):
        with pytest.raises(ValueError, match="is not served here; there is: hum, buzz") as refused:
            both.speak("request", long(), Listener(), name)
        assert refused.value.param == "model"
    listeners = speak(both, [("buzz", long(seed=3)), ("hum", long(seed=3))])
    run(both)
    for listener, name in zip(listeners, ("buzz", "hum"), strict=True):
        same(listener, FAMILIES[name], long(seed=3))
    assert not np.array_equal(listeners[0].samples, listeners[1].samples)


def test_progress_is_over_all_models():
    told: list[tuple[float, str]] = []
    engine("hum", "buzz").warm(lambda fraction, stage: told.append((fraction, stage)))
    fractions, stages = zip(*told, strict=True)
    assert list(fractions) == sorted(fractions) and fractions[0] == 0 and fractions[-1] == 1
    assert (
        stages[0] == "hum: step"
        and stages[-1] == "buzz: warm"
        and fractions[stages.index("buzz: step")] == 0.5
    )


@pytest.mark.compile
def test_every_models_code_is_kept_in_its_own_place(tmp_path, monkeypatch):
    """And the largest says how many threads all have."""
    sized: list[zoo.Family] = []
    monkeypatch.setattr("compile_cache.threads.set_num_threads", lambda family, **_: sized.append(family))
    monkeypatch.setattr("serving.engine.device.prepare_for_host.kernels.build", lambda: None)
    monkeypatch.setattr(Lowered, "take_step", lambda lowered, entry, batch: entered.append(entry.directory))
    monkeypatch.setenv("ZOO_CACHE_DIR", str(tmp_path))
    small, large = Toy(), Toy(kv=BUZZ)
    prepare_for_host(small, large)
    assert sized == [large]
    entered: list[Path] = []
    backend = partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(
        "serving.engine.device.lowered.lower", lambda verb, how: backend(verb) if how == Whole() else verb
    )
    for _ in range(2):
        Engine({"small": small, "large": large}).warm(lambda *_: None, cached)
    places = [cache_place(small), cache_place(large)]
    assert entered == [place.with_name(f".{place.name}.making") for place in places] + places
    assert places[0] != places[1] and all(place.is_dir() for place in places)


@pytest.mark.compile
def test_nothing_compiles_once_all_are_warm(monkeypatch):
    """The code lowered for one model is not thrown away for the other."""
    torch._dynamo.reset()
    lower = partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(
        "serving.engine.device.lowered.lower", lambda verb, how: lower(verb) if how == Whole() else verb
    )
    families = {"hum": Toy(seed=1), "buzz": Toy(seed=2, kv=BUZZ)}
    both = Engine(families, compile=True, report_lag=0, clock=Clock())
    both.warm(lambda *_: None)
    asked = [(name, request) for request in requests("toy", 6) for name in families]
    with torch.compiler.set_stance("fail_on_recompile"):
        listeners = speak(both, asked)
        run(both)
    for listener, (name, request) in zip(listeners, asked, strict=True):
        same(listener, families[name], request)
