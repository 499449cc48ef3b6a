"""The marks of pauses, in a text that is there as a whole and in one that arrives."""

from dataclasses import replace

import pytest
from toy import Toy

from zoo.contract.family import paced_pieces
from zoo.request import Request, RequestError
from zoo.text.pauses import Part, next_part, stretches


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("One.", [("", 0), ("One.", 0)]),
        ("One. [pause:1.5s] Two.", [("", 0), ("One.", 1.5), ("Two.", 0)]),
        ('One.<break time="500ms"/>Two.', [("", 0), ("One.", 0.5), ("Two.", 0)]),
        ("One. <BREAK time='2s' /> Two. [Pause: 250 ms]", [("", 0), ("One.", 2), ("Two.", 0.25)]),
        ("[pause:.5s] One.", [("", 0.5), ("One.", 0)]),
        ("One. [PAUSE: 250 MS] Two.", [("", 0), ("One.", 0.25), ("Two.", 0)]),
        (
            "[pause:10s] a [pause:10s]" * 3,
            [("", 10), ("a", 20), ("a", 20), ("a", 10)],
        ),  # as much as there may be
        ("One. [pause:1s] ... [pause:2s]!", [("", 0), ("One.", 3)]),  # what cannot be spoken is left out
        ("[pause:1s]", [("", 1)]),
        ("One [pause] two [pause:2] <break/>.", [("", 0), ("One [pause] two [pause:2] <break/>.", 0)]),
    ],
)
def test_a_text_is_cut_at_its_pauses(text, parts):
    assert [tuple(part) for part in stretches(text)] == parts


@pytest.mark.parametrize("text", ["a [pause:10.1s] b", "a <break time='99999ms'/> b", "a [pause:10s]" * 7])
def test_pauses_that_are_too_long_are_refused(text):
    with pytest.raises(RequestError, match=r"up to [16]0 s") as error:
        stretches(text)
    assert error.value.param == "text"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_mark_is_found_however_its_text_arrives(size):
    text = 'One [two] < 3 [Pause:1s] four.<BREAK time="2s"/>five [pa'
    arrived, taken, parts = "", 0, []
    for at in range(0, len(text) + 1, size):
        arrived += text[at : at + size]
        while (part := next_part(arrived[taken:], is_whole=at + size > len(text))).text:
            taken += len(part.text)
            parts.append(part)
    assert "".join(part.text for part in parts) == text
    pauses = [part for part in parts if part.silence_s]
    assert pauses == [Part("[Pause:1s]", 1.0), Part('<BREAK time="2s"/>', 2.0)]


def test_words_before_a_bracket_do_not_wait():
    assert next_part("One two [", False).text == "One two "
    assert next_part("One [laugh", False).text == "One [laugh"  # it cannot become a pause
    assert next_part("One [pause:" + "9" * 60, False).text.startswith("One [pause:")


def test_a_prefix_for_all_of_the_text_is_repeated_behind_a_pause():
    spec = replace(Toy().spec, lead=r"<\w+>\s*")
    pieces = paced_pieces(Request(text="<awe> One. [pause:0.5s] Two."), spec)
    rate_hz = spec.sample_rate_hz
    assert [tuple(piece) for piece in pieces] == [("<awe> One.", 0, rate_hz // 2), ("<awe> Two.", 0, 0)]


def test_a_pause_alone_is_not_a_text():
    with pytest.raises(RequestError, match="nothing to speak"):
        next(Toy().passes(Request(text="[pause:1s] ...")))
