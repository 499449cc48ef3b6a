"""The requests of `zoo parity`: one for each capability of a model, derived from its spec."""

from __future__ import annotations

import numpy as np
import pytest
from models import directory, family

import zoo
from serving.tools.requests import MANNER, TRANSCRIPT, buzz, every_request, first_request

ASKED = {
    ("toy", "tiny"): {"voice"},
    ("qwen3_tts", "tiny"): {
        "voice",
        "voice dylan",  # speaks a dialect, so its prompt has a language
        "language chinese",
        "voice text_mode=interleaved",
        "voice dylan text_mode=interleaved",
        "language chinese text_mode=interleaved",
    },
    ("qwen3_tts", "tiny-1.7b"): {
        "voice",
        "voice dylan",
        "instruct",
        "language chinese",
        "voice text_mode=interleaved",
        "voice dylan text_mode=interleaved",
        "instruct text_mode=interleaved",
        "language chinese text_mode=interleaved",
    },
    ("qwen3_tts", "tiny-base"): {
        "clone",
        "language chinese",
        "clone text_mode=full",
        "clone x_vector_only_mode=true",
        "language chinese text_mode=full",
        "language chinese x_vector_only_mode=true",
    },
    ("qwen3_tts", "tiny-1.7b-design"): {
        "design",
        "language chinese",
        "design text_mode=interleaved",
        "language chinese text_mode=interleaved",
    },
    ("voxcpm2", "tiny"): {
        "voice",
        "design",
        "clone",
        "clone without transcript",
        "clone of two",
        "clone with instructions",
    },
    ("voxcpm2", "tiny-1.5"): {"voice", "clone"},
    ("higgs_v3", "tiny"): {"voice", "clone", "clone without transcript"},
    ("fish_s2", "tiny"): {"voice", "clone", "clone without transcript", "clone of two"},
    ("cosyvoice2", "tiny"): {
        "voice",
        "voice sound",  # without a prompt
        "instruct",
        "clone",
        "clone without transcript",
        "clone with instructions",
        "voice text_mode=interleaved",
        "voice sound text_mode=interleaved",
        "clone text_mode=interleaved",
        "clone without transcript text_mode=interleaved",
    },
    ("opuslm", "tiny"): {
        "voice",
        "voice anna",
        "clone",
        "text",
        "transcript",
        "continuation",
    },
    ("opuslm", "tiny_dialogue"): {
        "voice",
        "voice anna",
        "clone",
        "spoken turn",
        "later turn",
        "spoken turn in text",
        "text",
    },
    ("bagpiper", "tiny"): {"voice", "spoken turn", "spoken turn in text", "text"},
}
REFUSED = {
    ("cosyvoice2", "tiny"): {
        "instruct text_mode=interleaved",
        "clone with instructions text_mode=interleaved",
    },
    ("bagpiper", "tiny"): {"later turn"},
    ("voxcpm2", "tiny"): {"clone of two x_vector_only_mode=true"},
    ("qwen3_tts", "tiny-base"): {"clone without transcript", "clone without transcript text_mode=full"},
    ("voxcpm2", "tiny-1.5"): {
        "clone without transcript",
        "clone x_vector_only_mode=true",
        "clone without transcript x_vector_only_mode=true",
    },
}


@pytest.mark.parametrize("name, size", ASKED)
def test_there_is_a_request_for_each_capability_of_a_model(name, size):
    model = family(name, size=size)
    taken, refused = every_request(model, frames=5)
    assert set(taken) == ASKED[name, size]
    assert set(refused) == REFUSED.get((name, size), set())
    reasons = ("transcript", "2 are given", "would be spoken between the codes", "no earlier answers")
    assert all(any(reason in line for reason in reasons) for line in refused.values())


def test_the_name_of_a_request_describes_its_fields():
    taken, _ = every_request(family("qwen3_tts", size="tiny-1.7b"), frames=5)
    first = taken["voice"]
    assert (first.voice, first.temperature, first.max_frames) == ("aiden", 0, 5)
    assert taken["voice dylan text_mode=interleaved"].voice == "dylan"
    assert taken["voice dylan text_mode=interleaved"].options == {"text_mode": "interleaved"}
    assert taken["instruct"].instructions == MANNER and taken["instruct"].voice == "aiden"
    assert taken["language chinese"].language == "chinese"
    clones, _ = every_request(family("voxcpm2"), frames=5)
    assert clones["clone"].temperature is None  # VoxCPM2 has no sampling
    assert clones["clone"].references[0].transcript == TRANSCRIPT
    assert clones["clone without transcript"].references[0].transcript is None
    assert clones["clone with instructions"].instructions == MANNER


def test_the_model_accepts_the_first_request():
    for name, size in ASKED:
        model = family(name, size=size)
        request = first_request(model, text="Hello there, how are you this morning?", max_frames=3)
        assert request.max_frames == 3 and model.prompt(request).max_frames == 3


def test_a_model_without_voices_is_asked_for_a_clone(tmp_path):
    """The published CosyVoice 2 is such a model: instructions alone do not choose a voice for it."""
    for file in directory("cosyvoice2", "tiny").iterdir():
        if file.name != "spk2info.pt":
            (tmp_path / file.name).symlink_to(file)
    request = first_request(zoo.load(tmp_path), max_frames=3)
    assert request.references and request.instructions is None


def test_the_clip_is_a_sound():
    clip = buzz(1.5, 110)
    assert clip.samples.dtype == np.float32 and len(clip.samples) == 36_000 and clip.sample_rate_hz == 24_000
    assert 0.1 < np.abs(clip.samples).max() < 1
