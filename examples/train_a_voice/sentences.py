"""Sentences to be spoken: templates over everyday words (66 %), the same words in any order (16 %), words of a
dictionary (16 %) and fixed phrases (2 %). The same seed gives the same sentences.

Templates teach how words sound where people use them; the salad keeps the talker from learning word order by
heart; the dictionary teaches how letters sound.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from examples.train_a_voice import words as w

NOUNS = w.PEOPLE + w.ANIMALS + w.THINGS
EVERYDAY = sorted({*NOUNS, *w.ADJECTIVES, *w.PAST, *w.PRESENT, *w.WENT, *w.ADVERBS, *w.NAMES, *w.NUMBERS, *w.SMALL, *w.COMPUTING})
TEMPLATES = """{np} {past} {np}
{np} {past} {np} {place}
{np} {went} {place}
{np} {went} {adverb} {place}
{np} is {adj} and {adj}
{np} was very {adj}
{name} {past} {np} {place}
{name} and {name} {went} {place}
i {present} {np} {place}
we {present} {np} every {thing}
do you {present} {np}
can you {present} {np} {place}
why did {np} {present} {np}
where is {np}
what is the {adj} {thing} doing {place}
there are {number} {thing}s {place}
there is {np} {place}
{np} has {number} {thing}s
when {np} {went} {place}, {np} {past} {np}
if you {present} {np}, {np} will {present} it
{np} {past} {np}, but {np} {went} {adverb}
{adverb}, {np} {past} {np}
it was {adj} {place}
this is {np} and that is {np}
{name} said that {np} was {adj}
they {past} {np} because it was {adj}
she {went} {place} with {np}
he could not {present} {np}
you should {adverb} {present} {np}
my {thing} is more {adj} than your {thing}
{number} and {number} is {number}
please {present} {np} and {present} {np}
the {tech} of the {tech} is {adj}
our {tech} will {present} your {tech}
{np} of {np} {past} {np}
i have never seen such a {adj} {thing}
all {thing}s are {adj}
who {past} {np} {place}
{name}, {name} and {name} {past} {np}
would you like some {thing} or some {thing}
{np}, {np} and {np}
no {thing} is as {adj} as {np}""".split("\n")
DETERMINERS = ("the", "the", "the", "a", "my", "your", "his", "her", "our", "their", "this", "that", "every", "another")
SHARES = ((0.66, "template"), (0.16, "salad"), (0.16, "dictionary"), (0.02, "phrase"))


def noun_phrase(rng: random.Random) -> str:
    determiner, noun = rng.choice(DETERMINERS), rng.choice(NOUNS)
    middle = [rng.choice(w.ADJECTIVES)] if rng.random() < 0.45 else []
    if determiner == "a" and (middle or [noun])[0][0] in "aeiou":
        determiner = "an"
    return " ".join([determiner, *middle, noun])


def template(rng: random.Random) -> str:
    fill: dict[str, Callable[[], str]] = {
        "np": lambda: noun_phrase(rng),
        "past": lambda: rng.choice(w.PAST),
        "present": lambda: rng.choice(w.PRESENT),
        "went": lambda: rng.choice(w.WENT),
        "place": lambda: rng.choice(w.PLACES),
        "adverb": lambda: rng.choice(w.ADVERBS),
        "adj": lambda: rng.choice(w.ADJECTIVES),
        "name": lambda: rng.choice(w.NAMES),
        "number": lambda: rng.choice(w.NUMBERS),
        "thing": lambda: rng.choice(w.THINGS),
        "tech": lambda: rng.choice(w.COMPUTING),
    }
    return re.sub(r"\{(\w+)\}", lambda hole: fill[hole[1]](), rng.choice(TEMPLATES))


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
        return rng.choice(w.PHRASES)
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


def generate(count: int, dictionary: list[str], seed: int, apart_from: frozenset[str] = frozenset()) -> list[str]:
    """`count` texts, none of `apart_from`. Only the fixed phrases come more than once. One text in eight is
    two sentences."""
    rng = random.Random(seed)
    made: list[str] = []
    seen = set(apart_from)
    while len(made) < count:
        text = sentence(rng, dictionary)
        if text not in w.PHRASES and text[-1] in ".!?" and rng.random() < 0.125:
            text = f"{text} {sentence(rng, dictionary)}"
        if text in w.PHRASES or text not in seen:
            seen.add(text)
            made.append(text)
    return made
