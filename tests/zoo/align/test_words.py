"""Words of a text in an aligner's letters, and their times."""

import string

import numpy as np
import pytest

from zoo.align.words import Vocabulary, heard, word_times, words_of

TOKENS = {token: id for id, token in enumerate(["<pad>", "|", *string.ascii_uppercase, "'"])}
LATIN = Vocabulary(TOKENS, 0, "|", len(TOKENS))
FRAME = 320  # samples


def emissions(*frames):
    """Return log-probabilities [T, V] for frames such as "A", "-" (blank) and "|"."""
    certain = np.full((len(frames), len(TOKENS)), 1e-4)
    for t, token in enumerate(frames):
        certain[t, TOKENS.get(token, 0)] = 1
    return np.log(certain / certain.sum(1, keepdims=True)).astype(np.float32)


def times(text, *frames, **options):
    found = word_times(emissions(*frames), text, LATIN, FRAME * len(frames), **options)
    return [(word.text, word.start / FRAME, word.stop / FRAME, word.is_aligned) for word in found]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The sea, “calm” today.", ["The", "sea,", "“calm”", "today."]),
        ("Yes — no ...", ["Yes —", "no ..."]),
        ("— so", ["— so"]),
        ("Ha <laugh> [soft tone] well [pause:1s] yes", ["Ha", "well", "yes"]),
        ("我们走。Go!", ["我", "们", "走。", "Go!"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("... !", []),
    ],
)
def test_words_keep_their_marks_and_lose_tags(text, words):
    assert words_of(text) == words


@pytest.mark.parametrize(
    ("word", "letters"),
    [
        ("sea", "SEA"),
        ("Café,", "CAFE"),
        ("don\u2019t", "DON'T"),
        ("“so”", "SO"),
        ("straße", "STRASSE"),
        ("2024", None),
        ("B2B", None),
        ("море", None),
        ("—", None),
    ],
)
def test_words_are_spelled_in_the_letters_that_the_model_has(word, letters):
    expected = None if letters is None else [TOKENS[letter] for letter in letters]
    assert LATIN.spelled(word) == expected


def test_a_model_of_small_letters_and_one_without_a_word_mark_are_spelled_too():
    small = Vocabulary({"<pad>": 0, "a": 1, "ö": 2}, 0, None, 3)
    assert small.spelled("AÖ") == [1, 2]
    assert small.targets(["a", "ö"]) == ([1, 2], [range(0, 1), range(1, 2)])


def test_a_word_lasts_from_its_first_to_its_last_letter():
    assert times("Go on.", "-", "G", "G", "O", "-", "|", "-", "O", "N", "N", "-") == [
        ("Go", 1, 4, True),
        ("on.", 7, 10, True),
    ]


def test_words_that_cannot_be_spelled_lie_between_their_neighbours_and_are_marked():
    found = times("In 1 2 a", "-", "I", "N", "-", "X", "Y", "-", "Z", "-", "A")
    assert [(text, known) for text, _, _, known in found] == [
        ("In", True),
        ("1", False),
        ("2", False),
        ("a", True),
    ]
    (_, _, first_stop, _), one, two, (_, last_start, _, _) = found
    assert first_stop <= one[1] < one[2] == two[1] < two[2] <= last_start


def test_without_known_words_or_with_too_few_frames_the_times_are_shared_by_length():
    assert times("12 12", "-", "-", "-", "-") == [("12", 0, 2, False), ("12", 2, 4, False)]
    assert times("Go on", "-", "-", "-", "-") == [("Go", 0, 2, False), ("on", 2, 4, False)]


def test_words_that_a_cut_off_speech_does_not_reach_are_left_out():
    frames = ("G", "O", "|", "O", "N", "-", "|", "B")
    assert times("Go on by car", *frames, is_open=True) == [("Go", 0, 2, True), ("on", 3, 5, True)]
    assert times("Go on", *frames[:2], is_open=True) == [("Go", 0, 2, True)]
    assert times("12 34", *frames, is_open=True) == []
    assert word_times(emissions("-")[:0], "Go", LATIN, 100, is_open=True) == []


def test_words_are_heard_once_they_have_ended():
    found = word_times(emissions("G", "O", "|", "O", "N"), "Go on", LATIN, 5 * FRAME)
    assert [word.text for word in heard(found, 5 * FRAME - 1)] == ["Go"]
    assert [word.text for word in heard(found, 5 * FRAME)] == ["Go", "on"]


def test_the_score_is_the_probability_of_the_letters():
    certain, doubtful = emissions("G", "O"), np.log(np.full((2, len(TOKENS)), 1 / len(TOKENS), np.float32))
    assert word_times(certain, "go", LATIN, 640)[0].score > 0.99
    assert word_times(doubtful, "go", LATIN, 640)[0].score == round(1 / len(TOKENS), 4)
