"""CSM's prompts: segments, speakers, turns, conversations and their shared pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import Clock, family, serve

import zoo
from serving.engine.engine import Engine
from zoo.csm.conversations import MOST, Context, Conversations
from zoo.nn.resample import resampled
from zoo.request import AudioClip, Reference, Request, RequestError, Turn

TEXT = Request(text="Good morning.", max_frames=4)


def clip(seed: int = 0) -> AudioClip:
    noise = np.random.default_rng(seed).normal(size=5000)
    return AudioClip((noise / 20).astype(np.float32), 24_000)


def parts(request: Request, **values) -> list[torch.Tensor]:
    return list(family("csm").writer(request, {"speaker": 0} | values).parts)


def text_of(part: torch.Tensor) -> str:
    tokenizer = family("csm").writer.tokenize
    begin, end = (tokenizer.special[name] for name in ("<|begin_of_text|>", "<|end_of_text|>"))
    first, *ids, last = part.tolist()
    assert (first, last) == (begin, end)
    return tokenizer._tokenizer.decode(ids)


def refused(match: str, param: str | None = None, **fields) -> None:
    with pytest.raises(RequestError, match=match) as error:
        family("csm").prompt(Request(text="a", **fields))
    assert param in (None, error.value.param)


def test_a_text_alone_is_one_part_with_its_speaker():
    [only] = parts(Request(text=" Hi"), speaker=7)
    assert text_of(only) == "[7] Hi"


def test_a_segment_ends_with_a_frame_of_zeros():
    said, codes, new = parts(Request(text="Hi", references=(Reference(clip(), "Hm.", "1"),)))
    assert (text_of(said), text_of(new)) == ("[1]Hm.", "[0]Hi")
    assert codes.shape == (1 + 3, 4)  # 5,000 samples, filled up to three frames
    assert codes[-1].tolist() == [0] * 4 and codes[:-1].any(1).all()


def test_references_and_turns_keep_their_order():
    turns = (Turn("user", "Two.", clip(2)), Turn("assistant", "Three.", clip(3)), Turn("5", "Four.", clip(4)))
    asked = Request(text="Five.", references=(Reference(clip(1), "One.", "3"),), turns=turns)
    assert [text_of(part) for part in parts(asked)[::2]] == [
        "[3]One.",
        "[1]Two.",
        "[0]Three.",
        "[5]Four.",
        "[0]Five.",
    ]
    assert text_of(parts(asked, speaker=2)[2]) == "[0]Two."


def test_a_recording_is_resampled_by_a_windowed_sinc():
    """As by torchaudio, which the original calls. The published voices are at 44.1 kHz."""
    encode, samples = family("csm").writer.cloner, clip(5).samples
    narrow = resampled(torch.from_numpy(samples), 44_100, 24_000)
    assert torch.equal(encode(AudioClip(samples, 44_100)), encode(AudioClip(narrow.numpy(), 24_000)))


def test_a_client_cannot_write_special_tokens():
    [only] = parts(Request(text="<|AUDIO|><|audio_eos|><|end_of_text|>"))
    assert max(only[1:-1].tolist()) < family("csm").writer.tokenize.special["<|begin_of_text|>"]


def test_english_may_be_named():
    plain, named = (next(family("csm").passes(Request(text="Hi.", language=name))) for name in (None, "en"))
    assert named.prefix_keys == plain.prefix_keys
    refused("possible: auto, english; it was trained on English", language="french")


def test_what_is_no_segment_is_refused():
    refused("speakers are numbers", references=(Reference(clip(), "Hm.", "anna"),))
    refused("a transcript is needed", references=(Reference(clip()),))
    refused("needs a text and a clip", turns=(Turn("user", "Hi."),))
    refused("needs a text and a clip", turns=(Turn("user", " ", clip()),))
    refused("role 'system'", turns=(Turn("system", "Hi.", clip()),))
    refused("has no voice 'tara'.*give a reference", voice="tara")


def test_a_context_that_fills_all_positions_is_refused():
    long = AudioClip(np.ones(100 * 24_000, np.float32) / 9, 24_000)
    says = r"\d+ of them for the references, and leaves room for 0 frames"
    refused(says, "references", references=(Reference(long, "Hm."), Reference(long, "Hm.")))


def test_the_cap_follows_from_the_text_and_not_from_a_number_of_frames():
    """transformers ends after 125 frames."""
    short, long = (family("csm").prompt(Request(text="word " * words)).max_frames for words in (1, 40))
    assert 125 < short < long


def test_pages_are_shared_by_what_was_said_not_by_how_long_it_is():
    """Frames of two clips of equal length have equal keys where their codes are equal, and nowhere else."""
    asked = [Request(text="a", references=(Reference(clip(i), "Hm."),)) for i in (0, 0, 1)]
    first, same, other = (family("csm").prompt(request).prefix_keys for request in asked)
    codes, others = (parts(request)[1] for request in asked[1:])
    assert first == same != other and len(first) == len(other)
    is_equal = [key == another for key, another in zip(first, other, strict=True) if key < 0]
    assert is_equal == (codes == others).all(1).tolist()


def test_a_later_piece_goes_on_in_the_first_ones_voice():
    ours = family("csm")
    frames = torch.arange(12).view(3, 4) + 1
    prompt = ours.later_prompt(TEXT, zoo.contract.Said("Before.", frames))
    asked = Request(text="Before.")
    before = ours.prompt(asked)
    assert prompt.prefix_keys[: len(before.prefix_keys)] == before.prefix_keys
    rows = prompt.inputs[len(before.inputs) :][:3]
    torch.testing.assert_close(rows, ours.lm.frames(frames))


def test_a_conversation_goes_on_from_its_own_codes():
    """The next prompt holds what was said, with the frames that were generated, and no clip is encoded for
    it."""
    ours = family("csm")
    first = zoo.generate(ours, Request(text="One two.", conversation="talk", max_frames=3))
    encoded = ours.writer.cloner.references.num_encoded
    second = ours.prompt(
        Request(text="Three.", conversation="talk", max_frames=3, references=(Reference(clip(), "Hm."),))
    )
    assert ours.writer.cloner.references.num_encoded == encoded
    said, new = parts(Request(text="One two."))[0], parts(Request(text="Three."))[0]
    closed = ours.writer.closed(first.frames)
    expected = torch.cat((ours.lm.text(said), ours.lm.frames(closed), ours.lm.text(new)))
    torch.testing.assert_close(second.inputs, expected)


def test_the_conversations_that_spoke_last_are_kept():
    conversations, names = Conversations(), [str(index) for index in range(MOST)]
    for name in (*names, names[0], "new"):
        conversations.put(name, Context(torch.zeros(1, 1), (0,)))
    assert [name for name in (*names, "new") if conversations.get(name) is None] == [names[1]]
    conversations.put("", Context(torch.zeros(1, 1), (0,)))
    assert conversations.get(None) is None


def test_the_engine_shares_the_pages_of_a_conversations_last_turn():
    ours = family("csm")
    engine = Engine(ours, max_slots=2, compile=False, report_lag=1, clock=Clock())
    text = "The quick brown fox jumps over the lazy dog, and then some."
    asked = [Request(text=text, conversation="pages", max_frames=20, seed=seed) for seed in (1, 2)]
    first, second = serve(engine, {0: asked[:1], 100: asked[1:]})
    assert first.has_ended_well and second.has_ended_well
    positions = len(ours.prompt(asked[0]).prefix_keys)
    assert engine.stats()["pages_shared"] >= 2 and positions > 40
