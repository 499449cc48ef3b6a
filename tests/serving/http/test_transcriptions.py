"""Transcriptions through OpenAI's own client, with a fake engine (fake_engine.py)."""

import msgspec
import openai
import pytest
from fake_engine import ANSWERER, MODEL, TRANSCRIBER
from http_server import Server, error
from uploads import NOISE, RATE_HZ, recording

from serving.http.names import Names
from serving.settings import Limits

PATH = "/v1/audio/transcriptions"
WORDS = "Guten Morgen."


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    where, limits = tmp_path_factory.mktemp("t"), Limits(reference_s=3, reference_bytes=500_000)
    with Server(where, models=[MODEL, ANSWERER, TRANSCRIBER], limits=limits) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def written(client, **fields):
    given = {"file": ("a.wav", recording()), "model": "transcriber"}
    return client.audio.transcriptions.create(**{**given, **fields})


def asked(server):
    return list(server.engine.messages.values())[-1]


def test_the_words_of_a_file(client, server):
    answer = written(client, language="de", temperature=0)
    assert answer.text == WORDS
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (7, 4, 11)
    assert answer.usage.input_token_details.audio_tokens == 5
    message = asked(server)
    [turn] = message.turns
    assert turn.clip.duration_s == len(NOISE) / RATE_HZ and (turn.role, turn.text) == ("user", None)
    request = message.request
    assert (request.output, request.text, request.language, request.temperature) == (
        "transcript",
        "",
        "de",
        0,
    )


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3"])
def test_other_files(client, kind):
    subtype = {"FLAC": "PCM_16", "OGG": "VORBIS", "MP3": "MPEG_LAYER_III"}[kind]
    assert written(client, file=(f"a.{kind}", recording(kind=kind, subtype=subtype))).text == WORDS


def test_plain_text(client):
    assert written(client, response_format="text") == WORDS + "\n"


def test_verbose_json_has_the_duration_and_the_language_that_was_given(client):
    answer = written(client, response_format="verbose_json", language="de")
    assert (answer.text, answer.language, float(answer.duration), answer.segments) == (WORDS, "de", 2.0, None)
    assert written(client, response_format="verbose_json").language == "unknown"


def test_a_stream_has_the_text_while_it_is_written(client):
    *deltas, done = written(client, stream=True)
    assert [event.delta for event in deltas] == [" Gut", "en Morgen."]
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert (done.type, done.text, done.usage.output_tokens) == ("transcript.text.done", WORDS, 4)


def test_openais_names_mean_the_only_model_that_can(client, server):
    answer = client.audio.transcriptions.with_raw_response.create(
        file=("a.wav", recording()), model="whisper-1", prompt="Umlauts."
    )
    assert "'transcriber' is used instead" in answer.headers["x-warning"]
    assert "'prompt' has no meaning here" in answer.headers["x-warning"]
    without = server.http.post(PATH, files={"file": ("a.wav", recording())})
    assert without.json()["text"] == WORDS


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"model": "answerer"}, 400, "model", "cannot transcribe; these can: transcriber"),
        ({"model": "nobody"}, 404, "model", "not served"),
        ({"response_format": "srt"}, 400, "response_format", "no model gives times"),
        ({"response_format": "png"}, 400, "response_format", "invalid enum value"),
        ({"timestamp_granularities[]": "word"}, 400, "timestamp_granularities[]", "no model gives times"),
        ({"timestamp_granularities": "word"}, 400, "timestamp_granularities", "no model gives times"),
        ({"include[]": "logprobs"}, 400, "include[]", "no model gives probabilities"),
        ({"include": "logprobs"}, 400, "include", "no model gives probabilities"),
        ({"file": bytes(500_001)}, 413, "file", "has 500001 bytes; this server takes up to 500000"),
        ({"temperature": "3"}, 400, "temperature", "from 0"),
        ({"file": b"noise"}, 400, "file", "cannot be used"),
        ({"file": None}, 400, "file", "missing"),
        ({"file": recording(NOISE[:10])}, 400, "file", "it must last"),
        ({"file": recording(rate_hz=8000)}, 400, "file", "3 s"),
    ],
)
def test_what_cannot_be_transcribed_is_refused(server, fields, status, param, message):
    file = fields.pop("file", recording())
    files = {"file": ("a.wav", file)} if file is not None else {"other": ("a.wav", b"a")}
    answer = server.http.post(PATH, data={"model": "transcriber", **fields}, files=files)
    refused = error(answer, status)
    assert refused["param"] == param and message in refused["message"], refused


def test_fields_without_a_meaning_are_ignored_with_a_warning(server):
    files = {"file": ("a.wav", recording())}
    answer = server.http.post(PATH, data={"vad_filter": "true", "seed": "5"}, files=files)
    assert answer.json()["text"] == WORDS
    for name in ("vad_filter", "seed"):
        assert f"field '{name}' has no meaning here; it is ignored" in answer.headers["x-warning"]


def test_a_model_without_a_choice_of_languages_ignores_the_language(tmp_path):
    with Server(tmp_path, models=[msgspec.structs.replace(TRANSCRIBER, languages=[])]) as server:
        data = {"language": "en", "response_format": "verbose_json"}
        answer = server.http.post(PATH, data=data, files={"file": ("a.wav", recording())})
        assert asked(server).request.language is None
    assert answer.json()["language"] == "unknown"
    assert "has no choice of a language; language is ignored" in answer.headers["x-warning"]


def test_a_strict_server_refuses_what_others_ignore(tmp_path):
    with Server(tmp_path, models=[TRANSCRIBER], names=Names(is_strict=True)) as server:
        answer = server.http.post(PATH, data={"seed": "5"}, files={"file": ("a.wav", recording())})
        refused = error(answer, 400)
    assert (refused["param"], refused["code"]) == ("seed", "unknown_field")
    assert "the fields are: file, model, language" in refused["message"]


def test_a_server_without_such_a_model_says_so(tmp_path):
    with Server(tmp_path, models=[MODEL]) as server:
        answer = server.http.post(PATH, data={"model": "fake"}, files={"file": ("a.wav", recording())})
        assert "no model of this server can" in error(answer, 400)["message"]
