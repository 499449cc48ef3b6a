"""Speech by URL: a signed URL speaks, and no other does, whether the server has an API key or not."""

import json
from urllib.parse import parse_qsl, urlencode

import pytest
from fake_engine import CLONER, MODEL
from http_server import Server, error

from serving.http.quota import client_address
from serving.http.signed_urls import MAX_URL_CHARS, Links
from serving.http.speech import Speech

KEY = {"authorization": "Bearer sk-a"}
ASK = {"input": "frames 3 größe & co", "voice": "ryan", "response_format": "pcm", "seed": 5, "cfg_scale": 1.5}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("s") / "keys.json"
    path.write_text(json.dumps([{"name": "anna", "key": "sk-a"}, {"name": "bert", "key": "sk-b"}]))
    with Server(path.parent, api_keys=str(path), speech_urls=True) as server:
        yield server


@pytest.fixture(scope="module")
def keyless(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), models=[MODEL, CLONER], speech_urls=True) as server:
        yield server


def signed(server, headers=KEY, **fields):
    answer = server.http.post("/v1/audio/speech/url", json=ASK | fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["url"]


def at(server):
    """Return a function that sets the server's clock forward."""
    links = server.app.state.links
    now_s = links._now_s

    def forward(seconds):
        links._now_s = (lambda: now_s() + seconds) if seconds else now_s

    return forward


def test_a_signed_url_speaks_without_a_header(server):
    answer = server.http.get(signed(server))
    assert answer.status_code == 200 and answer.headers["content-type"] == "audio/pcm"
    said = list(server.engine.asked.values())[-1]
    assert (said["text"], said["voice"], said["seed"]) == (ASK["input"], "ryan", 5)
    assert said["options"] == {"cfg_scale": 1.5}
    assert answer.content == server.http.post("/v1/audio/speech", json=ASK, headers=KEY).content


def test_the_memory_of_a_url_is_charged_to_its_client(server, monkeypatch):
    charged, ask = [], Speech.ask

    async def noted(self, send):
        charged.append(client_address.get())
        await ask(self, send)

    monkeypatch.setattr(Speech, "ask", noted)
    assert server.http.get(signed(server)).status_code == 200
    assert charged == ["127.0.0.1"]


def test_booleans_numbers_and_events_survive_the_url(server):
    answer = server.http.get(signed(server, split_text=False, speed=1.5, stream_format="sse"))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert list(server.engine.asked.values())[-1]["split_text"] is False
    assert list(server.engine.messages.values())[-1].listener.speed == 1.5


def test_options_that_are_null_are_not_in_the_url(server):
    url = signed(server, cfg_scale=None)
    assert "cfg_scale" not in url and server.http.get(url).status_code == 200


@pytest.mark.parametrize("change", ["input", "expires", "key", "signature", "more", "nothing"])
def test_every_change_of_a_url_is_refused(server, change):
    path, _, query = signed(server).partition("?")
    fields = dict(parse_qsl(query))
    match change:
        case "input":
            fields["input"] = "frames 1"
        case "expires":
            fields["expires"] = str(int(fields["expires"]) + 1)
        case "key":
            fields["key"] = "bert"
        case "signature":
            del fields["signature"]
        case "more":
            fields["speed"] = "2"
        case "nothing":
            assert server.http.get(f"{path}?{urlencode(fields)}").status_code == 200
            return
    fault = error(server.http.get(f"{path}?{urlencode(fields)}"), 401)
    assert fault["code"] == "invalid_signature"


def test_a_url_expires(server):
    url, forward = signed(server, expires_in_s=600), at(server)
    forward(500)
    assert server.http.get(url).status_code == 200
    forward(602)
    assert error(server.http.get(url), 403)["code"] == "expired"
    forward(0)


def test_a_time_may_be_text_as_other_numbers_may(server):
    assert server.http.get(signed(server, expires_in_s="600")).status_code == 200


def test_a_key_in_the_header_is_as_good_as_a_signature(server):
    assert server.http.get("/v1/audio/speech", params=ASK, headers=KEY).status_code == 200
    wrong = server.http.get(signed(server), headers={"authorization": "Bearer no"})
    assert error(wrong, 401)["code"] == "invalid_api_key"


def test_only_clients_with_a_key_get_urls(server):
    answer = server.http.post("/v1/audio/speech/url", json=ASK)
    assert error(answer, 401)["code"] == "invalid_api_key"


def test_a_server_without_a_key_wants_the_signature_too(keyless):
    """Otherwise a page of another site could make it speak, where browsers do not say which site asks."""
    ask = ASK | {"model": "fake"}
    assert error(keyless.http.get("/v1/audio/speech", params=ask), 401)["code"] == "invalid_signature"
    assert keyless.http.get(signed(keyless, {}, model="fake")).status_code == 200


def test_pages_of_other_sites_may_neither_embed_nor_sign(server):
    foreign = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "audio"}
    assert error(server.http.get(signed(server), headers=foreign), 403)["code"] == "foreign"
    page = {"origin": "https://evil.example", **KEY}
    assert error(server.http.post("/v1/audio/speech/url", json=ASK, headers=page), 403)["code"] == "foreign"
    assert server.http.get(signed(server)).headers["cross-origin-resource-policy"] == "same-origin"


def test_head_speaks_nothing(server):
    url, before = signed(server), len(server.engine.asked)
    assert server.http.head(url).status_code == 200 and len(server.engine.asked) == before


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"voice": "nobody"}, "voice", "there is no voice"),
        ({"speed": 9}, "speed", "speed takes"),
        ({"nonsense": 1}, "nonsense", "there is no field"),
        ({"pronunciations": [{"term": "a", "say": "b"}]}, "pronunciations", "cannot be part of a URL"),
        ({"expires_in_s": 0}, "expires_in_s", "from 1 to 604800"),
        ({"input": "ö" * 7000}, "input", f"at most {MAX_URL_CHARS}"),
    ],
    ids=str,
)
def test_a_request_is_checked_when_it_is_signed(server, fields, param, says):
    answer = server.http.post("/v1/audio/speech/url", json=ASK | fields, headers=KEY)
    fault = error(answer, 400)
    assert fault["param"] == param and says in fault["message"]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("input=a&speed=x", "speed takes"),
        ("input=a&cfg_scale=x&cfg_scale=2", "cfg_scale is given twice"),
        ("input=a&references=b", "cannot be part of a URL"),
        ("voice=ryan", "input is missing"),
    ],
)
def test_wrong_queries_get_the_message_of_a_wrong_body(server, query, says):
    assert says in error(server.http.get(f"/v1/audio/speech?{query}", headers=KEY), 400)["message"]


def test_urls_are_off_by_default(tmp_path):
    with Server(tmp_path) as server:
        assert error(server.http.get("/v1/audio/speech?input=a"), 405)["code"] == "method_not_allowed"
        assert error(server.http.post("/v1/audio/speech/url", json=ASK), 404)["code"] == "not_found"
        assert "/v1/audio/speech/url" not in server.http.get("/schema/openapi.json").json()["paths"]


def test_servers_with_one_secret_take_each_others_urls():
    url = Links("one").sign({"input": "a"}, 60, None).url
    query = parse_qsl(url.partition("?")[2])
    assert Links("one").check(query) is None
    with pytest.raises(Exception, match="signature"):
        Links("two").check(query)
