"""Several API keys: each has a name, a rate and a quota, and its use is counted."""

import hashlib
import json

import msgspec
import pytest
from fake_engine import ANSWERER, CLONER, MODEL, TRANSCRIBER
from http_server import Server, error
from litestar.exceptions import HTTPException
from sessions import spoken
from uploads import recording
from websockets.sync.client import connect

from serving.api_keys import ApiKey, all_keys, read_file
from serving.http.keys import DAY_S, Key, Rate
from serving.http.metrics import Metrics

TALKER = msgspec.structs.replace(MODEL, shares_turns=True)
FILE = [
    {"name": "anna", "key": "sk-anna"},
    {"name": "hashed", "sha256": hashlib.sha256(b"sk-hashed").hexdigest()},
    {"name": "slow", "key": "sk-slow", "requests_per_minute": 2},
    {"name": "short", "key": "sk-short", "characters_per_day": 20},
    {"name": "brief", "key": "sk-brief", "audio_s_per_day": 0.001},
]


@pytest.fixture
def server(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(FILE))
    with Server(tmp_path, api_keys=str(path)) as server:
        yield server


def ask(server, key, text="frames 1", path="/v1/audio/speech", **fields):
    body = {"input": text, "response_format": "wav", **fields}
    return server.http.post(path, json=body, headers=bearer(key))


def bearer(key):
    return {"authorization": f"Bearer sk-{key}"}


def metric(server, name):
    """Return the samples of a metric, by key."""
    lines = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith(name)]
    return {line.split('key="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


def test_every_key_of_the_file_opens_the_server_and_no_other_does(server):
    assert [ask(server, name).status_code for name in ("anna", "hashed", "slow")] == [200] * 3
    for wrong in ("no", hashlib.sha256(b"sk-hashed").hexdigest(), "ann", "annaa"):
        assert error(ask(server, wrong), 401)["code"] == "invalid_api_key"
    assert error(server.http.get("/v1/models"), 401)["code"] == "invalid_api_key"


def test_a_rate_is_refused_with_the_time_to_wait(server):
    assert [ask(server, "slow").status_code for _ in range(2)] == [200, 200]
    answer = ask(server, "slow")
    assert error(answer, 429)["code"] == "rate_limit_exceeded"
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert ask(server, "anna").status_code == 200
    assert server.http.get("/v1/models", headers=bearer("slow")).status_code == 200


def test_a_quota_of_characters_counts_what_was_spoken(server):
    assert error(ask(server, "short", "nonsense " * 4), 429)["code"] == "insufficient_quota"
    error(ask(server, "short", "silent 123456789"), 422)  # nothing was spoken
    assert ask(server, "short", "frames 1 12").status_code == 200
    answer = ask(server, "short", "frames 1 12")
    message = error(answer, 429)["message"]
    assert "'short' has used 11 of 20 characters of today, and this text has 11" in message
    assert ask(server, "short", "frames 1").status_code == 200


def test_a_quota_of_audio_ends_with_the_request_that_reaches_it(server):
    assert ask(server, "brief").status_code == 200
    assert "seconds of audio" in error(ask(server, "brief"), 429)["message"]


def test_each_item_of_a_batch_counts(server):
    body = {"items": [{"input": "frames 1"}] * 3, "response_format": "wav"}
    answer = server.http.post("/v1/audio/speech/batch", json=body, headers=bearer("slow"))
    codes = [one["error"] and one["error"]["code"] for one in answer.json()["data"]]
    assert codes == [None, None, "rate_limit_exceeded"]


def test_each_utterance_of_a_session_counts_once(tmp_path):
    keys = [{"name": "slow", "key": "sk-slow", "requests_per_minute": 2}]
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    with Server(tmp_path, models=[MODEL], api_keys=str(tmp_path / "keys.json")) as server:
        spoken(server, "frames 1 one. frames 2 two.", 100, headers=bearer("slow"))
        assert metric(server, "zoo_key_requests_total") == {"slow": 1}
        assert metric(server, "zoo_key_characters_total") == {"slow": len("frames 1 one.frames 2 two.")}


@pytest.fixture
def once(tmp_path):
    """Return a server whose only key may send one request a minute."""
    (tmp_path / "keys.json").write_text('[{"name": "once", "key": "sk-once", "requests_per_minute": 1}]')
    models = [ANSWERER, TRANSCRIBER, CLONER]
    with Server(tmp_path, models=models, api_keys=str(tmp_path / "keys.json")) as server:
        yield server


def test_transcriptions_count_for_the_rate(once):
    def written():
        data, files = {"model": "transcriber"}, {"file": ("a.wav", recording())}
        return once.http.post("/v1/audio/transcriptions", data=data, files=files, headers=bearer("once"))

    assert written().status_code == 200
    assert error(written(), 429)["code"] == "rate_limit_exceeded"


def test_uploads_of_voices_count_for_the_rate(once):
    def uploaded():
        data, files = {"name": "anna"}, {"audio_sample": ("a.wav", recording())}
        return once.http.post("/v1/audio/voices", data=data, files=files, headers=bearer("once"))

    assert uploaded().status_code == 200
    assert error(uploaded(), 429)["code"] == "rate_limit_exceeded"


def test_conversations_count_for_the_rate(once):
    def answered():
        body = {"model": "answerer", "messages": [{"role": "user", "content": "frames 1"}]}
        return once.http.post("/v1/chat/completions", json=body, headers=bearer("once"))

    assert answered().status_code == 200
    assert error(answered(), 429)["code"] == "rate_limit_exceeded"


def test_answers_in_a_realtime_session_count_for_the_rate(once):
    url = once.url.replace("http", "ws") + "/v1/realtime?model=answerer"
    content = [{"type": "input_text", "text": "frames 1"}]
    item = {"type": "message", "role": "user", "content": content}
    seen = []
    with connect(url, additional_headers=bearer("once"), compression=None) as socket:
        socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
        for last in ("response.done", "error"):
            socket.send(json.dumps({"type": "response.create"}))
            while not seen or seen[-1]["type"] != last:
                seen.append(json.loads(socket.recv(timeout=5)))
    assert seen[-1]["error"]["code"] == "rate_limit_exceeded"


def test_the_use_of_each_key_is_in_the_metrics(server):
    ask(server, "anna", "frames 240")
    ask(server, "slow")
    ask(server, "slow")
    ask(server, "slow")
    assert metric(server, "zoo_key_requests_total") == {
        "anna": 1,
        "hashed": 0,
        "slow": 2,
        "short": 0,
        "brief": 0,
    }
    assert metric(server, "zoo_key_characters_total")["anna"] == len("frames 240")
    assert metric(server, "zoo_key_audio_seconds_total")["anna"] == 1.0
    assert sum(metric(server, 'zoo_key_refused_total{key="slow",limit="requests_per_minute"').values()) == 1


def test_a_conversation_belongs_to_the_key_that_names_it(tmp_path):
    (tmp_path / "keys.json").write_text(json.dumps(FILE))
    with Server(tmp_path, models=[TALKER], api_keys=str(tmp_path / "keys.json")) as server:
        for key in ("anna", "hashed", "anna"):
            assert ask(server, key, conversation="one").status_code == 200
        first, other, again = [request["conversation"] for request in server.engine.asked.values()]
    assert first == again != other and "one" not in (first, other)


def test_a_key_and_a_file_are_possible_together(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(FILE))
    assert [one.name for one in all_keys("sk-x", path)][-1] == "default"
    with pytest.raises(ValueError, match="is there twice"):
        all_keys("sk-anna", path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}", "not a list of API keys"),
        ("[]", "has 0 API keys"),
        ('[{"name": "a b", "key": "k"}]', "not a list of API keys"),
        ('[{"name": "a"}]', "exactly one of key and sha256"),
        ('[{"name": "a", "key": "k", "sha256": "' + "0" * 64 + '"}]', "exactly one of key and sha256"),
        ('[{"name": "a", "sha256": "00"}]', "not a list of API keys"),
        ('[{"name": "a", "key": "k k"}]', "printable ASCII"),
        ('[{"name": "a", "key": "k"}, {"name": "a", "key": "l"}]', "is there twice"),
        ('[{"name": "a", "key": "k", "rate": 3}]', "unknown field `rate`"),
        ('[{"name": "a", "key": "k", "requests_per_minute": 0}]', "not a list of API keys"),
    ],
)
def test_a_wrong_file_is_refused_with_a_reason(tmp_path, content, says):
    (tmp_path / "keys.json").write_text(content)
    with pytest.raises(ValueError, match=says):
        read_file(tmp_path / "keys.json")


def test_a_rate_allows_a_burst_and_then_its_share():
    now_s = 0.0
    rate = Rate(60, lambda: now_s)
    assert [rate.take() for _ in range(60)] == [0.0] * 60
    assert rate.take() == 1.0
    now_s = 0.5
    assert rate.take() == 0.5
    now_s = 1.0
    assert (rate.take(), rate.take()) == (0.0, 1.0)


def test_a_quota_begins_anew_at_midnight():
    from serving.engine_client import EngineClient

    now_s = DAY_S - 10.0
    key = Key(ApiKey("a", key="k", characters_per_day=5), Metrics(EngineClient("/nowhere")), lambda: now_s)
    key.admit(5)
    key.spoke(5, 1.0)
    with pytest.raises(Exception, match="has used 5 of 5") as refused:
        key.admit(1)
    assert refused.value.headers["retry-after"] == "10"
    now_s += 11
    key.admit(5)


def test_a_quota_of_audio_is_used_up_to_the_second_and_begins_anew_at_midnight():
    from serving.engine_client import EngineClient

    now_s = DAY_S - 10.0
    key = Key(ApiKey("a", key="k", audio_s_per_day=2), Metrics(EngineClient("/nowhere")), lambda: now_s)
    key.admit(5)
    key.spoke(5, 2.0)
    with pytest.raises(HTTPException, match="has used 2 of 2 seconds of audio"):
        key.admit(5)
    now_s += 11
    key.admit(5)
