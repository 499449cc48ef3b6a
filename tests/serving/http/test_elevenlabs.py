"""ElevenLabs' clients run with their base URL changed and nothing else. The requests are those of elevenlabs 2.78
for Python (text_to_speech/raw_client.py, voices/raw_client.py), read in November 2026."""

import asyncio

import msgspec
import pytest
from audio_files import decoded
from elevenlabs import VoiceSettings
from elevenlabs.client import AsyncElevenLabs, ElevenLabs
from elevenlabs.core.api_error import ApiError
from fake_engine import MODEL, RATE_HZ
from http_server import Server, error

from serving.settings import Aliases

GEORGE = "JBFqnCBsd6RMkjVDRZzb"  # the voice of their first example
MULTI = "eleven_multilingual_v2"
HEADERS = {"xi-api-key": "sk-key", "user-agent": "elevenlabs/2.78.0", "X-Fern-Language": "Python"}
TALKER = msgspec.structs.replace(MODEL, id="mute", languages=[])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), api_key="sk-key") as server:
        yield server


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), api_key="sk-key", names=Aliases(is_strict=True)) as server:
        yield server


def ask(
    server, text="tone 10", voice=GEORGE, end="", output_format="mp3_44100_128", headers=HEADERS, **fields
):
    params = {} if output_format is None else {"output_format": output_format}
    body = {"text": text, **fields}
    return server.http.post(f"/v1/text-to-speech/{voice}{end}", params=params, json=body, headers=headers)


@pytest.fixture(scope="module")
def client(server):
    return ElevenLabs(base_url=server.url, api_key="sk-key")


def asked(server):
    return list(server.engine.asked.values())[-1]


@pytest.mark.parametrize("end", ["", "/stream"])
def test_their_first_example_speaks(server, end):
    answer = ask(server, model_id=MULTI, end=end)
    assert answer.status_code == 200 and answer.headers["content-type"] == "audio/mpeg"
    assert answer.headers["x-sample-rate"] == "44100"
    assert abs(len(decoded("mp3", answer.content, 44100)) / 44100 - 0.8) < 0.1
    assert answer.headers["x-warning"] == (
        f"voice '{GEORGE}' does not exist; the default voice is used instead; "
        f"model '{MULTI}' is not served; 'fake' is used instead"
    )
    assert ("content-length" in answer.headers) == (end == "")


FORMATS = {
    "mp3_22050_32": ("audio/mpeg", 22050),
    "mp3_44100_192": ("audio/mpeg", 44100),
    "opus_48000_192": ("audio/ogg", 48000),
    "pcm_16000": ("audio/pcm", 16000),
    "wav_44100": ("audio/wav", 44100),
    "ulaw_8000": ("audio/basic", 8000),
    "alaw_8000": ("audio/x-alaw-basic", 8000),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("end", ["", "/stream"])
def test_every_kind_of_output_format_is_given(server, name, end):
    answer = ask(server, end=end, output_format=name)
    assert (answer.headers["content-type"], int(answer.headers["x-sample-rate"])) == FORMATS[name]
    if name == "pcm_16000":
        assert len(answer.content) == 2 * round(0.8 * 16000)


def test_the_format_is_mp3_if_none_is_named(server):
    assert ask(server, output_format=None).headers["content-type"] == "audio/mpeg"


def test_their_fields_become_ours(server):
    settings = {"speed": 1.2, "stability": 0.5, "similarity_boost": 0.75, "style": None}
    answer = ask(server, voice="ryan", voice_settings=settings, seed=7, language_code="en", cfg_scale=3.0)
    assert asked(server)["voice"] == "ryan" and asked(server)["seed"] == 7
    assert asked(server)["language"] == "en" and asked(server)["options"] == {"cfg_scale": 3.0}
    assert list(server.engine.messages.values())[-1].listener.speed == 1.2
    warning = answer.headers["x-warning"]
    assert "field 'voice_settings.stability' has no meaning here; it is ignored" in warning
    assert "style" not in warning and "speed" not in warning


def test_their_other_fields_are_ignored_with_a_warning(server):
    answer = ask(
        server, previous_text="Before.", next_text=None, pronunciation_dictionary_locators=[{"id": "a"}]
    )
    assert answer.status_code == 200
    assert "field 'previous_text' has no meaning here; it is ignored" in answer.headers["x-warning"]
    assert "next_text" not in answer.headers["x-warning"]


def test_a_language_is_ignored_by_a_model_that_has_no_choice(tmp_path):
    with Server(tmp_path, models=[TALKER]) as server:
        answer = ask(server, "frames 1", language_code="de")
        assert "language_code is ignored" in answer.headers["x-warning"]
        assert "language" not in asked(server)


def test_a_strict_server_refuses_their_names(strict):
    assert error(ask(strict), 400)["param"] == "voice_id"
    assert error(ask(strict, voice="ryan", model_id=MULTI), 404)["param"] == "model_id"
    assert error(ask(strict, voice="ryan", previous_text="a"), 400)["param"] == "previous_text"
    assert ask(strict, voice="ryan", model_id="fake").status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"output_format": "mp3"}, "output_format", "it takes mp3_44100_128 (default)"),
        ({"output_format": "ulaw_16000"}, "output_format", "does not support 16000 Hz"),
        ({"text": "a" * 9000}, "text", "text has 9000 characters"),
        ({"text": "reject text"}, "text", "text is not possible"),
        ({"text": 3}, "text", "text takes the text to speak"),
        ({"next_text": 3}, "next_text", "next_text takes a text, which is ignored"),
        ({"voice": "nobody"}, "voice_id", "there is no voice 'nobody'"),
        ({"model_id": "other"}, "model_id", "model 'other' is not served"),
        (
            {"language_code": "en", "text": "reject language"},
            "language_code",
            "language_code is not possible",
        ),
        ({"voice_settings": {"speed": 9}}, "speed", "speed takes"),
        ({"sample_rate": 8000}, "sample_rate", "use output_format"),
        ({"nonsense": 1}, "nonsense", "there is no field 'nonsense'"),
    ],
    ids=str,
)
def test_wrong_requests_name_the_field_as_the_client_does(server, fields, param, says):
    answer = ask(server, **fields)
    status = {"model_id": 404, "output_format": answer.status_code}.get(param, 400)
    assert status in (400, 404, 422)  # a rate that a format lacks is a wrong sample_rate
    fault = error(answer, status)
    assert fault["param"] == param and says in fault["message"]


def test_the_key_may_come_as_theirs(server):
    assert error(ask(server, headers={"xi-api-key": "wrong"}), 401)["code"] == "invalid_api_key"


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_voices_are_listed_in_their_form(server, version):
    page = server.http.get(f"/{version}/voices", headers=HEADERS).json()
    assert [(voice["voice_id"], voice["name"], voice["category"]) for voice in page["voices"]] == [
        ("vivian", "vivian", "premade"),
        ("ryan", "ryan", "premade"),
    ]
    assert (page["has_more"], page["total_count"], page["next_page_token"]) == (False, 2, None)


def test_their_requests_are_counted(server):
    before = count(server)
    ask(server)
    error(ask(server, voice="nobody"), 400)
    assert count(server) == (before[0] + 1, before[1] + 1)


def count(server):
    lines = server.http.get("/metrics").text.splitlines()
    return tuple(
        float(
            next(
                line
                for line in lines
                if line.startswith(f'zoo_requests_total{{model="fake",outcome="{what}"')
            ).split()[-1]
        )
        for what in ("stop", "refused")
    )


def test_samples_are_those_of_a_speech_request(server):
    ours = server.http.post(
        "/v1/audio/speech",
        json={"input": "tone 10", "voice": "vivian", "response_format": "pcm", "sample_rate": RATE_HZ},
        headers={"authorization": "Bearer sk-key"},
    )
    assert ask(server, voice="vivian", output_format="pcm_24000", end="/stream").content == ours.content


# Their own client


def test_their_client_speaks_and_streams(client, server):
    fields = {"text": "tone 10", "model_id": MULTI, "output_format": "pcm_24000"}
    whole = b"".join(client.text_to_speech.convert(GEORGE, **fields))
    assert len(whole) == 2 * 19200
    settings = VoiceSettings(
        stability=0.5, similarity_boost=0.75, style=0.0, use_speaker_boost=True, speed=1.25
    )
    streamed = client.text_to_speech.stream("ryan", voice_settings=settings, language_code="en", **fields)
    assert len(b"".join(streamed)) == 2 * 15360
    assert asked(server)["voice"] == "ryan" and asked(server)["language"] == "en"


def test_their_asynchronous_client_streams(server):
    async def heard():
        client = AsyncElevenLabs(base_url=server.url, api_key="sk-key")
        return b"".join([part async for part in client.text_to_speech.stream(GEORGE, text="tone 5")])

    assert abs(len(decoded("mp3", asyncio.run(heard()), 44100)) / 44100 - 0.4) < 0.1


def test_their_client_lists_voices(client):
    assert [voice.voice_id for voice in client.voices.get_all().voices] == ["vivian", "ryan"]
    page = client.voices.search(page_size=10)
    assert [voice.name for voice in page.voices] == ["vivian", "ryan"] and not page.has_more


def test_their_client_raises_the_message_of_an_error(client):
    with pytest.raises(ApiError) as raised:
        list(client.text_to_speech.convert("nobody", text="tone 1"))
    assert raised.value.status_code == 400
    assert "there is no voice 'nobody'" in raised.value.body["error"]["message"]
