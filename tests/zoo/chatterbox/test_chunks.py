"""Chatterbox in chunks: first audio before the speech is complete."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from feeding import Speaking
from models import directory

import zoo
from zoo.chatterbox.strategy import AHEAD, CHUNK
from zoo.contract import View
from zoo.nn.s3.sizes import FRAME_SAMPLES
from zoo.request import Request

SPEECH = 60  # codes


@pytest.fixture(scope="module", params=["tiny", "tiny-turbo"])
def speaking(request):
    """Return a model in chunks, and a state whose slot 0 has spoken SPEECH codes."""
    family = zoo.load(directory("chatterbox", request.param), device="cpu", chunked=True)
    state = family.state(1, SPEECH)
    family.admit(state, 0, family.prompt(Request(text="Good morning.", max_frames=SPEECH, seed=3)))
    codes = torch.randint(0, 6000, (SPEECH,), generator=torch.Generator().manual_seed(1))
    state.tape[0, :, 0] = codes
    state.ready[0], state.done[0] = SPEECH, True
    return family, state


def render(family, state, start: int, stop: int, is_last: bool):
    one = torch.tensor([0])
    length = family.spec.window.length_bucket(stop)
    view = View(
        one, one + start, one + stop - start, torch.tensor([is_last]), max(CHUNK, stop - start), length
    )
    with torch.inference_mode():
        samples, valid = family.render(state, view)
    return samples[0, : valid[0]]


def again(state):
    for name in ("vocoder", "phase", "num_heard"):
        getattr(state, name)[0] = 0
    return state


def test_a_speech_in_one_chunk_equals_the_whole_form(speaking):
    family, state = speaking
    chunk = render(family, again(state), 0, SPEECH, is_last=True)
    whole = zoo.load(family_directory(family), device="cpu")
    same = whole.state(1, SPEECH)
    for name, rows in same.tensors().items():
        rows.copy_(state.tensors()[name])
    assert torch.allclose(chunk, render(whole, same, 0, SPEECH, is_last=True), atol=1e-5)


def family_directory(family):
    return directory("chatterbox", "tiny-turbo" if family.config.is_turbo else "tiny")


def test_chunks_are_as_long_as_the_whole_speech(speaking):
    family, state = speaking
    again(state)
    parts = [render(family, state, start, start + CHUNK, is_last=False) for start in (0, CHUNK)]
    parts.append(render(family, state, 2 * CHUNK, SPEECH, is_last=True))
    silent = 3 if family.config.is_turbo else 0
    assert sum(map(len, parts)) == (SPEECH + silent) * FRAME_SAMPLES
    assert len(parts[0]) == CHUNK * FRAME_SAMPLES - family.spec.window.hold_samples
    assert all(part.isfinite().all() for part in parts)


@pytest.mark.slow
def test_multilingual_drops_the_noise_of_the_last_code_with_and_without_chunks():
    place = directory("chatterbox", "tiny-multilingual")
    for chunked in (True, False):
        family = zoo.load(place, device="cpu", chunked=chunked)
        for codes, played in ((1, 1), (CHUNK + 1, CHUNK), (SPEECH, SPEECH - 1)):
            state = family.state(1, SPEECH)
            family.admit(state, 0, family.prompt(Request(text="Good morning.", max_frames=SPEECH)))
            state.ready[0], state.done[0] = codes, True
            cuts = [*range(0, codes, CHUNK if chunked else SPEECH), codes]
            parts = [render(family, state, *cut, is_last=cut[1] == codes) for cut in pairwise(cuts)]
            assert sum(map(len, parts)) == played * FRAME_SAMPLES, (chunked, codes)


def test_a_chunk_depends_on_no_code_beyond_those_ahead(speaking):
    family, state = speaking
    first = render(family, again(state), 0, CHUNK, is_last=False)
    kept = state.tape[0].clone()
    state.tape[0, CHUNK + AHEAD :] = 7
    assert torch.equal(first, render(family, again(state), 0, CHUNK, is_last=False))
    state.tape[0, CHUNK + AHEAD - 1] = 7
    assert not torch.equal(first, render(family, again(state), 0, CHUNK, is_last=False))
    state.tape[0] = kept


def test_the_engine_gives_out_a_chunk_before_the_speech_ends():
    """The codes are random; those that the server speaks are cut at the same places."""
    family = zoo.load(directory("chatterbox", "tiny"), device="cpu", chunked=True)
    speaking = Speaking(family)
    listener = speaking.begin(Request(text="Good morning, everybody.", max_frames=SPEECH, seed=3))
    early = 0
    while listener.end is None:
        speaking.turn()
        early = early or len(listener.samples) if listener.end is None else early
    assert listener.frames > CHUNK + AHEAD, "the speech is too short to see a chunk"
    assert 0 < early < len(listener.samples) == listener.frames * FRAME_SAMPLES


def test_a_model_in_chunks_has_no_watermark(speaking):
    family, _ = speaking
    assert "watermark" not in {option.name for option in family.spec.options}


def test_models_that_stream_exactly_are_not_changed():
    path = directory("csm", "tiny")
    assert zoo.load(path, chunked=True).spec == zoo.load(path).spec
