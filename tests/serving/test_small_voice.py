"""The bundled small voice speaks intelligibly: a speech recogniser understands what the server says."""

import io

import pytest
import soundfile
from served import connected, serving
from shell import ROOT
from shell import zoo as command

import zoo
from train_a_voice import judge
from train_a_voice.features import FRAME, RATE_HZ

TEXTS = [
    "The old man told the children a story about the sea.",
    "We had bread and cheese for breakfast this morning.",
    "My brother wants to travel around the world next year.",
    "She opened the window because the room was too hot.",
    "I cannot remember where I put my keys.",
]
VOICES = ["rms", "slt"]
GREEDY = {"temperature": 0, "depth_temperature": 0, "seed": 1}


@pytest.mark.compile
def test_a_compiled_server_without_a_model_speaks_words(tmp_path):
    heard = []
    with serving(tmp_path, "--compile", "--dtype", "bfloat16") as url:
        for i, text in enumerate(TEXTS):
            answer = connected(url).audio.speech.create(
                model="small_voice",
                voice=VOICES[i % len(VOICES)],
                input=text,
                response_format="wav",
                extra_body=GREEDY,
            )
            samples, rate_hz = soundfile.read(io.BytesIO(answer.content), dtype="float32")
            assert rate_hz == RATE_HZ and len(samples) % FRAME == 0
            assert 0.02 * len(text) < len(samples) / rate_hz < 0.15 * len(text)  # seconds per letter
            heard.append(judge.transcribe(samples, rate_hz))
    assert judge.word_error_rate(TEXTS, heard) < 0.4, heard


def test_the_voice_is_small_and_complete():
    facts = zoo.inspect(zoo.SMALL_VOICE)
    assert facts["voices"] == VOICES and facts["languages"] == ["auto", "english"]
    assert sum(path.stat().st_size for path in zoo.SMALL_VOICE.rglob("*.safetensors")) < 20e6


def test_the_voice_is_called_by_its_name_and_not_by_its_format(tmp_path):
    done = command("say", "Hello.", "--voice", "nobody", "-o", tmp_path / "out.wav")
    assert done.stderr == "zoo: the small voice has no voice 'nobody'; it has: rms, slt\n"


def test_the_voice_is_package_data():
    """A pattern in pyproject.toml matches each of its files."""
    import tomllib

    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = zoo.SMALL_VOICE.parent
    matched = {path for pattern in setup["package-data"]["zoo"] for path in package.glob(pattern)}
    assert {path for path in zoo.SMALL_VOICE.rglob("*") if path.is_file()} <= matched
