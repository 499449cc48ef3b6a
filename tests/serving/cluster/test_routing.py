"""Which replica a request goes to, and how many replicas there should be."""

from collections import OrderedDict

import pytest

from serving import protocol
from serving.cluster import routing
from serving.cluster.routing import Ask, Load, ask_of, predicted_s, ranked
from serving.cluster.scaling import load_of, num_wanted
from serving.histogram import Histogram
from serving.totals import total


def figures(expected_s=(0.1, 0.2, 0.6), **fields):
    """Return a model with four places, whose listeners begin to wait with the fifth request."""
    fields = {
        "slots": 8,
        "running": 0,
        "waiting": 0,
        "underruns": 0,
        "graph_misses": 0,
        "places": 4,
        **fields,
    }
    return protocol.ModelStats(**fields, expected_first_audio_s=list(expected_s))


def load(*expected_s, **fields):
    return Load(True, {"m": figures(*([expected_s] if expected_s else []))}, **fields)


def rank(ask, **loads):
    return ranked(ask, loads.items())


def test_all_gateways_send_a_new_conversation_to_one_replica():
    busy, idle = {"a": load(num_open=3), "b": load()}, {"a": load(), "b": load(num_open=9)}
    picks = {name: rank(Ask("m", conversation=name), **busy) for name in map(str, range(20))}
    assert all(rank(Ask("m", conversation=name), **idle) == order for name, order in picks.items())
    assert {order[0] for order in picks.values()} == {"a", "b"}


@pytest.mark.parametrize(("num", "seconds"), [(0, 0.1), (3, 0.2), (4, 0.3), (7, 0.6), (11, 1.0)])
def test_first_audio_is_later_with_each_open_request(num, seconds):
    assert predicted_s(figures(), num) == pytest.approx(seconds)


def test_a_model_with_one_place_is_predicted_too():
    assert predicted_s(figures((0.1, 0.1, 0.5), places=1), 2) == pytest.approx(0.9)


def test_before_anything_is_predicted_the_fewest_requests_decide():
    assert rank(Ask("m"), a=Load(True, num_open=2), b=Load(True, num_open=1)) == ["b", "a"]


def test_the_replica_that_speaks_soonest_is_first():
    assert rank(Ask("m"), a=load(0.5, 0.6, 0.9), b=load(num_open=3)) == ["b", "a"]
    assert rank(Ask("m"), a=load(0.5, 0.6, 0.9), b=load(num_open=8)) == ["a", "b"]


def test_requests_that_began_since_the_report_count():
    """Otherwise all requests of a second would go to one replica."""
    assert rank(Ask("m"), a=load(num_open=5), b=load(0.2, 0.3, 0.7)) == ["b", "a"]
    assert rank(Ask("m"), a=load(num_open=2), b=load(0.2, 0.3, 0.7)) == ["a", "b"]


def test_requests_of_other_gateways_count():
    shared = load(num_open=2)
    shared.report({"m": figures(running=5, waiting=1, preparing=1)})
    assert shared.num_others == 5
    assert rank(Ask("m"), a=shared, b=load(num_open=6)) == ["b", "a"]


def test_between_equals_the_one_with_fewer_requests_is_first():
    assert rank(Ask("m"), a=load(0.1, 0.1, 0.1, num_open=2), b=load(0.1, 0.1, 0.1, num_open=1)) == ["b", "a"]


def test_a_voice_goes_where_it_is_known_as_long_as_that_saves_time():
    def knows():
        return load(0.12, 0.22, 0.62, known=OrderedDict(anna=None))

    assert rank(Ask("m", voice="anna", saved_s=0.03), a=load(), b=knows()) == ["b", "a"]
    assert rank(Ask("m", voice="anna", saved_s=0.01), a=load(), b=knows()) == ["a", "b"]
    assert rank(Ask("m", voice="bert", saved_s=0.03), a=load(), b=knows()) == ["a", "b"]


def test_replicas_that_are_not_ready_or_have_refused_are_left_out():
    assert rank(Ask("m", avoided=frozenset("c")), a=Load(), b=load(), c=load()) == ["b"]


def test_a_replica_forgets_the_oldest_voices(monkeypatch):
    monkeypatch.setattr(routing, "MAX_KNOWN", 2)
    one = load()
    for voice in ("anna", "bert", "anna", "carl", ""):
        one.learn(voice)
    assert list(one.known) == ["anna", "carl"]


def test_equal_recordings_are_one_voice():
    def voice(clip):
        return ask_of(protocol.Speak("r", "m", protocol.Request("x"), [protocol.Reference(clip)]), ()).voice

    def sent(samples):
        return voice(protocol.AudioClip(samples, 16000))

    def stored(directory):
        return voice(protocol.StoredClip(b"1", 16, 16000, directory))

    assert sent(b"1" * 64) == sent(b"1" * 64) != sent(b"2" * 64)
    assert stored("/voices/anna") == stored("/voices/anna") != stored("/voices/bert")
    assert ask_of(protocol.Speak("r", "m", protocol.Request("x")), ()).voice == ""
    named = ask_of(protocol.Speak("r", "m", protocol.Request("x", voice="anna")), ("a",))
    assert named.voice and named.avoided == {"a"}


def stats(**model):
    return protocol.Stats(
        100, 60, 1, 2, 0, {"m": figures(running=2, waiting=1, **model)}, turn_times=Histogram([1] * 15, 2.0)
    )


def test_figures_of_replicas_are_added():
    first = stats(predicted_turn_s=0.1, expected_s=(0.5, 0.5, 0.9))
    second = stats(places=6, predicted_turn_s=0.2, first_audio_s=0.3, expected_s=(0.2, 0.3, 0.9))
    whole = total({"a": first, "b": second})
    model = whole.models["m"]
    assert (whole.pages, whole.pages_free, model.slots, model.running, model.places) == (200, 120, 16, 4, 10)
    assert (model.predicted_turn_s, model.first_audio_s) == (0.2, 0.3)
    assert model.expected_first_audio_s == [0.2, 0.3, 0.9]
    assert (whole.turn_times.counts, whole.turn_times.sum_s) == ([2] * 15, 4.0)
    assert whole.replicas == {"a": first, "b": second}


def test_load_is_the_wait_for_audio_and_the_busy_share_of_places():
    load = load_of(stats(preparing=4))
    assert load == {"expected_first_audio_s": pytest.approx(0.6), "busy": 7 / 4}
    assert load_of(None) == {}


@pytest.mark.parametrize(
    ("waits_s", "shares", "wanted"),
    [
        ((0.2, 0.3), (0.9, 0.9), 2),
        ((1.2, 1.3), (1.0, 1.0), 3),
        ((0.1, 0.1), (0.3, 0.3), 1),
        ((0.1, 0.1), (0.6, 0.3), 2),
        ((0.1,), (0.0,), 2),
        ((), (), 2),
    ],
)
def test_replicas_follow_the_wait_for_audio(waits_s, shares, wanted):
    """A replica that tells nothing yet is no reason to end one."""
    assert num_wanted(2, waits_s, shares) == wanted


def test_the_last_replica_stays():
    assert num_wanted(1, (0.0,), (0.0,)) == 1
