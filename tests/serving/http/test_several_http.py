"""Several models behind one HTTP process: they are listed, chosen by name, counted separately and have
their own voices."""

import asyncio

import msgspec
import pytest
from fake_engine import CLONER, MODEL, NUMBERS, STATS, frame
from http_server import Server, error, until
from metrics import outcomes
from metrics import samples as read
from uploads import upload

from serving import protocol
from serving.engine_client import EngineClient

OTHER = msgspec.structs.replace(MODEL, id="other", sample_rate_hz=16000, voices=["ryan", "uncle_fu"])
MODELS = [MODEL, OTHER, CLONER]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), models=MODELS) as server:
        yield server


def test_all_models_are_listed(server):
    models = server.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["fake", "other", "cloner"]
    for model in models:
        assert server.http.get(f"/v1/models/{model['id']}").json() == model


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.id)
def test_a_request_goes_to_the_model_it_names(server, model):
    fields = {"voice": model.voices[0]} if model.voices else {}
    answer = server.speak("frames 1", model=model.id, **fields)
    assert answer.content[44:] == frame(0)
    assert answer.headers["x-sample-rate"] == str(model.sample_rate_hz)
    assert server.engine.messages[answer.headers["x-request-id"]].model == model.id


def test_a_request_without_a_model_gets_the_list_of_models(server):
    fault = error(server.speak("frames 1", model=None), 400)
    assert (fault["param"], fault["code"]) == ("model", "missing_field")
    assert fault["message"] == "model is missing; this server has several: fake, other, cloner"


def test_an_unknown_model_is_a_404_with_the_list_of_models(server):
    fault = error(server.speak("frames 1", model="nothing"), 404)
    assert (fault["param"], fault["code"]) == (
        "model",
        "model_not_found",
    ) and "available models: fake, other, cloner" in fault["message"]


def test_a_voice_works_only_with_its_models(server):
    assert upload(server, "anna").status_code == 200
    voices = server.http.get("/v1/audio/voices").json()["data"]
    expected = {"vivian": ["fake"], "ryan": ["fake", "other"], "uncle_fu": ["other"], "anna": ["cloner"]}
    assert {voice["id"]: voice["models"] for voice in voices} == expected
    for model in MODELS:
        for voice, models in expected.items():
            answer = server.speak("frames 1", model=model.id, voice=voice)
            assert answer.status_code == (200 if model.id in models else 400), (model.id, voice)
    assert (
        "available voices: ryan, uncle_fu"
        in error(server.speak("frames 1", model="other", voice="vivian"), 400)["message"]
    )
    assert error(upload(server, "uncle_fu"), 409)["code"] == "voice_exists"
    assert "not an uploaded one" in error(server.http.delete("/v1/audio/voices/uncle_fu"), 400)["message"]


def test_an_upload_that_no_model_can_use_gets_the_voices_of_each_model(tmp_path):
    with Server(tmp_path, models=[MODEL, OTHER]) as server:
        message = error(upload(server), 400)["message"]
    assert message.startswith("no served model takes reference audio")
    assert message.endswith("fake (available voices: vivian, ryan); other (available voices: ryan, uncle_fu)")


def test_requests_are_counted_by_model(tmp_path):
    with Server(tmp_path, models=MODELS) as server:
        server.speak("frames 3", model="fake")
        server.speak("frames 3", model="other")
        server.speak("reject voice", model="other")
        server.speak("frames 1", model="other", voice="nobody")
        server.speak("frames 1", model="tts-1")
        until(lambda: outcomes(server, "other")["refused"] == 2)
        assert [outcomes(server, model)["stop"] for model in ("fake", "other", "cloner")] == [1, 1, 0]
        assert outcomes(server, "fake")["refused"] == 0 and outcomes(server, "") == {"refused": 1}
        samples = read(server)
        assert samples["zoo_audio_seconds_total", "other"] == pytest.approx(300 / 16000)
        assert samples["zoo_time_to_first_audio_seconds_count", "cloner"] == 0


def test_statistics_are_exposed_by_model(tmp_path):
    numbers = {"fake": NUMBERS, "other": msgspec.structs.replace(NUMBERS, running=7, underruns=0)}
    with Server(tmp_path, models=MODELS) as server:
        server.engine.is_awake = False  # otherwise its usual statistics arrive in between
        server.call(server.engine.tell, msgspec.structs.replace(STATS, models=numbers))
        until(lambda: ("zoo_requests_running", "other") in read(server))
        samples = read(server)
    for model, of in numbers.items():
        assert (
            samples["zoo_requests_running", model] == of.running
            and samples["zoo_underruns_total", model] == of.underruns
        )
    assert samples["zoo_pages",] == STATS.pages


def test_the_engine_client_sends_the_model(tmp_path):
    async def scene():
        heard = asyncio.Queue()

        async def engine(reader, writer):
            writer.write(
                protocol.pack(protocol.Models(MODELS)) + protocol.pack(protocol.Status("ready", 1.0))
            )
            async for message in protocol.read(reader, protocol.to_engine):
                heard.put_nowait(message)
            writer.close()

        async with await asyncio.start_unix_server(engine, tmp_path / "sock"):
            client = EngineClient(str(tmp_path / "sock"))
            running = asyncio.create_task(client.run())
            async with asyncio.timeout(5):
                while client.status.state != "ready":
                    await asyncio.sleep(0.01)
                assert client.models == MODELS
                with client.speak(protocol.Speak("r", "other", protocol.Request("Hello."))):
                    assert await heard.get() == protocol.Speak("r", "other", protocol.Request("Hello."))
                assert await heard.get() == protocol.Cancel("r")
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(scene())
