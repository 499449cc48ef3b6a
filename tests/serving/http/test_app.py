"""The HTTP process on a real port, with a fake engine (fake_engine.py)."""

import io
import json
import socket
import subprocess
import sys
import threading
import wave
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest
import yaml
from fake_engine import MODEL, RATE_HZ, frame
from http_server import Server, error, until
from shell import ROOT

from serving import protocol
from serving.audio import encode
from serving.http.schemas import FIELDS
from serving.settings import Limits

KEY = "sk-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), limits=Limits(text_chars=100)) as server:
        yield server


@pytest.fixture
def mortal(tmp_path):
    """A server whose engine or whole process the test may stop."""
    with Server(tmp_path) as server:
        yield server


def test_wav_is_a_header_followed_by_the_samples(server):
    answer = server.speak("frames 3", voice="vivian", seed=5)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "audio/wav"
    assert answer.headers["x-sample-rate"] == str(RATE_HZ)
    assert answer.headers["x-request-id"] in server.engine.asked
    assert answer.headers["x-seed"] == "5"
    assert answer.headers["transfer-encoding"] == "chunked"
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-store", "no")
    assert (
        answer.content[:4] == b"RIFF" and answer.content[4:8] == answer.content[40:44] == b"\xff\xff\xff\xff"
    )
    assert answer.content[44:] == b"".join(map(frame, range(3)))


def test_pcm_is_only_the_samples(server):
    answer = server.speak("frames 3", response_format="pcm")
    assert answer.headers["content-type"] == "audio/pcm"
    assert answer.content == b"".join(map(frame, range(3)))


def test_without_streaming_the_wav_header_has_the_length(server):
    answer = server.speak("frames 3", stream=False)
    assert answer.headers["content-length"] == str(len(answer.content))
    with wave.open(io.BytesIO(answer.content)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes()) == (
            1,
            2,
            RATE_HZ,
            300,
        )
        assert file.readframes(300) == b"".join(map(frame, range(3)))


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"stream_format": "sse"}])
@pytest.mark.parametrize("name", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
def test_a_request_without_audio_is_an_error(server, name, fields):
    fault = error(server.speak("silent", response_format=name, **fields), 422)
    assert (fault["code"], fault["message"]) == ("no_audio", "the model ended before its first frame")


def test_only_whole_files_are_reproducible(server):
    answers = [
        server.speak("frames 1", **fields) for fields in ({}, {"stream": False}, {"stream_format": "sse"})
    ]
    messages = [server.engine.messages[answer.headers["x-request-id"]] for answer in answers]
    assert [message.listener.is_reproducible for message in messages] == [False, True, False]


def test_the_engine_is_told_about_the_listener(server):
    fields = {
        "service_tier": "flex",
        "speed": 2,
        "stream_format": "sse",
        "timestamp_granularities": ["segment"],
    }
    message = server.engine.messages[server.speak("frames 1", **fields).headers["x-request-id"]]
    assert message.listener == protocol.Listener(
        2.0, is_flexible=True, is_metered=True, wants_timestamps=True
    )


def test_every_field_reaches_the_engine(server):
    fields = {"language": "english", "instructions": "Softly.", "temperature": 0.5, "top_k": 0, "top_p": 1.0}
    fields |= {"repetition_penalty": 1.1, "seed": 2**63 - 1, "split_text": False, "normalize": True}
    options = {"text_mode": "interleaved", "cfg_scale": 2.5, "solver_steps": 5}
    extra = {"model": "fake", "voice": {"id": "ryan"}, "max_new_tokens": 9}
    extra |= {"speed": 1, "stream_format": "audio", "response_format": "wav"}
    answer = server.speak("frames 1", **fields, **options, **extra)
    assert answer.status_code == 200, answer.text
    asked = server.engine.asked[answer.headers["x-request-id"]]
    assert asked == {"text": "frames 1", "voice": "ryan", "max_frames": 9, "options": options, **fields}


@pytest.mark.parametrize("value", [True, 3, 2**63 - 1, -0.5, "x", 1e300, ""])
def test_options_of_any_type_reach_the_engine_unchanged(server, value):
    """The engine knows which values are possible."""
    answer = server.speak("frames 1", text_mode=value, cfg_scale=None)
    given = server.engine.asked[answer.headers["x-request-id"]]["options"]
    assert given == {"text_mode": value} and type(given["text_mode"]) is type(value)


@pytest.mark.parametrize("value", [2**64, 2**80, -(2**70)])
def test_numbers_too_large_for_msgpack_are_refused(server, value):
    fault = error(server.speak("frames 1", solver_steps=value), 400)
    assert fault["param"] == "solver_steps" and "possible: an integer from 1 to 100" in fault["message"]


def test_missing_fields_have_the_models_default_and_the_seed_is_random(server):
    answers = [server.speak("frames 1", temperature=None) for _ in range(2)]
    asked = [server.engine.asked[answer.headers["x-request-id"]] for answer in answers]
    assert [set(fields) for fields in asked] == [{"text", "seed"}] * 2
    assert [str(fields["seed"]) for fields in asked] == [answer.headers["x-seed"] for answer in answers]
    assert asked[0]["seed"] != asked[1]["seed"]


@pytest.mark.parametrize(("speed", "second_s"), [(1, 200 / RATE_HZ), (2, 100 / RATE_HZ)])
def test_segment_timestamps_give_the_times_of_each_piece(server, speed, second_s):
    asked = {"stream_format": "sse", "response_format": "pcm", "speed": speed}
    answer = server.speak("pieces 2", timestamp_granularities=["segment"], **asked)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    segments = [event for event in events if event["type"] == "speech.audio.segment"]
    assert segments == [
        {"type": "speech.audio.segment", "text": "piece 0", "start_s": 0, "end_s": round(second_s / 2, 6)},
        {
            "type": "speech.audio.segment",
            "text": "piece 1",
            "start_s": round(second_s / 2, 6),
            "end_s": round(second_s, 6),
        },
    ]
    assert events[-1]["type"] == "speech.audio.done"
    for unasked in (None, []):
        answer = server.speak("pieces 2", timestamp_granularities=unasked, **asked)
        assert "speech.audio.segment" not in answer.text and "speech.audio.done" in answer.text
    id = answer.headers["x-request-id"]
    assert not server.engine.messages[id].listener.wants_timestamps


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"timestamp_granularities": ["segment"]}, "timestamps need stream_format sse"),
        (
            {"timestamp_granularities": ["word"], "stream_format": "sse"},
            "this server has no aligner",
        ),
        ({"timestamp_granularities": "segment", "stream_format": "sse"}, 'a list of "segment" and "word"'),
    ],
)
def test_unsupported_timestamps_are_refused(server, fields, says):
    fault = error(server.speak("pieces 1", **fields), 400)
    assert fault["param"].startswith("timestamp_granularities") and says in fault["message"]


def test_text_from_the_model_is_among_the_events(server):
    answer = server.speak("write 2", stream_format="sse", response_format="pcm")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    assert [event.get("delta", event["type"]) for event in events] == [
        "speech.audio.delta",
        "größe 0 ",
        "speech.audio.delta",
        "größe 1 ",
        "speech.audio.done",
    ]
    assert events[1]["type"] == events[3]["type"] == "speech.text.delta"
    assert events[-1]["usage"] == {"input_tokens": 2, "output_tokens": 2 + 6, "total_tokens": 10}


@pytest.mark.parametrize("stream", [True, False])
def test_audio_files_leave_out_the_models_text(server, stream):
    assert server.speak("write 3", stream=stream).content[44:] == b"".join(map(frame, range(3)))


def test_audio_arrives_before_the_end(server):
    server.call(server.engine.go.clear)
    with server.stream("frames 2") as answer:
        chunks = answer.iter_raw()
        assert next(chunks)[44:] == frame(0)
        assert not any(id in server.engine.cancelled for id in [answer.headers["x-request-id"]])
        server.call(server.engine.go.set)
        assert b"".join(chunks) == frame(1)


@pytest.mark.parametrize("fields", [{}, {"stream": False}])
@pytest.mark.parametrize("speed", [0.25, 0.8, 2, 4])
def test_speed_changes_the_length_and_not_the_sample_rate(server, speed, fields):
    answer = server.speak("frames 30", speed=speed, response_format="pcm", **fields)
    assert len(answer.content) == 2 * round(3000 / speed)
    assert (
        server.engine.messages[answer.headers["x-request-id"]].listener.speed == speed
    )  # the deadlines depend on it
    assert answer.headers["x-sample-rate"] == str(RATE_HZ)


def test_at_speed_1_samples_are_unchanged(server):
    answer = server.speak("frames 3", speed=1, response_format="pcm")
    assert answer.content == b"".join(map(frame, range(3)))


def test_eight_streams_at_once(server):
    server.call(server.engine.go.clear)  # no stream can end before all have begun
    begun = threading.Barrier(8)

    def listen(count):
        body = {"input": f"frames {count}", "response_format": "wav"}
        with httpx.stream("POST", server.url + "/v1/audio/speech", json=body, timeout=10) as answer:
            chunks = answer.iter_raw()
            first = next(chunks)
            if begun.wait(10) == 0:
                server.call(server.engine.go.set)
            return first[44:] + b"".join(chunks)

    with ThreadPoolExecutor(8) as pool:
        heard = list(pool.map(listen, range(2, 10)))
    assert heard == [b"".join(map(frame, range(count))) for count in range(2, 10)]


@pytest.mark.parametrize("text", ["hold 2", "queued"])
def test_a_disconnect_cancels_the_request_immediately(server, text):
    before = len(server.engine.cancelled)
    with socket.create_connection(server.listener.getsockname()) as client:
        body = json.dumps({"input": text}).encode()
        client.sendall(
            b"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        if text == "queued":
            until(lambda: any(fields["text"] == "queued" for fields in server.engine.asked.values()))
        else:
            assert client.recv(10_000).startswith(b"HTTP/1.1 200")
        assert len(server.engine.cancelled) == before
    until(lambda: len(server.engine.cancelled) == before + 1, seconds=1)
    assert server.engine.asked[server.engine.cancelled[-1]]["text"] == text


def test_a_finished_request_is_not_cancelled(server):
    answer = server.speak("frames 1")
    server.speak("frames 1")  # by now a late Cancel of the first would have come
    assert answer.headers["x-request-id"] not in server.engine.cancelled


def test_models_and_voices(server):
    models = server.http.get("/v1/models").json()
    assert models["object"] == "list" and [model["id"] for model in models["data"]] == ["fake"]
    model = server.http.get("/v1/models/fake").json()
    assert model == models["data"][0] and model["object"] == "model"
    assert (model["sample_rate_hz"], model["voices"], model["max_text_chars"]) == (RATE_HZ, MODEL.voices, 100)
    assert (model["modes"], model["reference_s"]) == (["voice"], None)
    assert (model["max_references"], model["licence"], model["piece_s"]) == (1, "research only", 45.0)
    assert model["options"] == json.loads(msgspec.json.encode(MODEL.options))
    assert model["options"][1] == {
        "name": "text_mode",
        "type": "str",
        "help": "how the text is read",
        "possible": "full, interleaved",
        "default": "full",
        "range": None,
        "choices": ["full", "interleaved"],
    }
    assert set(model["response_formats"]) == set(encode.FORMATS) and model["stream_formats"] == [
        "audio",
        "sse",
    ]
    voices = server.http.get("/v1/audio/voices").json()
    assert [(voice["id"], voice["models"], voice["type"]) for voice in voices["data"]] == [
        ("vivian", ["fake"], "preset"),
        ("ryan", ["fake"], "preset"),
    ]


def test_the_schema_describes_what_is_served(server):
    schema = server.http.get("/schema/openapi.json").json()
    paths = {
        "/v1/audio/speech",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{model_id}",
        "/v1/audio/models",
        "/v1/audio/transcriptions",
        "/v1/audio/speech/batch",
        "/v1/audio/voices",
        "/v1/audio/voices/{voice_id}",
        "/v1/audio/voices/{voice_id}/preview",
        "/v1/text-to-speech/{voice_id}",
        "/v1/text-to-speech/{voice_id}/stream",
        "/v1/text-to-speech/{voice_id}/with-timestamps",
        "/v1/text-to-speech/{voice_id}/stream/with-timestamps",
        "/v1/voices",
        "/v2/voices",
        "/v1/audio/pronunciations",
        "/v1/audio/works",
        "/v1/audio/works/{work_id}",
        "/v1/audio/works/{work_id}/resume",
        "/v1/audio/works/{work_id}/book.m4b",
        "/v1/audio/works/{work_id}/chapters/{number}",
    }
    assert paths | {"/health", "/ready", "/metrics"} == set(schema["paths"])
    fields = schema["components"]["schemas"]["SpeechRequest"]["properties"]
    assert "mp3 (default)" in fields["response_format"]["description"]
    [form] = schema["paths"]["/v1/audio/voices"]["post"]["requestBody"]["content"]
    assert form == "multipart/form-data"


def test_the_schema_has_the_models_options_among_the_fields(server):
    for page in (
        server.http.get("/schema/openapi.json").json(),
        yaml.safe_load(server.http.get("/schema/openapi.yaml").text),
    ):
        body = page["components"]["schemas"]["SpeechRequest"]
        assert body["additionalProperties"] is False
        field = body["properties"]["text_mode"]
        null = {"type": "null"}
        assert field["anyOf"] == [
            {"type": "string", "default": "full", "enum": ["full", "interleaved"]},
            null,
        ]
        assert field["description"] == "model fake: how the text is read; values: full, interleaved"
        assert body["properties"]["cfg_scale"]["anyOf"] == [
            {"type": "number", "default": 2.0, "minimum": 0, "maximum": 100},
            null,
        ]
        # Temperature is a field of all models, so the model's option of that name is left out.
        assert "model fake" not in body["properties"]["temperature"].get("description", "")


def test_the_schema_follows_the_engines_models(tmp_path):
    """The schema is built for each request; before the engine is ready it has no options."""
    other = msgspec.structs.replace(
        MODEL, id="other", options=[msgspec.structs.replace(MODEL.options[2], range=(1, 3))]
    )
    with Server(tmp_path, models=[MODEL, other]) as server:
        fields = server.http.get("/schema/openapi.json").json()["components"]["schemas"]["SpeechRequest"][
            "properties"
        ]
        assert [schema.get("maximum") for schema in fields["cfg_scale"]["anyOf"]] == [100, 3, None]
        assert (
            fields["cfg_scale"]["description"].count("model ") == 2 and len(fields["text_mode"]["anyOf"]) == 2
        )
        server.call(server.engine.tell, protocol.Models([other]))
        until(lambda: "text_mode" not in server.http.get("/schema/openapi.json").text)


def test_the_http_process_loads_neither_engine_nor_models():
    """Of the zoo it knows requests and how text is prepared, which need no torch."""
    script = """
import importlib, pathlib, sys
modules = [".".join(path.with_suffix("").parts) for path in pathlib.Path("serving/http").rglob("*.py")]
for name in modules:
    importlib.import_module(name)
foreign = {"torch", "serving.engine", "compile_cache"} & set(sys.modules)
text = {f"zoo.text.{name}" for name in ("languages", "markdown", "pauses", "pieces", "pronunciations")}
align = ("zoo.align", "zoo.align.viterbi", "zoo.align.words")
models = {name for name in sys.modules if name.startswith("zoo")} - {"zoo", "zoo.request", "zoo.text", *text, *align}
print(len(modules), sorted(foreign | models))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert int(done.stdout.split()[0]) >= 12 and done.stdout.split(maxsplit=1)[1] == "[]\n"


def test_only_routes_under_v1_need_the_api_key(tmp_path):
    with Server(tmp_path, api_key=KEY) as server:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": KEY},
            {"api-key": "wrong"},
            {"authorization": "Bearer wrong", "api-key": KEY},
            {"authorization": "Bearer \u00e9".encode()},
        ):
            for ask in (
                server.http.get("/v1/models", headers=headers),
                server.http.post("/v1/audio/speech", json={}, headers=headers),
            ):
                assert error(ask, 401)["code"] == "invalid_api_key"
        assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 200
        for scheme in ("Bearer", "bearer", "BEARER"):
            headers = {"authorization": f"{scheme} {KEY}"}
            assert server.http.get("/v1/models", headers=headers).status_code == 200
        assert server.http.get("/v1/models", headers={"API-Key": KEY}).status_code == 200  # Azure's clients


@pytest.mark.parametrize("field", ["instructions", "language", "voice", "model", "ref_text", "references"])
def test_an_overlong_field_is_refused_before_it_reaches_the_engine(server, field):
    asked = len(server.engine.asked)
    long = "word " * 1_000_000
    value = [{"audio": "", "text": long}] if field == "references" else long
    assert error(server.speak("frames 1", **{field: value}), 400)["param"] == field
    assert len(server.engine.asked) == asked


def test_error_messages_shorten_the_clients_text(server):
    answers = [server.http.get("/v1/" + "x" * 9000), server.http.get("/v1/models/" + "x" * 9000)]
    assert [len(error(answer, 404)["message"]) < 300 for answer in answers] == [True, True]


def test_null_means_the_default_for_every_field(server):
    fields = dict.fromkeys(FIELDS["/v1/audio/speech"], None) | {"text_mode": None, "input": "frames 2"}
    answer = server.http.post("/v1/audio/speech", json=fields)
    assert answer.status_code == 200 and answer.headers["content-type"] == "audio/mpeg"
    assert set(server.engine.asked[answer.headers["x-request-id"]]) == {"text", "seed"}


def test_the_schema_keeps_the_ranges_of_optional_fields(server):
    page = server.http.get("/schema/openapi.json").json()
    schemas = page["components"]["schemas"]
    fields = schemas["SpeechRequest"]["properties"]
    assert fields["top_p"]["anyOf"] == [
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "null"},
    ]
    assert fields["ref_text"]["anyOf"][0]["maxLength"] == 4096
    assert schemas["VoiceUpload"]["additionalProperties"] is schemas["Voice"]["additionalProperties"] is False
    assert schemas["VoiceUpload"]["properties"]["audio_sample"]["format"] == "binary"
    assert schemas["Model"]["properties"]["reference_s"]["anyOf"][0]["maxItems"] == 2
    assert page["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert page["paths"]["/v1/models"]["get"]["security"] == [{"key": []}, {}]
    assert "security" not in page["paths"]["/health"]["get"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/audio/voices", "GET, HEAD, OPTIONS, POST"),
        ("/v1/audio/speech", "OPTIONS, POST"),
        ("/health", "GET, HEAD, OPTIONS"),
    ],
)
def test_allow_lists_all_methods_and_head_works(server, path, methods):
    assert server.http.put(path).status_code == 405
    assert server.http.put(path).headers["allow"] == server.http.options(path).headers["allow"] == methods
    if "HEAD" in methods:
        whole, head = server.http.get(path), server.http.head(path)
        assert head.status_code == 200 and head.content == b""
        assert head.headers["content-length"] == str(len(whole.content))


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/nothing", "/metrics"])
def test_every_answer_has_a_request_id_and_keeps_the_clients(server, path):
    own = [server.http.get(path).headers["x-request-id"] for _ in range(2)]
    assert own[0] != own[1] and own[0].startswith("req_")
    answer = server.http.get(path, headers={"x-request-id": "trace-7.a:b"})
    assert answer.headers.get_list("x-request-id") == ["trace-7.a:b"]
    assert (
        server.http.get(path, headers={"x-request-id": "x" * 200}).headers["x-request-id"].startswith("req_")
    )


def test_a_client_may_repeat_its_request_id(server):
    answers = [server.speak("frames 1", voice=voice) for voice in ("nobody", "vivian")]
    assert all(answer.headers["x-request-id"].startswith("req_") for answer in answers)
    server.http.headers["x-request-id"] = "same"
    try:
        with server.stream("hold 1") as open_answer:
            answers = [
                open_answer,
                server.speak("frames 1"),
                server.speak("reject voice"),
                server.speak("full"),
            ]
            assert [answer.headers["x-request-id"] for answer in answers] == ["same"] * 4
            assert [answer.status_code for answer in answers] == [200, 200, 400, 503]
    finally:
        del server.http.headers["x-request-id"]
