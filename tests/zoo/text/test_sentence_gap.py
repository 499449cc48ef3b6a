"""Silence between sentences."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from toy import Toy

import zoo
from zoo.contract.family import paced_pieces
from zoo.request import Request, RequestError
from zoo.text.pieces import sentences

SPEC = Toy().spec
RATE_HZ = SPEC.sample_rate_hz
STORY = "It was 3.5 km to St. Ives. He said: “Go!” Then — he went."


def pieces(text, gap_s=0.5, spec=SPEC, **fields):
    return [tuple(piece) for piece in paced_pieces(Request(text=text, sentence_gap_s=gap_s, **fields), spec)]


def test_sentences_are_the_text_and_have_words():
    found = sentences("One. ... Two! 你好。再见。 — Three")
    assert "".join(found) == "One. ... Two! 你好。再见。 — Three"
    assert [sentence.strip() for sentence in found] == ["One. ...", "Two!", "你好。", "再见。", "— Three"]


def test_the_gap_lies_between_sentences_and_not_behind_the_last():
    gap = RATE_HZ // 2
    assert pieces("One is here. Two is there. Three.") == [
        ("One is here.", 0, gap),
        ("Two is there.", 0, gap),
        ("Three.", 0, 0),
    ]


@pytest.mark.parametrize("gap_s", [None, 0, 0.0])
def test_without_a_gap_nothing_changes(gap_s):
    assert pieces(STORY, gap_s) == pieces(STORY, None) == [(STORY, 0, 0)]


def test_a_pause_takes_the_place_of_the_gap():
    gap = round(0.25 * RATE_HZ)
    assert pieces("[pause:1s] One is here. Two is there. [pause:2s] Three.", 0.25) == [
        ("One is here.", RATE_HZ, gap),
        ("Two is there.", 0, 2 * RATE_HZ),
        ("Three.", 0, 0),
    ]


def test_a_prefix_for_all_of_the_text_is_repeated_before_each_sentence():
    found = pieces("<awe> One is here. Two is there.", spec=replace(SPEC, lead=r"<\w+>\s*"))
    assert [text for text, *_ in found] == ["<awe> One is here.", "<awe> Two is there."]


def test_a_long_sentence_is_cut_without_a_gap():
    found = pieces(f"{'word ' * 40}end. Two is there.", spec=replace(SPEC, piece_s=5.0))
    silences = [after for _, _, after in found]
    assert len(found) > 3 and silences == [0] * (len(found) - 2) + [RATE_HZ // 2, 0]


def test_a_text_that_is_never_split_stays_whole():
    text = "<|1|> One. <|2|> Two."
    assert pieces(text, spec=replace(SPEC, unsplit=r"<\|\d\|>")) == [(text, 0, 0)]


def test_gaps_are_exact_to_the_sample():
    toy = Toy()
    text = "One is here. Two is there. Three is all."
    spoken = zoo.generate(toy, Request(text=text, sentence_gap_s=0.3, seed=1))
    found = spoken.pieces
    assert [piece.text for piece in found] == ["One is here.", "Two is there.", "Three is all."]
    gap = round(0.3 * RATE_HZ)
    assert found[0].start == 0 and found[-1].stop == len(spoken.samples)
    for before, after in pairwise(found):
        assert after.start - before.stop == gap
        assert not spoken.samples[before.stop : after.start].any()
    alone = zoo.generate(toy, Request(text="One is here.", seed=1)).samples
    assert torch.equal(spoken.samples[: found[0].stop], alone)


@pytest.mark.parametrize(
    ("spec", "fields", "says"),
    [
        (replace(SPEC, piece_s=None), {}, "speaks each text in one pass"),
        (replace(SPEC, answers=True), {}, "answers a text"),
        (SPEC, {"is_open": True}, "needs all of the text at once"),
        (SPEC, {"conversation": "a"}, "a turn of a conversation cannot make"),
    ],
)
def test_a_gap_that_cannot_be_made_is_refused(spec, fields, says):
    with pytest.raises(RequestError, match=says) as error:
        pieces("One. Two.", spec=spec, **fields)
    assert error.value.param == "sentence_gap_s"


@pytest.mark.parametrize("gap_s", [-0.1, 10.1, float("nan")])
def test_a_gap_out_of_range_is_refused(gap_s):
    with pytest.raises(RequestError, match="from 0 to 10 is possible"):
        Request(text="One.", sentence_gap_s=gap_s)
