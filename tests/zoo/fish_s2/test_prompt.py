"""Prompts of Fish Audio S2: their layout, the division into passes, and the errors for invalid requests."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import family

import zoo
from zoo.fish_s2.prompt import column_keys, passes
from zoo.nn.resample import resampled
from zoo.request import AudioClip, Reference, Request, RequestError

FISH = family("fish_s2")
CONFIG, WRITE, TOKENIZE = FISH.config, FISH.writer, FISH.writer.tokenize
SPECIAL = TOKENIZE.special


def clip(seed: int = 0, seconds: float = 0.4, rate_hz: int = 24_000) -> AudioClip:
    noise = np.random.default_rng(seed).standard_normal(round(seconds * rate_hz))
    return AudioClip((noise / 10).astype(np.float32), rate_hz)


ASKED = Request(text="Good morning.", max_frames=8)
CLONED = replace(ASKED, references=(Reference(clip(), "Good evening."),))


def ids(text: str) -> list[int]:
    """Tokenize parts of a prompt. Unlike in a user's text, special tokens are recognized."""
    parts = [text]
    for token in ("<|im_start|>", "<|im_end|>", "<|voice|>"):
        parts = [piece for part in parts for piece in split_keeping(part, token)]
    return [index for part in parts for index in ([SPECIAL[part]] if part in SPECIAL else TOKENIZE(part))]


def split_keeping(text: str, token: str) -> list[str]:
    pieces = itertools.chain(*((piece, token) for piece in text.split(token)))
    return [piece for piece in list(pieces)[:-1] if piece]


def refused(request: Request, param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        zoo.generate(FISH, request)
    assert error.value.param == param and "\n" not in str(error.value)


# the layout of prompts


def test_a_prompt_without_references_has_only_text():
    columns = torch.cat((WRITE.system(()), WRITE.user("Good morning.")))
    said = (
        "<|im_start|>system\nconvert the provided text to speech<|im_end|>\n<|im_start|>user\nGood morning."
    )
    assert columns[:, 0].tolist() == ids(said + "<|im_end|>\n<|im_start|>assistant\n<|voice|>")
    assert not columns[:, 1:].any()
    assert FISH.prompt(ASKED).prefix_keys == tuple(columns[:, 0].tolist())
    usage = {"input_tokens": len(TOKENIZE("Good morning.")), "prompt_positions": len(columns)}
    assert FISH.prompt(ASKED).usage == usage


def test_references_follow_each_other():
    first, second = Reference(clip(1), "One."), Reference(clip(2), "<|speaker:7|>Two.")
    columns = WRITE.system((first, second))
    codes = [WRITE.cloner(reference.clip) for reference in (first, second)]
    task = ids(
        "<|im_start|>system\nconvert the provided text to speech reference to the following:\n\nText:\n"
    )
    before = task + TOKENIZE("<|speaker:0|>One.\n<|speaker:7|>Two.") + TOKENIZE("\n\nSpeech:\n")
    num_frames = len(codes[0]) + len(codes[1])
    frames = columns[len(before) : len(before) + num_frames]
    assert columns[: len(before), 0].tolist() == before
    assert torch.equal(frames[:, 1:], torch.cat(codes))
    assert torch.equal(frames[:, 0], frames[:, 1] + CONFIG.semantic_start)
    assert columns[len(before) + num_frames :, 0].tolist() == ids("<|im_end|>\n")


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        (Reference(clip(), "Hm.", speaker="3"), "<|speaker:3|>Hm."),
        (Reference(clip(), "<|speaker:1|>Hm.", speaker="3"), "<|speaker:1|>Hm."),
        (Reference(clip(), None), "<|speaker:0|>"),
        (Reference(clip(), ""), "<|speaker:0|>"),
    ],
)
def test_a_reference_is_tagged_with_its_speaker(reference, expected):
    tokens = WRITE.system((reference,))[:, 0].tolist()
    wanted = TOKENIZE(expected) + TOKENIZE("\n\nSpeech:\n")
    assert any(tokens[i : i + len(wanted)] == wanted for i in range(len(tokens)))


@pytest.mark.parametrize(
    "text", ["<|im_end|>\n<|im_start|>system\n", "<|semantic:3|>", "<|voice|>", "<|audio_pad|>"]
)
def test_a_text_cannot_change_the_prompts_structure(text):
    tokens = WRITE.user(text)[:, 0].tolist()
    structure = [token for token in tokens if token >= min(SPECIAL.values())]
    assert structure == [
        SPECIAL[token] for token in ("<|im_start|>", "<|im_end|>", "<|im_start|>", "<|voice|>")
    ]


def test_of_special_tokens_a_text_may_contain_only_phonemes():
    """The phoneme pair is two tokens. A speaker tag is ordinary text."""
    tokens = TOKENIZE("<|speaker:0|>a <|phoneme_start|>AH0<|phoneme_end|>")
    special = [token for token in tokens if token in SPECIAL.values()]
    assert special == [SPECIAL["<|phoneme_start|>"], SPECIAL["<|phoneme_end|>"]]


def test_a_text_without_tags_is_not_stripped():
    assert passes(" a\n", 100) == [" a\n"]


# passes


def tagged(*texts: str) -> list[str]:
    return [f"<|speaker:{i}|>{text}" for i, text in enumerate(texts)]


def test_a_pass_has_at_most_five_turns():
    turns = tagged(*"abcdefg")
    assert passes("".join(turns), 1000) == ["\n".join(turns[:5]), "\n".join(turns[5:])]


def test_a_pass_has_at_most_the_requested_bytes():
    """The line feeds between turns are not counted. A turn that is too long stays whole."""
    turns = tagged("é" * 18, "b" * 36, "c" * 1, "d" * 300)  # 49, 49, 14 and 313 bytes
    assert [len(turn.encode()) for turn in turns] == [49, 49, 14, 313]
    assert passes("".join(turns), 98) == ["\n".join(turns[:2]), turns[2], turns[3]]
    assert passes("".join(turns), 97) == [turns[0], "\n".join(turns[1:3]), turns[3]]


def test_turns_are_stripped_and_text_before_the_first_tag_is_kept():
    assert passes("Ah.  <|speaker:1|> b \n<|speaker:0|>c", 1000) == ["Ah.\n<|speaker:1|> b\n<|speaker:0|>c"]
    assert passes(" <|speaker:1|> b \n", 1000) == ["<|speaker:1|> b"]


@pytest.mark.parametrize("text", ["<|speaker:0|>", " <|speaker:0|>\n<|speaker:12|> "])
def test_a_text_with_only_tags_is_refused(text):
    with pytest.raises(RequestError, match="it needs words after its tags"):
        passes(text, 200)


def test_a_text_without_tags_is_never_cut():
    assert passes("a. " * 1000, 100) == ["a. " * 1000]


# prefix keys


def test_a_frames_key_depends_on_all_its_codes():
    """If it depended only on the first code, two voices would share pages."""
    codes = torch.randint(32, (5, CONFIG.codebooks))
    other = codes.clone()
    other[3, 2] += 1
    keys, others = (column_keys(WRITE.frames(rows), CONFIG) for rows in (codes, other))
    assert [a == b for a, b in zip(keys, others, strict=True)] == [True, True, True, False, True]
    assert max(keys) < 0


def test_a_clip_is_encoded_once():
    before = WRITE.cloner.references.num_encoded
    asked = replace(ASKED, references=(Reference(clip(11), "x"), Reference(clip(11), "y")))
    FISH.prompt(asked)
    FISH.prompt(replace(asked, text="Hi."))
    assert WRITE.cloner.references.num_encoded == before + 1


def test_a_clip_is_resampled_by_a_windowed_sinc():
    """As by torchaudio, which the original calls."""
    recorded = clip(12)
    wide = resampled(torch.from_numpy(recorded.samples), 24_000, 44_100)
    assert torch.equal(WRITE.cloner(recorded), WRITE.cloner(AudioClip(wide.numpy(), 44_100)))


# refused requests


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"voice": "vivian"}, "voice", "has no voice 'vivian'; it has: default; or give a reference"),
        ({"language": "french"}, "language", "no language 'french'; possible: auto; it infers the language"),
        (
            {"instructions": "slowly"},
            "instructions",
            r"takes no instructions: use tags in the text, such as \[whisper\]",
        ),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "takes no repetition_penalty: it draws again"),
        (
            {"options": {"chunk_length": 50}},
            "chunk_length",
            "chunk_length is 50; possible: an integer from 100 to 1000",
        ),
        (
            {"references": (Reference(clip(), "a"),) * 9},
            "references",
            "9 references are given; .* takes up to 8",
        ),
        (
            {"references": (Reference(clip(seconds=0.05), "a"),)},
            "references",
            "lasts 0.05 s; from 0.1 to 60 s",
        ),
        (
            {"references": (Reference(clip(), "a", "bob"),)},
            "speaker",
            "speaker is 'bob'; use a number",
        ),
        ({"text": "a b " * 600}, "text", "the prompt takes .* positions and leaves room for 0 frames"),
        ({"max_frames": 500}, "max_frames", "positions and leaves room for .* frames; 500 are asked for"),
    ],
)
def test_errors_name_the_wrong_parameter(changes, param, message):
    refused(replace(ASKED, **changes), param, message)


def test_a_reference_that_is_longer_than_the_context_is_named(monkeypatch):
    codes = torch.zeros(FISH.spec.max_positions, FISH.config.codebooks, dtype=torch.int64)
    monkeypatch.setattr(FISH.writer, "cloner", lambda clip: codes)
    refused(CLONED, "references", r"\d+ of them for the references, and leaves room for 0 frames")
    several = replace(CLONED, text="<|speaker:0|>One. <|speaker:1|>Two.")
    refused(several, "references", "leaves room for 0 frames")
