"""Sentences to be spoken: templates over everyday words (66 %), the same words in any order (16 %), words of
a dictionary (16 %) and fixed phrases (2 %). The same seed gives the same sentences.

Templates teach how words sound where people use them; the salad keeps the talker from learning word order by
heart; the dictionary teaches how letters sound.
"""

from __future__ import annotations

import random
import re
import tomllib
from pathlib import Path

_FILE = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
WORDS = {name: text.split() for name, text in _FILE.items() if name != "lines"}
LINES = {name: text.strip().splitlines() for name, text in _FILE["lines"].items()}
NOUNS = WORDS["people"] + WORDS["animals"] + WORDS["things"]
EVERYDAY = sorted({word for words in WORDS.values() for word in words})
DETERMINERS = (
    "the",
    "the",
    "the",
    "a",
    "my",
    "your",
    "his",
    "her",
    "our",
    "their",
    "this",
    "that",
    "every",
    "another",
)
HOLES = {
    "past": WORDS["past"],
    "present": WORDS["present"],
    "went": WORDS["went"],
    "place": LINES["places"],
    "adverb": WORDS["adverbs"],
    "adj": WORDS["adjectives"],
    "name": WORDS["names"],
    "number": WORDS["numbers"],
    "thing": WORDS["things"],
    "tech": WORDS["computing"],
}
SHARES = ((0.66, "template"), (0.16, "salad"), (0.16, "dictionary"), (0.02, "phrase"))


def noun_phrase(rng: random.Random) -> str:
    determiner, noun = rng.choice(DETERMINERS), rng.choice(NOUNS)
    middle = [rng.choice(WORDS["adjectives"])] if rng.random() < 0.45 else []
    if determiner == "a" and (middle or [noun])[0][0] in "aeiou":
        determiner = "an"
    return " ".join([determiner, *middle, noun])


def template(rng: random.Random) -> str:
    def fill(hole: re.Match[str]) -> str:
        return noun_phrase(rng) if hole[1] == "np" else rng.choice(HOLES[hole[1]])

    return re.sub(r"\{(\w+)\}", fill, rng.choice(LINES["templates"]))


def salad(rng: random.Random, words: list[str], most: int) -> str:
    chosen = [rng.choice(words) for _ in range(rng.randint(2, most))]
    if len(chosen) > 4 and rng.random() < 0.3:
        chosen[2] += ","
    return " ".join(chosen)


def punctuate(text: str, rng: random.Random) -> str:
    """As people type: mostly a capital and a full stop, sometimes neither."""
    if rng.random() < 0.1:
        return text
    end = "?" if re.match(r"(do|can|why|where|what|who|would)\b", text) else rng.choices(".!", (12, 1))[0]
    return text[0].upper() + text[1:] + end


def sentence(rng: random.Random, dictionary: list[str]) -> str:
    kind = rng.choices([kind for _, kind in SHARES], [share for share, _ in SHARES])[0]
    if kind == "phrase":
        return rng.choice(LINES["phrases"])
    if kind == "template":
        text = template(rng)
    elif kind == "salad":
        text = salad(rng, EVERYDAY, 9)
    else:
        text = salad(rng, dictionary, 5)
    return punctuate(re.sub(r"\bi\b", "I", text), rng)


def read_dictionary(path: Path) -> list[str]:
    """The words of a pronouncing dictionary (CMUdict's format): plain ones of three to eleven letters."""
    heads = (line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return sorted({head for head in heads if re.fullmatch(r"[a-z]{3,11}", head)})


def generate(
    count: int, dictionary: list[str], seed: int, apart_from: frozenset[str] = frozenset()
) -> list[str]:
    """`count` texts, none of `apart_from`. Only the fixed phrases come more than once. One text in eight is
    two sentences."""
    rng = random.Random(seed)
    made: list[str] = []
    seen = set(apart_from)
    while len(made) < count:
        text = sentence(rng, dictionary)
        if text not in LINES["phrases"] and text[-1] in ".!?" and rng.random() < 0.125:
            text = f"{text} {sentence(rng, dictionary)}"
        if text in LINES["phrases"] or text not in seen:
            seen.add(text)
            made.append(text)
    return made
