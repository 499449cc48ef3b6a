"""Sessions over a real WebSocket, with a fake engine (fake_engine.py)."""

import base64
import io
import json
import random
import time
import wave

import msgspec
import numpy as np
import pytest
from audio_files import decoded
from fake_engine import CLONER, FEEDER, MODEL, RATE_HZ, frame
from http_server import Server, until
from metrics import outcomes
from sessions import CHANCE, frames, last_asked, session
from structlog.testing import capture_logs
from uploads import recording
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from serving.http.sentences import MAX_CHARS, PassEnd, Sentences
from serving.http.session import MAX_QUEUED
from serving.settings import Limits


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = Limits(text_chars=2000)
    with Server(tmp_path_factory.mktemp("s"), models=[MODEL, FEEDER, CHANCE], limits=limits) as server:
        yield server


# Speech


def test_sentences_are_spoken_as_they_arrive_in_one_stream_with_one_seed(server):
    with session(server) as client:
        configured = client.configure()
        assert (configured["split_granularity"], configured["sample_rate"]) == ("sentence", RATE_HZ)
        client.say("frames 3 of ", "the first.", done=False)
        client.say(" frames", " 2 of the second. fra", done=False)
        start = client.event("audio.start")
        # All this arrives before the utterance has ended.
        assert b"".join(client.audio() for _ in range(5)) == frames(3) + frames(2)
        client.say("mes 1")
        assert client.audio() == frame(0)
        done = client.event("audio.done")
    assert (done["reason"], done["audio_s"], done["usage"]["output_tokens"]) == ("stop", 0.025, 6)
    asked = last_asked(server, 3)
    assert [one["text"] for one in asked] == ["frames 3 of the first.", "frames 2 of the second.", "frames 1"]
    assert all(one["seed"] == start["seed"] and one["voice"] == "vivian" for one in asked)


def test_text_goes_token_by_token_into_one_request_if_the_model_supports_it(server):
    with session(server) as client:
        assert client.configure(model="feeder", seed=9)["split_granularity"] == "token"
        client.say("Hello", done=False)
        assert client.event("audio.start")["seed"] == 9 and client.audio() == frame(0)  # after the first word
        client.say(" you", " there", done=False)
        assert client.audio() + client.audio() == frame(1) + frame(2)
        client.send("input.done")
        done = client.event("audio.done")
    assert (done["reason"], done["usage"]["output_tokens"]) == ("stop", 3)
    id = list(server.engine.asked)[-1]
    assert server.engine.asked[id] == {
        "text": "Hello",
        "seed": 9,
        "voice": "vivian",
        "is_open": True,
        "options": {"text_mode": "interleaved"},
    }
    assert "".join(server.engine.fed[id]) == "Hello you there"
    until(lambda: server.engine.heard[id] == 3)


def test_settings_that_the_model_refuses_with_tokens_fall_back_to_sentences(server):
    with session(server) as client:
        client.configure(model="feeder")
        client.say("reject instructions fra")
        assert client.error(1)["message"] == "instructions is not possible"  # also by sentences
        client.say("frames 2 of this.")
        assert client.heard()[1] == frames(2)  # later utterances go by sentences too
        client.configure(model="feeder", split_granularity="token")
        client.say("reject voice")
        assert client.error(3)["param"] == "voice"
        assert client.configure(model="feeder", text_mode="full")["split_granularity"] == "sentence"
        client.send("session.config", model="fake", split_granularity="token")
        assert client.error()["param"] == "split_granularity"


def test_text_that_has_no_room_without_a_sentence_end_falls_back_to_sentences(server):
    with session(server) as client:
        client.configure(model="feeder")
        client.say("long frames 2 of this. frames 1")
        assert client.heard()[1] == frames(2) + frames(1)
        client.configure(model="feeder", split_granularity="token")
        client.say("long frames 2 of this.")
        assert client.error(2)["code"] == "cannot_continue"


def silence(length_s):
    return bytes(2 * round(length_s * RATE_HZ))


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_pause_between_sentences_is_silence_of_its_length(server, size):
    text = (
        "[pause:0.5s] frames 3 of one. frames 2 of two [pause:1.25s] <break time='10ms'/> frames 1 [pause:1s]"
    )
    with session(server) as client:
        client.configure()
        client.say(*(text[at : at + size] for at in range(0, len(text), size)))
        _, pcm, done = client.heard()
    expected = silence(0.5) + frames(3) + frames(2) + silence(1.26) + frames(1) + silence(1)
    assert pcm == expected and done["audio_s"] == round(len(expected) / 2 / RATE_HZ, 4)
    assert [one["text"] for one in last_asked(server, 3)] == [
        "frames 3 of one.",
        "frames 2 of two",
        "frames 1",
    ]


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_pause_ends_a_fed_request_and_another_one_follows(server, size):
    text = "[pause:0.5s] One two <break time='1s'/> three [pause:20ms]"
    with session(server) as client:
        client.configure(model="feeder")
        client.say(*(text[at : at + size] for at in range(0, len(text), size)))
        pcm = client.heard()[1]
    assert pcm == silence(0.5) + frames(2) + silence(1) + frames(1) + silence(0.02)


@pytest.mark.parametrize("model", ["fake", "feeder"])
def test_pauses_that_are_too_long_fail_the_utterance(server, model):
    with session(server) as client:
        client.configure(model=model)
        client.say("[pause:11s] One.")
        assert "a pause lasts up to 10 s" in client.error(1)["message"]
        client.say("[pause:10s]" * 7)
        client.event("audio.start")
        assert sum(len(client.audio()) for _ in range(6)) == len(silence(60))
        assert "up to 60 s are possible" in client.error(2)["message"]


@pytest.mark.parametrize("model", ["fake", "feeder"])
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_markdown_is_read_by_sentences_however_it_arrives(server, model, size):
    text = "# frames 2 of *one*\n\n```py\nprint(2). frames 5\n```\n\n![an image](a.png)\n\n**frames 3** of [two](https://a.b/c)."
    with session(server) as client:
        configured = client.configure(model=model, text_format="markdown")
        assert configured["split_granularity"] == "sentence"
        client.say(*(text[at : at + size] for at in range(0, len(text), size)))
        assert client.heard()[1] == frames(2) + frames(3)
    assert [one["text"] for one in last_asked(server, 2)] == ["frames 2 of one", "frames 3 of two."]


def test_a_long_text_is_several_fed_requests_cut_at_sentences(tmp_path):
    """No request is longer than the model speaks well."""
    short = msgspec.structs.replace(FEEDER, piece_s=1.0)
    with Server(tmp_path, models=[short]) as server, session(server) as client:
        client.configure(model="feeder")
        text = "One two three four five. Six seven eight nine. Ten eleven twelve thirteen. "
        client.say(*(text[at : at + 4] for at in range(0, len(text), 4)), done=False)
        client.send("input.done")
        pcm = client.heard()[1]
    asked = ["".join(texts).strip() for texts in server.engine.fed.values()]
    assert asked == ["One two three four five.", "Six seven eight nine.", "Ten eleven twelve thirteen."]
    assert pcm == frames(5) + frames(4) + frames(4)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_the_passes_of_an_utterance_depend_on_its_text_alone(tmp_path, size):
    short = msgspec.structs.replace(FEEDER, piece_s=1.0)
    text = 'One two three four "five." Six seven eight nine!  Ten (eleven twelve.) Thirteen'
    with Server(tmp_path, models=[short]) as server, session(server) as client:
        client.configure(model="feeder")
        client.say(*(text[at : at + size] for at in range(0, len(text), size)))
        client.heard()
    asked = ["".join(texts) for texts in server.engine.fed.values()]
    assert asked == [
        'One two three four "five." ',
        "Six seven eight nine! ",
        " Ten (eleven twelve.) ",
        "Thirteen",
    ]


def test_a_pass_ends_at_the_same_character_whatever_the_portions():
    chance = random.Random(0)
    for _ in range(300):
        text = "".join(
            chance.choices("ab. ,!?\"')\u3002\u4eca", weights=(9, 9, 2, 3, 1, 1, 1, 2, 1, 1, 1, 2), k=60)
        )
        want = PassEnd(1.0).find(text)
        ending, at, found = PassEnd(1.0), 0, None
        while at < len(text) and found is None:
            portion = text[at : at + chance.randint(1, 7)]
            end = ending.find(portion)
            found = None if end is None else at + end
            at += len(portion)
        assert found == want, text


def test_a_random_voice_is_kept_from_the_first_sentence(server):
    with session(server) as client:
        client.configure(model="chance", voice=None)
        client.say("frames 30 to begin. frames 1 to go on. frames 1 to end.")
        client.heard()
    messages = list(server.engine.messages.values())[-3:]
    assert [len(message.references) for message in messages] == [0, 1, 1]
    [reference] = messages[1].references
    assert reference == messages[2].references[0] and reference.transcript == "frames 30 to begin."
    kept = np.frombuffer(reference.clip.samples, "<f4")
    np.testing.assert_allclose(kept, np.frombuffer(frames(30), "<i2") / 32767, atol=1e-6)


def test_a_recording_is_used_for_all_sentences(server):
    with session(server) as client:
        audio = base64.b64encode(recording()).decode()
        client.configure(model="chance", voice=None, ref_audio=audio, ref_text="Hm.")
        client.say("frames 2 to begin. frames 1 to end.")
        client.heard()
    messages = list(server.engine.messages.values())[-2:]
    assert [message.references[0].transcript for message in messages] == ["Hm.", "Hm."]


def test_a_session_may_have_references_and_pronunciations(server):
    with session(server) as client:
        audio = base64.b64encode(recording()).decode()
        words = [{"term": "twice", "say": "two times"}]
        references = [{"audio": audio, "text": "Hm."}]
        client.configure(model="chance", voice=None, references=references, pronunciations=words)
        client.say("frames 1 twice.")
        client.heard()
    assert last_asked(server)[0]["text"] == "frames 1 two times."


@pytest.mark.parametrize("name", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
def test_every_format_gives_one_file_at_its_stated_rate(server, name):
    with session(server) as client:
        configured = client.configure(response_format=name)
        client.say("tone 10 to begin with. tone 5 to end.")
        start, data, done = client.heard()
    rate_hz = start["sample_rate"]
    assert (
        configured["sample_rate"] == rate_hz == (48000 if name == "opus" else RATE_HZ)
        and start["response_format"] == name
    )
    if name == "wav":
        with wave.open(io.BytesIO(data)) as file:
            assert file.getframerate() == RATE_HZ
    heard_s = len(decoded(name, data, rate_hz)) / rate_hz
    assert 0 <= heard_s - 15 * 0.08 < 0.11 and done["audio_s"] == 15 * 0.08


def test_speed_sample_rate_and_base64_work_together(server):
    with session(server) as client:
        client.configure(speed=2, sample_rate=16000, audio="base64")
        client.say("tone 10 of it all.")
        assert client.event("audio.start")["sample_rate"] == 16000
        pcm = b""
        while (event := json.loads(client.receive()))["type"] == "audio.chunk":
            pcm += base64.b64decode(event["audio"])
    assert abs(len(pcm) / 2 / 16000 - 0.4) < 0.001 and event["audio_s"] == 0.4
    assert next(reversed(server.engine.messages.values())).listener.speed == 2


def test_a_frame_limit_applies_to_the_whole_utterance(server):
    with session(server) as client:
        client.configure(max_new_tokens=5)
        client.say("frames 3 of the first. frames 2 of the second. frames 1 of the third.")
        assert client.heard()[1] == frames(3) + frames(2)
    assert [asked["max_frames"] for asked in last_asked(server, 2)] == [5, 2]


def test_without_a_config_the_only_model_is_used(tmp_path):
    with Server(tmp_path) as server, session(server) as client:
        client.say("frames 2 of this.")
        assert client.heard()[1] == frames(2)
        configured = client.configure(model="tts-1", voice="alloy")
        assert configured["model"] == "fake" and len(configured["warnings"]) == 2


def test_timings_begin_with_the_first_text(server):
    with session(server) as client:
        client.configure()
        time.sleep(0.3)
        client.say("frames 1 of ", done=False)
        time.sleep(0.1)
        client.say("this.")
        timings = client.heard()[2]["timings"]
    assert 90 < timings["last_text_ms"] <= timings["first_audio_ms"] <= timings["total_ms"] < 290


# Cancelling, barge-in and disconnecting


def is_cancelled(server, text):
    return any(server.engine.asked[id]["text"] == text for id in server.engine.cancelled)


@pytest.mark.parametrize("text", ["hold 2 of cancelled.", "queued for ever and ever."])
def test_cancel_stops_immediately_and_the_session_continues(server, text):
    with session(server) as client:
        client.configure()
        client.say(text)
        until(lambda: [each["text"] for each in last_asked(server)] == [text])
        if "hold" in text:
            client.event("audio.start"), client.audio(), client.audio()
        client.send("input.cancel")
        until(lambda: is_cancelled(server, text), 1)
        done = client.event("audio.done")
        assert (done["reason"], done["utterance"]) == ("cancelled", 1)
        client.say("frames 1 of more.")
        assert client.heard()[1] == frame(0)


def test_cancel_stops_a_request_whose_text_is_incomplete(server):
    with session(server) as client:
        client.configure(model="feeder")
        client.say("Waiting", done=False)
        client.event("audio.start"), client.audio()
        client.say(" for", done=False)
        client.audio()
        client.send("input.cancel")
        until(lambda: is_cancelled(server, "Waiting"), 1)
        assert client.event("audio.done")["reason"] == "cancelled"
        client.say("Next", " one")
        start, pcm, _ = client.heard()
        assert (start["utterance"], pcm) == (2, frames(2))


def test_cancel_without_an_utterance_has_no_effect(server):
    with session(server) as client:
        client.send("input.cancel")
        client.configure()
        client.say("frames 1 of more.")
        assert client.heard()[1] == frame(0)


def test_utterances_are_spoken_in_order(server):
    with session(server) as client:
        client.configure()
        for count in (3, 1, 2):
            client.say(f"frames {count} of this one.")
        heard = [client.heard() for _ in range(3)]
    assert [pcm for _, pcm, _ in heard] == [frames(3), frames(1), frames(2)]
    assert [start["utterance"] for start, _, _ in heard] == [1, 2, 3]


def test_with_barge_in_cancel_a_new_utterance_cancels_the_current_one(server):
    with session(server) as client:
        client.configure(barge_in="cancel")
        client.say("hold 1 of the barged in.")
        client.event("audio.start"), client.audio()
        client.say("frames 2 of the next.")
        assert client.event("audio.done")["reason"] == "cancelled"
        assert client.heard()[1] == frames(2)
    assert is_cancelled(server, "hold 1 of the barged in.")


def test_too_many_queued_utterances_are_refused(server):
    with session(server) as client:
        client.configure()
        client.say("hold 1 of the crowd.")
        client.event("audio.start"), client.audio()
        for _ in range(MAX_QUEUED - 1):
            client.say("hold 1 of the crowd.")
        client.say("frames 1 too many.", done=False)
        assert client.error()["code"] == "too_many_utterances"
        client.send("input.cancel")
        assert [client.event("audio.done")["utterance"] for _ in range(MAX_QUEUED)] == [
            *range(1, MAX_QUEUED + 1)
        ]


@pytest.mark.parametrize("model", ["fake", "feeder"])
def test_a_disconnect_cancels_everything(server, model):
    text = f"hold 1 of one that leaves {model}."
    with session(server) as client:
        client.configure(model=model)
        client.say(text, done=model == "fake")
        client.event("audio.start")
        before = len(server.engine.cancelled)
    until(lambda: len(server.engine.cancelled) == before + 1, 1)
    until(lambda: server.app.state.server.sessions.num_held == 0)


# Errors


@pytest.mark.parametrize(
    ("message", "code", "says"),
    [
        ("", "invalid_json", "not valid JSON"),
        ("{", "invalid_json", "not valid JSON"),
        ('{"x":' * 5000, "invalid_json", "not valid JSON"),
        ("[]", "invalid_event", "session.config, input.text"),
        ("{}", "invalid_event", "session.config, input.text"),
        ('{"type": "input.speech"}', "invalid_event", "session.config, input.text"),
        ('{"type": "input.text"}', "invalid_event", "missing required field"),
        ('{"type": "input.text", "text": 5}', "invalid_event", "expected `str`"),
        ('{"type": "input.done"}', None, "no utterance is open"),
    ],
)
def test_a_wrong_message_gets_an_error_and_has_no_other_effect(server, message, code, says):
    with session(server) as client:
        client.socket.send(message)
        fault = client.error()
        assert fault["code"] == code and says in fault["message"]
        client.configure()
        client.say("frames 1 of more.")
        assert client.heard()[1] == frame(0)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"voice": "carl"}, "voice", "available voices: vivian, ryan"),
        ({"model": "nobody"}, "model", "available models: fake, feeder, chance"),
        ({"speed": 9}, "speed", "from 0.25 to 4"),
        ({"temperature": "hot"}, "temperature", "0 .greedy. to 2"),
        ({"voice": {}}, "voice", "missing required field `id`; voice takes"),
        ({"sede": 1}, "sede", "no field 'sede'"),
        ({"cfg_scale": []}, "cfg_scale", "a number from 0 to 100"),
        ({"audio": "pigeon"}, "audio", "binary .default."),
        ({"barge_in": 1}, "barge_in", "queue .default. lets it finish first, cancel stops it"),
        ({"split_granularity": "word"}, "split_granularity", "token by token"),
        ({"input": "frames 1"}, "input", "send text as input.text"),
        ({"sample_rate": 9000}, None, ""),
        ({"response_format": "opus", "sample_rate": 24000}, "sample_rate", "always decodes to 48000 Hz"),
        ({"model": "chance", "voice": None, "ref_audio": "!"}, "ref_audio", "neither a data URL nor base64"),
    ],
)
def test_a_wrong_config_is_refused_and_the_previous_one_stays(server, fields, param, says):
    with session(server) as client:
        client.configure(seed=77)
        if param is None:
            assert client.configure(**fields)["sample_rate"] == 9000  # pcm supports any rate
            return
        client.send("session.config", **{"model": "fake", **fields})
        fault = client.error()
        assert fault["param"] == param
        with pytest.raises(ValueError, match=says):
            raise ValueError(fault["message"])
        client.say("frames 1 of more.")
        assert client.heard()[0]["seed"] == 77


@pytest.mark.parametrize("model", ["fake", "feeder"])
@pytest.mark.parametrize("text", ["", " ", "\n"])
def test_an_utterance_without_text_is_an_error(server, model, text):
    with session(server) as client:
        client.configure(model=model)
        client.say(text)
        if text:
            assert "no text" in client.error(1)["message"]
        else:
            assert "no utterance is open" in client.error()["message"]


def test_text_over_the_limit_is_refused_and_earlier_text_is_spoken(server):
    with session(server) as client:
        client.configure()
        client.say("frames 1 of it all. ", "x" * 2000)
        assert "takes up to 2000" in client.error()["message"]
        assert client.heard()[1] == frame(0)


def test_text_that_is_refused_is_no_part_of_a_pronunciation(server):
    with session(server) as client:
        client.configure(pronunciations=[{"term": "of it all", "say": "of this"}])
        client.say("frames 1 of i", "x" * 2000, done=False)
        assert "takes up to 2000" in client.error()["message"]
        client.say("t all.")
        client.heard()
    assert last_asked(server)[0]["text"] == "frames 1 of this."


def test_a_failed_utterance_ends_with_an_error_and_the_next_one_is_spoken(server):
    with session(server) as client:
        client.configure()
        client.say("fail 2 of this one. frames", done=False)
        client.event("audio.start"), client.audio(), client.audio()
        assert client.error(1)["message"] == "the codec broke"
        client.say(" 1 that is", " ignored")  # the rest of the failed utterance
        client.say("frames 1 of more.")
        start, pcm, _ = client.heard()
        assert (start["utterance"], pcm) == (2, frame(0))
        for text, code in (("silent as it may be.", "no_audio"), ("full as it may be.", "engine_full")):
            client.say(text)
            assert client.error(start["utterance"] + 1 + (code == "engine_full"))["code"] == code


def test_the_session_survives_an_engine_crash(tmp_path):
    with Server(tmp_path) as server, session(server) as client:
        client.configure()
        client.say("die as you must.")
        assert client.error(1)["code"] == "engine_stopped"
        client.say("frames 1 of nothing.")
        assert client.error(2)["code"] == "engine_not_ready"
        assert outcomes(server)["unavailable"] == 2
        server.start_engine()
        client.say("frames 1 of more.")
        assert client.heard()[1] == frame(0)


# Sentences


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("Good morning, all. How are you?", ["Good morning, all.", "How are you?"]),
        ("Yes. No. I do not know that.", ["Yes. No. I do not know that."]),
        ("Dr. Smith has 3.5 apples. Fine then!", ["Dr. Smith has 3.5 apples.", "Fine then!"]),
        ("\u4f60\u597d\u4e16\u754c\u4f60\u597d\u4e16\u754c\u4f60\u597d\u4e16\u754c\u3002\u518d\u89c1", None),
        ("A text without an end", ["A text without an end"]),
        ("First of all.\n\nSecond of all.", ["First of all.", "Second of all."]),
        ("... --- ...", []),
    ],
)
def test_sentence_cuts_depend_only_on_the_text(text, cut):
    def spoken(size):
        sentences = Sentences()
        ready = [one for at in range(0, len(text), size) for one in sentences.more(text[at : at + size])]
        return ready + sentences.rest()

    whole = spoken(len(text) or 1)
    assert all(spoken(size) == whole for size in (1, 2, 3, 7))
    assert cut is None or whole == cut


def test_a_text_without_a_sentence_end_is_cut_at_a_clause():
    sentences = Sentences()
    text = "a few words more, and " * 100
    ready = [one for at in range(0, len(text), 5) for one in sentences.more(text[at : at + 5])]
    assert len(ready) > 3 and all(len(one) <= MAX_CHARS and one.endswith(",") for one in ready)
    assert " ".join(ready + sentences.rest()) == text.strip()


def test_half_of_a_character_is_named(server):
    with session(server) as client:
        client.socket.send('{"type": "input.text", "text": "\\ud800"}')
        assert "\\ud800 is half of a character" in client.error()["message"]
        client.socket.send('{"type": "input.text", "text": "\\ud83d\\ude00", }')
        assert "half" not in client.error()["message"]


@pytest.mark.parametrize("value", ["9" * 5000, "1e999"], ids=["integer", "number"])
def test_a_number_that_is_too_large_is_refused_and_the_session_goes_on(server, value):
    with session(server) as client:
        client.socket.send(f'{{"type": "session.config", "seed": {value}}}')
        assert "out of range" in client.error()["message"]
        client.configure()


@pytest.mark.parametrize("path", ["/nothing", "/v1/audio/speech", "/v1/realtime?model=nothing"])
def test_a_socket_that_is_refused_leaves_no_error_in_the_log(server, caplog, path):
    with capture_logs() as lines, pytest.raises(InvalidStatus):
        connect(f"ws{server.url.removeprefix('http')}{path}")
    server.http.get("/health")  # the server has ended the connection by then
    assert not [line for line in lines if line["log_level"] == "error"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_model_that_only_clones_needs_a_voice_at_once(tmp_path):
    with Server(tmp_path, models=[CLONER]) as server, session(server) as client:
        client.send("session.config", model="cloner")
        assert client.error()["param"] == "voice"
