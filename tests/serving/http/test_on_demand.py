"""Models on demand, as clients of the HTTP process see them; the fake engine stands for the gateway."""

import json

import msgspec
import pytest
from fake_engine import ANSWERER, MODEL, FakeEngine, frame
from http_server import Server, until
from metrics import outcomes, samples
from sessions import spoken

from serving import protocol

OTHER = msgspec.structs.replace(MODEL, id="other")
STATES = {
    "fake": protocol.ModelState("loaded", 1.0, loads=3, failures=1, load_s=7.5, planned_bytes=100),
    "other": protocol.ModelState("cold", problem="its weights are damaged"),
    "answerer": protocol.ModelState("warming", 0.4),
}
LOADING = [("loading", 0.0), ("warming", 0.4)]


def tell_states(server):
    server.call(server.engine.tell, protocol.ModelStates(STATES))
    until(lambda: server.app.state.server.engine.states)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), models=[MODEL, OTHER, ANSWERER]) as server:
        tell_states(server)
        yield server


def test_the_list_of_models_says_which_are_loaded(server):
    models = server.http.get("/v1/models").json()["data"]
    assert [(model["id"], model["state"], model["progress"]) for model in models] == [
        ("fake", "loaded", 1.0),
        ("other", "cold", 0.0),
        ("answerer", "warming", 0.4),
    ]


def test_health_says_which_models_are_loaded_and_what_went_wrong(server):
    health = server.http.get("/health").json()
    assert health["status"] == "alive"
    assert health["models"] == {
        name: {"state": state.stage, "progress": state.progress, "problem": state.problem}
        for name, state in STATES.items()
    }


def test_without_models_on_demand_all_are_loaded(tmp_path):
    with Server(tmp_path) as server:
        [model] = server.http.get("/v1/models").json()["data"]
        assert (model["state"], model["progress"]) == ("loaded", 1.0)
        assert server.http.get("/health").json() == {"status": "alive"}


def test_private_metrics_keep_the_models_private(tmp_path):
    with Server(tmp_path, api_key="sk", private_metrics=True) as server:
        tell_states(server)
        assert server.http.get("/health").json() == {"status": "alive"}


def test_metrics_count_loads(server):
    read = samples(server)
    names = ("loaded", "loads_total", "load_failures_total", "load_seconds_total", "planned_bytes")
    assert [read[f"zoo_model_{name}", "fake"] for name in names] == [1, 3, 1, 7.5, 100]
    assert read["zoo_model_loaded", "other"] == 0


def test_a_stream_of_events_says_how_far_the_model_is(server):
    answer = server.speak("cold 2", response_format="pcm", stream_format="sse")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    told = [event for event in events if event["type"] == "speech.model.loading"]
    assert [(event["model"], event["state"], event["progress"]) for event in told] == [
        ("fake", *each) for each in LOADING
    ]
    assert [event["type"] for event in events[2:]] == ["speech.audio.delta"] * 2 + ["speech.audio.done"]


def test_events_of_a_model_that_is_not_loaded_in_time_end_with_the_error(server, monkeypatch):
    speak = FakeEngine.speak

    async def refuse(self, writer, id, words):
        writer.write(protocol.pack(protocol.Loading(id, protocol.ModelState("loading", 0.0))))
        await speak(self, writer, id, ["full"])

    monkeypatch.setattr(FakeEngine, "speak", refuse)
    before = outcomes(server).get("unavailable", 0)
    answer = server.speak("frames 1", stream_format="sse")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert [event["type"] for event in events] == ["speech.model.loading", "error"]
    assert events[-1]["error"]["code"] == "engine_full"
    assert outcomes(server)["unavailable"] == before + 1


def test_an_answer_in_audio_waits_and_is_the_same(server):
    assert server.speak("cold 2").content == server.speak("frames 2").content
    assert server.speak("cold 2", stream=False).content[44:] == frame(0) + frame(1)


def test_a_session_says_how_far_the_model_is(server):
    events, audio = spoken(server, "cold 2")
    told = [event for event in events if event["type"] == "model.loading"]
    assert [(event["utterance"], event["model"], event["state"], event["progress"]) for event in told] == [
        (1, "fake", *each) for each in LOADING
    ]
    assert audio == frame(0) + frame(1)
