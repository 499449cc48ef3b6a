"""ElevenLabs' routes with timestamps, with a fake engine and an aligner that gives each word an equal part."""

import base64
import json
from itertools import pairwise

import pytest
from audio_files import decoded
from elevenlabs.client import ElevenLabs
from fake_aligner import FRAME, FakeAligner
from fake_engine import MODEL, RATE_HZ, frame
from http_server import Server, error, until

from serving.http.elevenlabs.characters import Characters, joined
from serving.http.word_times import Word
from serving.settings import Limits

FRAME_S = FRAME / RATE_HZ


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    limits = Limits(memory_bytes=4 << 20)
    with Server(tmp_path_factory.mktemp("s"), models=[MODEL], limits=limits) as server:
        yield server


@pytest.fixture
def server(running):
    running.app.state.server.aligner = FakeAligner()
    yield running
    memory = running.app.state.server.memory
    until(lambda: memory.num_held == 0)


def ask(server, text, end="/with-timestamps", output_format="pcm_24000", **fields):
    path = f"/v1/text-to-speech/vivian{end}"
    return server.http.post(path, params={"output_format": output_format}, json={"text": text, **fields})


def lines_of(answer):
    return [json.loads(line) for line in answer.text.splitlines()]


def check_times(alignment, end_s):
    """Each character begins where the one before it ends."""
    starts, ends = (alignment[f"character_{edge}_times_seconds"] for edge in ("start", "end"))
    assert len(starts) == len(ends) == len(alignment["characters"])
    assert all(a == pytest.approx(b, abs=2e-6) for a, b in zip(ends, starts[1:], strict=False))
    assert all(a <= b for a, b in pairwise(starts)) and ends[-1] == pytest.approx(end_s, abs=2e-6)


def test_a_whole_answer_has_the_audio_and_its_characters(server):
    answer = ask(server, "frames 3")
    assert answer.headers["content-type"] == "application/json"
    made = answer.json()
    assert base64.b64decode(made["audio_base64"]) == frame(0) + frame(1) + frame(2)
    assert "".join(made["alignment"]["characters"]) == "frames 3"
    assert made["normalized_alignment"] == made["alignment"]
    check_times(made["alignment"], 3 * FRAME_S)


def test_a_stream_has_a_line_for_each_part(server):
    answer = ask(server, "frames 3 ", "/stream/with-timestamps")
    lines = lines_of(answer)
    audio = b"".join(base64.b64decode(line["audio_base64"]) for line in lines)
    assert audio == frame(0) + frame(1) + frame(2)
    assert all(line["audio_base64"] or line["alignment"] for line in lines)
    told = [line["alignment"] for line in lines if line["alignment"]]
    characters = [character for alignment in told for character in alignment["characters"]]
    assert "".join(characters) == "frames 3 "


def test_audio_is_in_the_format_that_was_asked_for(server):
    whole = base64.b64decode(ask(server, "tone 10", output_format="mp3_44100_128").json()["audio_base64"])
    assert abs(len(decoded("mp3", whole, 44100)) / 44100 - 0.8) < 0.1
    lines = lines_of(ask(server, "tone 10", "/stream/with-timestamps", "mp3_44100_128"))
    parts = b"".join(base64.b64decode(line["audio_base64"]) for line in lines)
    assert abs(len(decoded("mp3", parts, 44100)) / 44100 - 0.8) < 0.1


def test_the_speed_is_that_of_the_audio(server):
    alignment = ask(server, "tone 10", voice_settings={"speed": 2.0}).json()["alignment"]
    check_times(alignment, 0.4)


def test_words_that_were_not_sent_are_in_the_normalized_text_alone(server):
    made = ask(server, "pieces 2").json()  # the fake engine speaks "piece 0" and "piece 1"
    assert made["alignment"] is None
    assert "".join(made["normalized_alignment"]["characters"]) == "piece 0 piece 1"
    check_times(made["normalized_alignment"], 2 * FRAME_S)


@pytest.mark.parametrize("end", ["/with-timestamps", "/stream/with-timestamps"])
def test_without_an_aligner_there_is_one_clear_error(running, end):
    running.app.state.server.aligner = None
    fault = error(ask(running, "frames 3", end), 400)
    assert fault["code"] == "no_aligner" and "--aligner DIR" in fault["message"]


@pytest.mark.parametrize("end", ["/with-timestamps", "/stream/with-timestamps"])
def test_an_aligner_that_cannot_work_is_an_error(server, end):
    server.app.state.server.aligner.fault = "the aligner's directory is gone"
    assert error(ask(server, "frames 3", end), 503)["code"] == "aligner_failed"


def test_an_aligner_that_fails_leaves_no_half_answer(server):
    server.app.state.server.aligner.broken = "no memory"
    assert error(ask(server, "frames 3"), 503)["code"] == "aligner_failed"


def test_wrong_fields_have_their_names(server):
    assert error(ask(server, "reject text"), 400)["param"] == "text"
    assert error(ask(server, "frames 1", stream=False), 400)["param"] == "stream"
    assert error(ask(server, "frames 1", output_format="mp3"), 400)["param"] == "output_format"


def test_their_client_gets_whole_answers_and_streams(server):
    client = ElevenLabs(base_url=server.url, api_key="none")
    fields = {"text": "frames 3", "output_format": "pcm_24000"}
    whole = client.text_to_speech.convert_with_timestamps("vivian", **fields)
    assert base64.b64decode(whole.audio_base_64) == frame(0) + frame(1) + frame(2)
    assert "".join(whole.alignment.characters) == "frames 3"
    streamed = list(client.text_to_speech.stream_with_timestamps("vivian", **fields))
    assert b"".join(base64.b64decode(part.audio_base_64) for part in streamed) == frame(0) + frame(1) + frame(
        2
    )
    [told] = [part.alignment for part in streamed if part.alignment is not None]
    assert told == whole.alignment


def word(text, start_s, end_s):
    return Word(text, start_s, end_s, True, 1.0)


def test_characters_of_a_word_share_its_time_and_gaps_take_the_rest():
    found = Characters("Hi [pause:1s] you").take([word("Hi", 0.5, 1.0), word("you", 2.0, 2.3)])
    alignment = found.alignment
    assert "".join(alignment.characters) == "Hi [pause:1s] you" and found.normalized_alignment == alignment
    assert alignment.character_start_times_seconds[:2] == [0.5, 0.75]
    assert alignment.character_end_times_seconds[:2] == [0.75, 1.0]
    assert alignment.character_start_times_seconds[2] == 1.0
    assert alignment.character_end_times_seconds[-4:] == [2.0, 2.1, 2.2, 2.3]


def test_after_another_word_only_the_normalized_text_goes_on():
    characters = Characters("It is 2 km long.")
    parts = [characters.take([word("It", 0.0, 0.1), word("is", 0.1, 0.2)])]
    parts += [characters.take([word("two", 0.2, 0.3), word("kilometres", 0.3, 0.5), word("long.", 0.5, 0.6)])]
    assert "".join(parts[0].alignment.characters) == "It is" and parts[1].alignment is None
    assert characters.rest() is None
    whole = joined(parts)
    assert whole.alignment is None
    assert "".join(whole.normalized_alignment.characters) == "It is two kilometres long."


def test_chinese_words_have_no_spaces_between_them():
    found = Characters("你好。").take([word("你", 0.0, 0.1), word("好。", 0.1, 0.3)])
    assert found.alignment.characters == ["你", "好", "。"]
