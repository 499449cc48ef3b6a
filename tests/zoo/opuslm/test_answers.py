"""OpusLM: words before speech, transcripts, continuations and dialogues, in the plain loop and in the engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import Clock, family, serve

import zoo
from serving.engine.engine import Engine, Finished
from zoo.contract import NEVER
from zoo.opuslm.delay import DelayState, Words, delayed, left_over
from zoo.opuslm.model import OpusLM
from zoo.request import AudioClip, Request, RequestError, Turn

END, ROLE, AUDIO = 5, 10, 34


def model(size="tiny") -> OpusLM:
    loaded = family("opuslm", size=size)
    assert isinstance(loaded, OpusLM)
    return loaded


def clip(seed=0) -> AudioClip:
    random = np.random.default_rng(seed)
    return AudioClip(random.uniform(-0.5, 0.5, 8000).astype(np.float32), 16_000)


# the delay


def rows_of(max_words, ended_at, speaks=1, steps=40):
    """Return the first ids of the rows that are fed back, the words that are written, and the state, for a model that
    draws word 100 + i in step i and ends its text once."""
    state = DelayState(model("tiny_dialogue").spec, 1, 40, torch.float32, torch.device("cpu"))
    state.done[0], state.limit[0], state.end[0] = False, 4, 4
    state.begin[0], state.max_words[0], state.speaks[0] = NEVER, max_words, speaks
    slots, rows, words = torch.tensor([0]), [], []
    while not state.done[0]:
        step = int(state.steps[0])
        assert step < steps, "it does not end"
        word = torch.tensor([END if step == ended_at else 100 + step])
        drawn = torch.full((1, 9), 1000 + step)
        state.written[0] = -1
        state.step(slots, drawn, torch.full((1, 9), step), word, Words(END, ROLE, AUDIO))
        rows.append(state.row[0].tolist())
        words += [int(state.written[0])] * (int(state.written[0]) >= 0)
    return rows, words, state


def test_words_are_followed_by_their_end_pads_and_the_opening_of_speech():
    rows, words, state = rows_of(20, 3)
    assert words == [100, 101, 102]
    assert [row[0] for row in rows[:16]] == [100, 101, 102, END, 104, *[0] * 8, ROLE, AUDIO, 1015]
    assert all(row[1:] == [0] * 8 for row in rows[:15])
    assert rows[15] == [1015] + [0] * 8 and rows[16] == [1016, 1016] + [0] * 7
    assert int(state.ready[0]) == 4
    assert torch.equal(state.tape[0, :4], 15 + torch.arange(4)[:, None] + torch.arange(9))


def test_at_the_limit_the_end_of_words_is_put_and_one_pad_is_missing():
    rows, words, _ = rows_of(3, None)
    assert words == [100, 101, 102]
    assert [row[0] for row in rows[:15]] == [100, 101, 102, 103, END, *[0] * 7, ROLE, AUDIO, 1014]
    rows, words, _ = rows_of(3, 3)  # also if the model ends there by itself
    assert words == [100, 101, 102]
    assert [row[0] for row in rows[:15]] == [100, 101, 102, END, 104, *[0] * 7, ROLE, AUDIO, 1014]


def test_a_text_without_speech_ends_with_its_end_or_at_its_limit():
    for max_words, ended_at, expected in ((20, 3, 3), (3, None, 3), (3, 3, 3), (1, 1, 1)):
        rows, words, state = rows_of(max_words, ended_at, speaks=0)
        assert len(words) == expected and int(state.ready[0]) == 0
        assert len(rows) == expected + (ended_at is not None and ended_at < max_words)


@pytest.mark.parametrize("num", [1, 3, 8, 20])
def test_what_a_prompt_leaves_over_comes_in_the_first_steps(num):
    rows = torch.arange(1, num + 1)[:, None] + 100 * torch.arange(9)
    whole = delayed(torch.cat((rows, torch.zeros(8, 9, dtype=torch.int64))))
    assert torch.equal(torch.cat((delayed(rows), left_over(rows))), whole)


# requests


def reply(turns, **fields):
    fields = {"voice": "default", "max_frames": 9, "temperature": 0.0} | fields
    return Request(text="", turns=turns, options={"max_tokens": 12}, **fields)


def requests() -> dict[str, list[Request]]:
    """Return requests of each size of the demo."""
    heard = (Turn("user", clip=clip()),)
    few = {"max_tokens": 15}
    base = [
        Request(text="", turns=heard, output="transcript", options=few),
        Request(text="Good morning.", voice="anna", max_frames=11, seed=3),
        Request(text="", turns=(Turn("user", clip=clip(2)),), output="transcript", options=few),
        Request(text="Once upon a time", output="text", options=few),
        Request(text="Once", output="text", options=few | {"text_temperature": 0.9}, seed=5),
        Request(text="", turns=heard, output="continuation", max_frames=13, seed=2),
        Request(text="", output="continuation", max_frames=7, temperature=0.0),
    ]
    dialogue = [
        reply(heard),
        reply((Turn("user", "Who is there?"),), seed=4, temperature=None, voice="anna"),
        reply((Turn("user", "Who is there?"),), output="text"),
        reply((*heard, Turn("assistant", "It hums.", clip(1)), Turn("user", "Why?"))),
        Request(text="Why?", voice="default", max_frames=3, seed=1, options={"max_tokens": 3}),
    ]
    return {"tiny": base, "tiny_dialogue": dialogue}


def test_a_spoken_answer_after_a_long_dialogue_keeps_most_of_the_room_for_its_speech():
    ours = model("tiny_dialogue")
    turns = (Turn("user", "Who is there?" * 700),)
    prompt = ours.prompt(Request(text="", turns=turns, voice="default"))
    room = ours.spec.max_positions - len(prompt.inputs)
    words = prompt.slot["max_words"]
    assert room // 5 < words <= room // 4 and prompt.max_frames > 2 * words
    assert len(prompt.inputs) + prompt.max_steps <= ours.spec.max_positions


@pytest.mark.parametrize("size", ["tiny", "tiny_dialogue"])
def test_the_engine_gives_what_the_plain_loop_gives(size):
    """Several kinds of requests in one batch, in windows."""
    ours, asked = model(size), requests()[size]
    engine = Engine(ours, max_slots=3, compile=False, clock=Clock())
    listeners = serve(engine, {0: asked[:2], 3: asked[2:4], 9: asked[4:]})
    texts = []
    for listener, request in zip(listeners, asked, strict=True):
        alone = zoo.generate(ours, request)
        assert isinstance(listener.end, Finished), listener.end
        assert listener.end.frames == len(alone.frames)
        assert np.allclose(listener.samples, alone.samples, atol=5e-5)
        assert "".join(listener.texts) == alone.text
        texts.append(alone.text)
        is_written = request.output in ("text", "transcript")
        assert is_written == (len(alone.frames) == 0)
    assert len(set(texts)) > 2


def test_a_greedy_text_and_a_random_one_differ_and_the_seed_repeats_it():
    ours = model()
    asked = [Request(text="Once", output="text", options={"max_tokens": 9}) for _ in range(1)]
    warm = [
        Request(text="Once", output="text", seed=seed, options={"max_tokens": 9, "text_temperature": 1.0})
        for seed in (1, 1, 2)
    ]
    greedy, one, same, other = (zoo.generate(ours, request).text for request in asked + warm)
    assert one == same and len({greedy, one, other}) == 3
    given = Request(text="Once", output="text", seed=1, temperature=1.0, options={"max_tokens": 9})
    assert zoo.generate(ours, given).text == one


def test_a_continued_clip_goes_on_from_its_own_last_frames():
    """Its last frames are not whole in the prompt, so their other ids come in the first steps."""
    ours = model()
    request = Request(text="", turns=(Turn("user", clip=clip()),), output="continuation")
    script = ours.writer(request)
    codes = ours.writer.ear(clip())
    assert len(script.rows) == 3 + len(codes) and script.num_audio == len(codes)
    known = ours.config.vocabulary
    assert script.rows[:3, 0].tolist() == [known.end, known.continued, known.audio]
    last = known.codec + known.num_codes * 7 + codes[-1, 8]
    assert script.before[7, 8] == last
    assert not torch.equal(zoo.generate(ours, request).frames[:9], codes[:9])


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ((Turn("assistant", "Yes."),), "the last turn is by assistant"),
        ((Turn("user", " "),), "a turn by user has neither text nor audio"),
        ((Turn("user", "a"), Turn("system", "b"), Turn("user", "c")), "a system turn is not the first one"),
        ((Turn("system", clip=clip()), Turn("user", "c")), "a voice to speak in is a reference"),
        ((Turn("nurse", "a"), Turn("user", "c")), "a turn is by 'nurse'; possible: system, user, assistant"),
    ],
)
def test_a_dialogue_that_cannot_be_answered_is_refused(turns, message):
    with pytest.raises(RequestError, match=message):
        model("tiny_dialogue").prompt(Request(text="", turns=turns, voice="default"))


def test_an_answer_that_does_not_fit_is_refused():
    ours = model("tiny_dialogue")
    long = Request(text="", turns=(Turn("user", "a " * 8160),), voice="default")
    with pytest.raises(RequestError, match="which leaves no room for an answer"):
        ours.prompt(long)


def test_usage_counts_text_and_frames():
    prompt = model("tiny_dialogue").prompt(
        reply((Turn("user", clip=clip()), Turn("assistant", "a"), Turn("user", "b")))
    )
    frames = len(model("tiny_dialogue").writer.ear(clip()))
    assert prompt.usage["input_audio_tokens"] == frames and prompt.usage["input_tokens"] == frames + 2
