"""Text that arrives in portions has the same tokens as the whole text, and none is held back longer than
necessary."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import family

from zoo.text.open_text import OpenText

PROSE = (
    "The old man told  3 children: \"It's 12.5 km, isn't it?\"\n\nNo! (Caf\u00e9, na\u00efve; e\u0301t\u00e9.) "
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\uc548\ub155 \u0928\u092e\u0938\u094d\u0924\u0947 \U0001f44d\U0001f3fd a\u200db"
)
TAGGED = "Oh [laughter] well <laughter>ha</laughter>, [br] [breath]x [not a tag] < 5 <strong>y</strong>"
ODD = ("\u0301", "\uff11", "\u00e9", "\u1100", "\u1161", "\x1c", "\u3000", "\x85", "[laughter]", "</strong>")
PIECES = st.sampled_from([*PROSE, *TAGGED, *ODD, "'s", " "])
FAMILIES = [family("qwen3_tts"), family("cosyvoice2")]


def portions(text, cuts, tags=()):
    """Return the text settled after each portion, and the remainder."""
    stops = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    came = OpenText(tags)
    settled = [came.more(text[a:b]) for a, b in itertools.pairwise(stops)]
    return [*settled, came.rest()]


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(text=st.lists(PIECES, max_size=60).map("".join), cuts=st.lists(st.integers(0, 200), max_size=30))
@pytest.mark.parametrize("ours", FAMILIES, ids=lambda ours: ours.spec.family)
def test_portions_have_the_tokens_of_the_whole(ours, text, cuts):
    parts = portions(text, cuts, ours.spec.tags)
    assert "".join(parts) == text.strip()
    tokens = [token for part in parts for token in ours.tokenize(part)]
    assert tokens == ours.tokenize(text.strip())


@pytest.mark.parametrize("text", [PROSE, TAGGED])
@pytest.mark.parametrize("ours", FAMILIES, ids=lambda ours: ours.spec.family)
def test_a_character_at_a_time(ours, text):
    parts = portions(text, range(len(text)), ours.spec.tags)
    assert [token for part in parts for token in ours.tokenize(part)] == ours.tokenize(text)


def test_a_word_is_settled_by_the_space_after_it():
    came = OpenText()
    assert [came.more(text) for text in (" ", "Hel", "lo", " wor", "ld", ". ", "It's")] == [
        *("", "", "", "Hello", "", " world", ". It"),
    ]
    assert came.rest() == "'s"


def test_a_mark_stays_with_its_letter():
    came = OpenText()
    assert came.more("cafe") == "" and came.more("\u0301 ") == "" and came.more("is ") == "cafe\u0301 is"


def test_a_tag_is_not_cut():
    came = OpenText(("[breath]", "<strong>"))
    assert came.more("So [brea") == "So" and came.more("th] x") == "" and came.more(" ") == " [breath] x"
    assert came.more("[breathe] ") == " [breathe"


@pytest.mark.parametrize("blank", ["", " ", "\n\t", "\u3000"])
def test_blank_text_is_dropped(blank):
    came = OpenText()
    assert came.more(blank) + came.more(blank) + came.rest() == ""


def test_a_long_run_of_letters_is_scanned_once():
    came = OpenText()
    for _ in range(20_000):
        assert came.more("x") == ""
    assert came.more(" ") == "x" * 20_000
