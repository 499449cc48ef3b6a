"""Which model is loaded or unloaded."""

import pytest

from serving.on_demand.decide import Decision, Look, decide

ROOM = 100


def cold(name, num_bytes=40, asked_s=None):
    return Look(name, "cold" if asked_s is None else "waiting", num_bytes, asked_s)


def idle(name, since_s, num_bytes=40):
    return Look(name, "loaded", num_bytes, idle_s=since_s)


def busy(name, num_bytes=40):
    return Look(name, "loaded", num_bytes)


def decided(*models, keep_alive_s=300.0, now_s=1000.0):
    return decide(models, ROOM, keep_alive_s, now_s)


def test_without_requests_nothing_happens():
    assert decided(cold("a"), busy("b")) == Decision()


def test_the_model_that_was_asked_for_first_is_loaded():
    assert decided(cold("a", asked_s=7.0), cold("b", asked_s=6.0)).load == "b"


@pytest.mark.parametrize("stage", ["loading", "warming"])
def test_one_model_is_loaded_at_a_time(stage):
    assert decided(Look("a", stage, 10), cold("b", asked_s=1.0)).load is None


@pytest.mark.parametrize(
    ("keep_alive_s", "gone", "next_s"),
    [(300.0, ("a",), 1001.0), (0.0, ("a", "b"), None), (None, (), None), (400.0, (), 1000.5)],
)
def test_an_idle_model_is_unloaded_after_the_keep_alive(keep_alive_s, gone, next_s):
    decision = decided(idle("a", 600.5), idle("b", 701.0), busy("c"), keep_alive_s=keep_alive_s)
    assert decision == Decision(None, gone, next_s)


def test_idle_models_make_room_the_one_that_was_idle_longest_first():
    models = idle("a", 900.0, 30), idle("b", 800.0, 30), busy("c", 30)
    assert decided(*models, cold("d", 40, 999.0)) == Decision(None, ("b",), 1200.0)
    assert decided(*models, cold("d", 70, 999.0)) == Decision(None, ("b", "a"), None)


def test_no_model_is_unloaded_in_vain():
    decision = decided(idle("a", 900.0, 30), busy("b", 60), cold("c", 60, 999.0))
    assert decision == Decision(None, (), 1200.0)


def test_a_model_that_is_being_unloaded_still_has_its_memory():
    models = Look("a", "unloading", 80), idle("b", 900.0, 20), cold("c", 40, 999.0)
    assert decided(*models) == Decision(None, (), 1200.0)  # there will be room without `b` leaving
    assert decided(cold("a", 80), *models[1:]).load == "c"


def test_a_model_that_leaves_anyway_makes_room():
    assert decided(idle("a", 100.0, 80), idle("b", 900.0, 20), cold("c", 80, 999.0)).unload == ("a",)


def test_what_fits_unloads_nothing():
    assert decided(idle("a", 900.0, 60), cold("b", 40, 999.0)) == Decision("b", (), 1200.0)
