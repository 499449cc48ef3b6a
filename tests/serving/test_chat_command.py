"""The command `zoo chat`, with a demo checkpoint of GLM-4-Voice and a stand-in for the sound card."""

import sys
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import soundfile
from models import alone, directory, family
from shell import zoo

from serving.cli import chat
from serving.engine.wire import audio_clip
from serving.http.decode import decode
from zoo.request import Request, Turn

NAME = "glm4_voice"
FLAGS = ("--temperature", 0, "-O", "max_tokens=40", "--device", "cpu", "--dtype", "float32")


@pytest.fixture
def model():
    return directory(NAME, "tiny")


class Stream:
    """An InputStream that hears half a second of a tone."""

    def __init__(self, samplerate, callback, **settings):
        self.callback, self.samplerate = callback, samplerate

    def __enter__(self):
        chunk = np.sin(np.arange(self.samplerate // 2) / 20).astype("f4")[:, None] / 3
        self.callback(chunk, len(chunk), None, None)

    def __exit__(self, *_):
        pass


class Output:
    """An OutputStream that keeps what it plays: the rate, then the chunks."""

    made: ClassVar = []

    def __init__(self, samplerate, channels, dtype):
        assert (channels, dtype) == (1, "float32")
        self.made.append([samplerate])

    def __enter__(self):
        return self

    def write(self, samples):
        assert samples.shape[1:] == (1,) and samples.dtype == np.float32
        self.made[-1].append(samples[:, 0])

    def __exit__(self, *_):
        pass


@pytest.fixture
def played(monkeypatch):
    card = SimpleNamespace(
        PortAudioError=OSError,
        check_output_settings=lambda **settings: None,
        InputStream=Stream,
        OutputStream=Output,
    )
    monkeypatch.setitem(sys.modules, "sounddevice", card)
    monkeypatch.setattr(Output, "made", [])
    return Output.made


def tone(path, seconds, rate_hz=16_000):
    soundfile.write(path, np.sin(np.arange(int(seconds * rate_hz)) / 20) / 3, rate_hz)
    return path


def asked(turns):
    request = Request(text="", turns=tuple(turns), temperature=0.0, options={"max_tokens": 40})
    return alone(NAME, request)


def test_recordings_are_answered_in_turn(model, tmp_path):
    files = [tone(tmp_path / f"{i}.wav", 0.5 + i / 2) for i in range(3)]
    done = zoo("chat", *files, "-m", model, "-o", tmp_path / "answer.wav", "--system", "Be brief.", *FLAGS)
    assert done.returncode == 0, done.stderr
    turns, texts = [Turn("system", "Be brief.")], []
    for i, file in enumerate(files):
        turns.append(Turn("user", clip=audio_clip(decode(file.read_bytes(), 60))))
        speech = asked(turns)
        turns.append(Turn("assistant", tokens=speech.tokens))
        texts.append(speech.text)
        samples, rate_hz = soundfile.read(tmp_path / f"answer-{i + 1}.wav")
        assert rate_hz == family(NAME).spec.sample_rate_hz and len(samples) == len(speech.samples)
    said = [line for line in done.stdout.splitlines() if "s of audio" not in line]
    assert "\n".join(said) == "\n".join("\n".join(text.splitlines()) for text in texts)


def test_turns_are_typed_or_spoken_and_answers_are_played(model, played):
    done = zoo("chat", "-m", model, *FLAGS, stdin="Good morning.\n\n\n")
    assert done.returncode == 0, done.stderr
    assert "Recording; Enter ends it." in done.stderr
    first = asked([Turn("user", "Good morning.")])
    assert len(played) == 2 and played[0][0] == 22_050
    np.testing.assert_allclose(np.concatenate(played[0][1:]), first.samples.numpy(), atol=1e-5)


@pytest.mark.slow
def test_text_and_audio_come_while_the_answer_is_made(tmp_path, monkeypatch):
    """The answer has 115 codes, and text before, between and behind its windows."""
    came, take = [], chat.Answer.take
    path = tmp_path / "answer-1.wav"

    def noted(answer, event):
        take(answer, event)
        came.append((type(event).__name__, path.stat().st_size if path.exists() else 0))

    monkeypatch.setattr(chat.Answer, "take", noted)
    given = ("--seed", 0, "--temperature", 1, "-O", "max_tokens=120", "--device", "cpu", "--dtype", "float32")
    question = tone(tmp_path / "question.wav", 0.5)
    done = zoo(
        "chat", question, "-m", directory("step_audio2", "tiny"), "-o", tmp_path / "answer.wav", *given
    )
    assert done.returncode == 0, done.stderr
    kinds = [kind for kind, _ in came]
    sizes = [size for kind, size in came if kind == "Audio"]
    assert kinds.count("Audio") > 2 and kinds[0] == "Text"
    assert "Text" in kinds[kinds.index("Audio") :]
    assert 44 < sizes[0] < sizes[1] < sizes[-1] == path.stat().st_size
    samples, _ = soundfile.read(path)  # the header has the true length
    assert 44 + 2 * len(samples) == sizes[-1]
    assert done.stdout.splitlines()[-1] == f"{path}: {len(samples) / 24_000:.2f} s of audio"


@pytest.mark.slow
def test_answers_are_spoken_in_the_voice_of_a_recording(tmp_path):
    model, recording = directory("step_audio2", "tiny"), tone(tmp_path / "voice.wav", 1.0)
    question = tone(tmp_path / "question.wav", 0.5)
    for name, voice in (("own", ("--voice", "default_male")), ("given", ("--reference", recording))):
        done = zoo("chat", question, "-m", model, "-o", tmp_path / f"{name}.wav", *voice, *FLAGS)
        assert done.returncode == 0, done.stderr
    own, given = (soundfile.read(tmp_path / f"{name}-1.wav")[0] for name in ("own", "given"))
    assert len(own) == len(given) > 0 and not np.array_equal(own, given)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("no.wav", "-o", "x.wav"), "no.wav cannot be read"),
        (("-o", "x.png"), "must end in one of"),
        (("-O", "speed=2", "-o", "/tmp/x.wav"), "has no option 'speed'"),
    ],
)
def test_a_bad_argument_is_one_line(model, arguments, says):
    done = zoo("chat", *arguments, "-m", model)
    assert done.returncode == 2 and says in done.stderr.splitlines()[-1]


def test_without_a_sound_card_the_answers_need_files(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    done = zoo("chat", "-m", model)
    assert done.returncode == 2 and "pip install -e '.[microphone]'" in done.stderr
    assert "-o answer.wav" in done.stderr


def test_a_model_that_speaks_texts_points_to_say(tmp_path):
    done = zoo("chat", "-m", directory("qwen3_tts", "tiny"), "-o", tmp_path / "x.wav")
    assert done.returncode == 2 and "use zoo say" in done.stderr
