"""CSM's voices: recordings in the model's directory, with their words."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import soundfile
from models import directory

import zoo
from zoo.contract import Said
from zoo.csm.voices import TRANSCRIPTS, find
from zoo.request import AudioClip, Reference, Request, RequestError

WORDS = "The words of mine."


def samples(seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=5000) / 20
    return (noise * 32768).round().astype(np.int16)


def as_reference(seed: int, words: str, speaker: str = "0") -> Reference:
    return Reference(AudioClip(samples(seed).astype(np.float32) / 32768, 24_000), words, speaker)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint with one recording of the published repository, one with words, and one without."""
    path = shutil.copytree(directory("csm", "tiny"), tmp_path_factory.mktemp("csm") / "model")
    (path / "prompts").mkdir()
    for seed, name in enumerate(("conversational_a", "Mine", "unknown")):
        soundfile.write(path / "prompts" / f"{name}.wav", samples(seed), 24_000, subtype="PCM_16")
    (path / "prompts" / "Mine.txt").write_text(f"{WORDS}\n")
    return zoo.load(path, "cpu", "float32")


def test_recordings_with_known_words_are_voices(model):
    assert model.spec.voices == ("random", "mine", "conversational_a")
    with pytest.raises(
        RequestError, match=r"no voice 'unknown'; it has: random, .*; for another voice, give"
    ):
        model.prompt(Request(text="Hi.", voice="unknown"))


@pytest.mark.parametrize("speaker", [0, 7])
@pytest.mark.parametrize(
    ("voice", "seed", "words"),
    [("conversational_a", 0, TRANSCRIPTS["conversational_a"]), ("MINE", 1, WORDS)],
)
def test_a_voice_reads_as_a_reference_of_the_requests_speaker(model, voice, seed, words, speaker):
    options = {"speaker": speaker}
    spoken = model.prompt(Request(text="Hi.", voice=voice, options=options))
    given = as_reference(seed, words, str(speaker))
    cloned = model.prompt(Request(text="Hi.", references=(given,), options=options))
    assert spoken.prefix_keys == cloned.prefix_keys


def test_without_a_voice_the_voice_stays_random(model):
    asked = [Request(text="Hi.", voice=voice) for voice in (None, "random")]
    plain, named = (next(model.passes(request)).prefix_keys for request in asked)
    assert plain == named == model.writer(asked[0], {"speaker": 0}).keys
    assert len(plain) < len(model.prompt(Request(text="Hi.", voice="mine")).prefix_keys)


def test_later_pieces_keep_the_voice_that_was_named(model):
    asked = Request(text="Hi.", voice="mine")
    later = model.later_prompt(asked, Said("Before.", model.writer.cloner(as_reference(2, "").clip)))
    assert later.prefix_keys == model.prompt(asked).prefix_keys


def test_a_voice_and_a_reference_exclude_each_other(model):
    with pytest.raises(RequestError, match="a voice and a reference are both given"):
        model.prompt(Request(text="Hi.", voice="mine", references=(as_reference(0, "Hm."),)))


def test_a_recording_that_cannot_be_read_or_named_is_refused(tmp_path):
    path = shutil.copytree(directory("csm", "tiny"), tmp_path / "model")
    (path / "prompts").mkdir()
    (path / "prompts" / "read_speech_a.wav").write_bytes(b"no audio")
    with pytest.raises(ValueError, match=r"read_speech_a\.wav cannot be read"):
        zoo.load(path, "cpu", "float32")
    (path / "prompts" / "read_speech_a.txt").write_text(" \n")
    soundfile.write(path / "prompts" / "read_speech_a.wav", samples(0), 24_000)
    with pytest.raises(
        ValueError, match=r"read_speech_a\.txt is empty; write the words of read_speech_a\.wav"
    ):
        zoo.load(path, "cpu", "float32")
    (path / "prompts" / "random.wav").write_bytes(b"")
    with pytest.raises(ValueError, match=r"the voice 'random' exists already; rename the file"):
        find(path)
