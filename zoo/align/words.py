"""The words of a text, in the letters that an aligner knows.

    "In 2024, “Café”"  ─ words ─>  "In", "2024,", "“Café”"  ─ letters ─>  IN | * | CAFE

A word with a letter or digit that the aligner does not know becomes a `*`, which fits any speech. This module
does not import torch.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from zoo.align.viterbi import forced_align, min_frames
from zoo.text.pauses import HAS_WORD
from zoo.text.pieces import expected_s
from zoo.text.pronunciations import MARKUP

# Chinese characters and kana: each is a word, with the marks around it.
_ALONE = "\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[^\s{_ALONE}]*[{_ALONE}][^\w\s]*|[^\s{_ALONE}]+")
_LIKE = {"\u2018": "'", "\u2019": "'", "\u02bc": "'", "\u2010": "-", "\u2011": "-"}


@dataclass(frozen=True)
class WordTime:
    """A word and the samples start .. stop of its speech. is_aligned: whether the speech was recognized;
    otherwise the times lie between those of its neighbours, and score is 0."""

    text: str
    start: int
    stop: int
    is_aligned: bool
    score: float  # 0 to 1: the mean probability of its letters


def words_of(text: str) -> list[str]:
    """Return the words of a text with the marks around them, without tags and pauses."""
    words: list[str] = []
    before = ""
    for match in _WORD.finditer(MARKUP.sub(" ", text)):
        if HAS_WORD.search(match[0]):
            words.append(before + match[0])
            before = ""
        elif words:
            words[-1] += f" {match[0]}"
        else:
            before += f"{match[0]} "
    return words


class Vocabulary:
    """The letters of a CTC model of `size` columns. tokens: their ids. blank: the id of the blank. delimiter:
    the token between words. star: the id of the column that fits any speech (`with_star`)."""

    def __init__(self, tokens: Mapping[str, int], blank: int, delimiter: str | None, size: int):
        self.letters = {token: id for token, id in tokens.items() if len(token) == 1 and id != blank}
        self.blank = blank
        self.star = size
        self.between = None if delimiter is None else self.letters.pop(delimiter, None)

    def spelled(self, word: str) -> list[int] | None:
        """Return the ids of a word's letters; None if the model does not know all of them."""
        ids: list[int] = []
        for letter in unicodedata.normalize("NFC", word):
            found = self._ids_of(_LIKE.get(letter, letter))
            if found is None and letter.isalnum():
                return None
            ids += found or ()
        return ids or None

    def _ids_of(self, letter: str) -> list[int] | None:
        bare = "".join(
            part for part in unicodedata.normalize("NFKD", letter) if not unicodedata.combining(part)
        )
        for form in (
            letter,
            letter.lower(),
            letter.upper(),
            letter.casefold(),
            bare,
            bare.lower(),
            bare.upper(),
        ):
            if form and all(part in self.letters for part in form):
                return [self.letters[part] for part in form]
        return None

    def targets(self, words: Sequence[str]) -> tuple[list[int], list[range]]:
        """Return the ids of a text, and which of them each word has. Neighbours that cannot be spelled share a
        star."""
        ids: list[int] = []
        places: list[range] = []
        for spelled in map(self.spelled, words):
            is_next_star = spelled is None and bool(places) and ids[-1] == self.star
            if not is_next_star:
                if ids and self.between is not None:
                    ids.append(self.between)
                begin = len(ids)
                ids += [self.star] if spelled is None else spelled
            places.append(range(begin, len(ids)))
        return ids, places


def with_star(log_probs: np.ndarray) -> np.ndarray:
    """Add the column of a star [T, V] -> [T, V + 1]: it fits every frame."""
    return np.concatenate([log_probs, np.zeros((len(log_probs), 1), log_probs.dtype)], 1)


def word_times(
    log_probs: np.ndarray, text: str, vocabulary: Vocabulary, num_samples: int, *, is_open: bool = False
) -> list[WordTime]:
    """Return when the words of a text were spoken in `num_samples` samples with the emissions [T, V].

    is_open: the speech was cut off, and words that it does not reach are left out.
    """
    words = words_of(text)
    targets, places = vocabulary.targets(words)
    is_known = [targets[place.start] != vocabulary.star for place in places]
    num_frames = len(log_probs)
    if not any(is_known) or (not is_open and num_frames < min_frames(targets)):
        return [] if is_open else _shared(words, 0, num_samples)
    if not num_frames:
        return []
    emissions = with_star(log_probs)
    path = forced_align(emissions, targets, vocabulary.blank, is_open=is_open)
    frame_samples = num_samples / num_frames
    times: list[WordTime] = []
    for begin, end in runs(places):
        place = places[begin]
        frames = np.flatnonzero((path >= 2 * place.start + 1) & (path < 2 * place.stop) & (path % 2 == 1))
        if is_open and int(path[-1]) < 2 * place.stop - 1:
            break
        start, stop = round(frames[0] * frame_samples), round((frames[-1] + 1) * frame_samples)
        if is_known[begin]:
            letters = np.asarray(targets)[path[frames] // 2]
            score = float(np.exp(emissions[frames, letters]).mean())
            times.append(WordTime(words[begin], start, stop, True, round(score, 4)))
        else:
            times += _shared(words[begin:end], start, stop)
    return times


def runs(places: Sequence[range]) -> Iterator[tuple[int, int]]:
    """Yield the first word and the end of each run of words that share their targets."""
    begins = [i for i, place in enumerate(places) if not i or place != places[i - 1]]
    yield from pairwise([*begins, len(places)])


def _shared(words: Sequence[str], start: int, stop: int) -> list[WordTime]:
    """Share a stretch among words by how long they take to say."""
    lengths = [expected_s(word) or 0.1 for word in words]
    ends = np.cumsum([0.0, *lengths]) / (sum(lengths) or 1.0)
    at = [start + round(float(end) * (stop - start)) for end in ends]
    return [WordTime(word, a, b, False, 0.0) for word, (a, b) in zip(words, pairwise(at), strict=True)]


def heard(times: Iterable[WordTime], played: int) -> list[WordTime]:
    """Return the words that had ended when `played` samples were played."""
    return [word for word in times if word.stop <= played]
