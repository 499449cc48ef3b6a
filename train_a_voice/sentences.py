"""Generate sentences to speak. The same seed gives the same sentences.

    34 %   templates over everyday words, names and numbers; a third of them are questions
    18 %   templates with common English words mixed in
    14 %   two or three of these in one long sentence, up to 140 letters
     6 %   everyday words in any order
    16 %   common words in any order, the commonest most often
    10 %   words of a dictionary
     2 %   fixed phrases

Templates teach how words sound in context. Random orders keep the talker from memorising word order. Common
words and the dictionary teach how letters sound. Long sentences teach to keep one's place in a text.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    "surname": WORDS["surnames"],
    "town": WORDS["towns"],
    "month": WORDS["months"],
    "day": WORDS["days"],
    "unit": WORDS["units"],
    "title": LINES["titles"],
    "when": [place for place in LINES["places"] if re.match(r"on M|on F|last|next|after|before", place)],
}
SHARES = (
    (0.34, "template"),
    (0.18, "mixed"),
    (0.14, "long"),
    (0.06, "salad"),
    (0.16, "common"),
    (0.10, "dictionary"),
    (0.02, "phrase"),
)
LONGEST = 140  # letters of a sentence
QUESTION = (
    r"(do|does|did|is|are|was|have|has|can|could|should|will|would|why|where|what|who|whose|when|which|how)\b"
)
MIXED = 0.35  # share of a mixed template's words that are common words
NUM_COMMON = 30_000
FLATTENED = 0.6  # a common word is drawn with its share of English to this power


@dataclass(frozen=True)
class Lexicon:
    """Words in addition to those of words.toml."""

    dictionary: Sequence[str]
    common: Sequence[str]  # commonest first
    nats: Sequence[float]  # log of each common word's share of English

    @cached_property
    def _shares(self) -> list[float]:
        return list(itertools.accumulate(math.exp(FLATTENED * nat) for nat in self.nats))

    def draw(self, rng: random.Random) -> str:
        """Return a common word, or a word of the dictionary if no common ones are known."""
        if not self.common:
            return rng.choice(self.dictionary)
        return rng.choices(self.common, cum_weights=self._shares)[0]

    def save(self, path: Path) -> None:
        lines = [f"{word} {nat:.2f}" for word, nat in zip(self.common, self.nats, strict=True)]
        path.write_text("\n".join([" ".join(self.dictionary), *lines]) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Lexicon:
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        pairs = [line.split() for line in lines]
        return cls(first.split(), [word for word, _ in pairs], [float(nat) for _, nat in pairs])


def noun_phrase(rng: random.Random) -> str:
    determiner, noun = rng.choice(DETERMINERS), rng.choice(NOUNS)
    middle = [rng.choice(WORDS["adjectives"])] if rng.random() < 0.45 else []
    if determiner == "a" and (middle or [noun])[0][0] in "aeiou":
        determiner = "an"
    return " ".join([determiner, *middle, noun])


ONES = WORDS["numbers"][:19]  # one to nineteen
TENS = WORDS["numbers"][19:27]  # twenty to ninety
THIRDS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fifteenth"
)
ORDINALS = [*THIRDS.split(), "twentieth", *(f"twenty {day}" for day in THIRDS.split()[:9]), "thirtieth"]


def below_hundred(number: int) -> str:
    if number < 20:
        return ONES[number - 1] if number else "zero"
    tens = TENS[number // 10 - 2]
    return f"{tens} {ONES[number % 10 - 1]}" if number % 10 else tens


def quantity(rng: random.Random) -> str:
    """Return a number in words; small ones are as likely as large ones."""
    size = rng.choice((20, 100, 100, 1_000, 1_000, 10_000))
    number = rng.randrange(2, size)
    parts = []
    if number >= 1_000:
        parts.append(f"{below_hundred(number // 1_000)} thousand")
    if number % 1_000 >= 100:
        parts.append(f"{ONES[number % 1_000 // 100 - 1]} hundred")
    if number % 100:
        parts.append(f"{'and ' if parts else ''}{below_hundred(number % 100)}")
    return " ".join(parts)


def year(rng: random.Random) -> str:
    century = rng.choice(("eighteen", "nineteen", "nineteen", "twenty"))
    return f"{century} {below_hundred(rng.randrange(10, 100))}"


def clock(rng: random.Random) -> str:
    hour, minute = rng.choice(ONES[:12]), below_hundred(rng.choice((5, 10, 15, 20, 25, 30, 40, 45, 50)))
    forms = (f"{hour} o'clock", f"half past {hour}", f"a quarter to {hour}", f"a quarter past {hour}")
    return rng.choice((*forms, f"{hour} {minute}", f"{minute} minutes past {hour}"))


def digits(rng: random.Random) -> str:
    return " ".join(rng.choice(("zero", *ONES[:9])) for _ in range(rng.randint(3, 7)))


MADE: dict[str, Callable[[random.Random], str]] = {
    "quantity": quantity,
    "year": year,
    "time": clock,
    "digits": digits,
    "percent": lambda rng: below_hundred(rng.randrange(1, 100)),
    "ordinal": lambda rng: rng.choice(ORDINALS),
    "full": lambda rng: f"{rng.choice(WORDS['names'])} {rng.choice(WORDS['surnames'])}",
}


def template(rng: random.Random, lexicon: Lexicon, mixed: float = 0.0) -> str:
    """Return a filled template. mixed: the share of its words that are drawn from the lexicon."""

    def fill(hole: re.Match[str]) -> str:
        if hole[1] in MADE:
            return MADE[hole[1]](rng)
        if mixed and rng.random() < mixed:
            return f"{rng.choice(DETERMINERS)} {lexicon.draw(rng)}" if hole[1] == "np" else lexicon.draw(rng)
        return noun_phrase(rng) if hole[1] == "np" else rng.choice(HOLES[hole[1]])

    return re.sub(r"\{(\w+)\}", fill, rng.choice(LINES["templates"]))


def long(rng: random.Random, lexicon: Lexicon) -> str:
    """Return two or three clauses in one sentence of at most LONGEST letters."""

    def clause() -> str:
        while True:
            text = template(rng, lexicon, rng.choice((0.0, MIXED)))
            if not re.match(QUESTION, text):
                return text

    text = clause()
    if rng.random() < 0.3:
        text = f"{rng.choice(LINES['before'])} {text}, {clause()}"
    while True:
        more = f"{text}{rng.choice(LINES['joins'])} {clause()}"
        if len(more) >= LONGEST:
            return text
        text = more
        if len(text) > 100 and rng.random() < 0.5:
            return text


def salad(rng: random.Random, draw: Callable[[], str], most: int) -> str:
    chosen = [draw() for _ in range(rng.randint(2, most))]
    if len(chosen) > 4 and rng.random() < 0.3:
        chosen[2] += ","
    return " ".join(chosen)


def punctuate(text: str, rng: random.Random) -> str:
    """Punctuate as people type: usually a capital and a full stop, sometimes neither."""
    if rng.random() < 0.1:
        return text
    is_question = re.match(QUESTION, text) and "," not in text
    end = "?" if is_question else rng.choices(".!", (12, 1))[0]
    return text[0].upper() + text[1:] + end


def sentence(rng: random.Random, lexicon: Lexicon) -> str:
    kind = rng.choices([kind for _, kind in SHARES], [share for share, _ in SHARES])[0]
    if kind == "phrase":
        return rng.choice(LINES["phrases"])
    if kind == "long":
        text = long(rng, lexicon)
    elif kind in ("template", "mixed"):
        text = template(rng, lexicon, MIXED if kind == "mixed" else 0.0)
    elif kind == "salad":
        text = salad(rng, lambda: rng.choice(EVERYDAY), 9)
    elif kind == "common":
        text = salad(rng, lambda: lexicon.draw(rng), 10)
    else:
        text = salad(rng, lambda: rng.choice(lexicon.dictionary), 5)
    return punctuate(re.sub(r"\bi\b", "I", text), rng)


def read_dictionary(path: Path, least: int = 3) -> list[str]:
    """Return the plain words of `least` to eleven letters in a pronouncing dictionary (CMUdict's format)."""
    heads = (line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return sorted({head for head in heads if re.fullmatch(rf"[a-z]{{{least},11}}", head)})


def generate(count: int, lexicon: Lexicon, seed: int, apart_from: frozenset[str] = frozenset()) -> list[str]:
    """Return `count` texts, none of which is in `apart_from`.

    Only the fixed phrases repeat. One short text in eight has two sentences."""
    rng = random.Random(seed)
    made: list[str] = []
    seen = set(apart_from)
    while len(made) < count:
        text = sentence(rng, lexicon)
        if text not in LINES["phrases"] and text[-1] in ".!?" and len(text) < 80 and rng.random() < 0.125:
            text = f"{text} {sentence(rng, lexicon)}"
        if text in LINES["phrases"] or text not in seen:
            seen.add(text)
            made.append(text)
    return made
