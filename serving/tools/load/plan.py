"""Plan the requests and their arrivals. Both depend only on the seed, whatever the server does.

Request n is the same in every run and at every rate. The gaps between arrivals scale with the rate and are
otherwise the same.
"""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from serving.tools.load.metrics import Role

# Each takes about four seconds to speak, so eight of them take about half a minute.
SENTENCES = (
    "The train to the north leaves at a quarter to eight tonight.",
    "She put the letters in a drawer and forgot about them for years.",
    "We walked along the river until the lamps came on.",
    "Could you tell me where the nearest post office is, please?",
    "The kettle was still warm when they came back from the garden.",
    "Nobody expected the bridge to be open again before the spring.",
    "There are seven boats in the harbour and only one of them is ours.",
    "He reads the newspaper from the last page to the first.",
    "The museum is closed on Mondays, but the gardens are open.",
    "A cold wind blew through the valley all night long.",
    "My sister plays the cello in an orchestra of sixty people.",
    "If it rains tomorrow, we will meet in the old library instead.",
    "The baker on the corner knows everybody in the street by name.",
    "Please leave your umbrella by the door and follow me.",
    "They have been building that tower for more than a hundred years.",
    "It takes about twenty minutes to reach the top of the hill.",
    "The doctor said that he should rest for at least three days.",
    "All the windows were dark except for one on the second floor.",
    "I have never seen so many birds in one place before.",
    "The price of bread has gone up twice since the summer.",
    "Turn left at the church and keep going until you see the mill.",
    "She answered every question without looking at her notes.",
    "The last bus had gone, so we shared a taxi into town.",
    "His grandfather repaired clocks in a shop behind the station.",
)
LONG_SENTENCES = 8
MIXED_LONG_SHARE = 0.25
TEXT_SETS = ("short", "long", "mixed")
LEAVES_WITHIN_S = 3.0


class Texts(msgspec.Struct, frozen=True):
    """The texts of the requests: a set made of SENTENCES (short, long or mixed), or the lines of a file."""

    kind: str = "short"
    lines: tuple[str, ...] = ()

    @classmethod
    def named(cls, name: str) -> Texts:
        """Return a set by name, or the texts of a file with one on each line. Raises ValueError."""
        if name in TEXT_SETS:
            return cls(name)
        try:
            lines = tuple(line.strip() for line in Path(name).read_text("utf-8").splitlines() if line.strip())
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{name!r} is neither {', '.join(TEXT_SETS)} nor a file of texts: {error}"
            ) from None
        if not lines:
            raise ValueError(f"{name} has no text; it must have one on each line")
        return cls(name, lines)

    def pick(self, chance: random.Random) -> str:
        """Return a random text."""
        if self.lines:
            return chance.choice(self.lines)
        is_long = self.kind == "long" or (self.kind == "mixed" and chance.random() < MIXED_LONG_SHARE)
        return " ".join(chance.sample(SENTENCES, LONG_SENTENCES if is_long else 1))


class Planned(msgspec.Struct):
    """A planned request."""

    body: dict[str, Any]
    format: str
    role: Role = "listener"
    leaves_after_s: float | None = None  # counted from its submission


class Work(msgspec.Struct):
    """The recipe of all requests. `fields` go into every body as they are."""

    formats: list[str]
    texts: Texts = Texts()
    voices: list[str] = []
    fields: dict[str, Any] = {}
    has_seeds: bool = True  # whether requests have a seed
    cancel_share: float = 0.0
    slow_share: float = 0.0
    seed: int = 0

    def request(self, index: int) -> Planned:
        """Return request number `index`."""
        chance = random.Random(f"{self.seed} request {index}")
        form = chance.choice(self.formats)
        body: dict[str, Any] = {"input": self.texts.pick(chance), "response_format": form}
        if self.voices:
            body["voice"] = chance.choice(self.voices)
        seed = chance.getrandbits(31)
        role = chance.random()
        leaves_s = LEAVES_WITHIN_S * chance.random()
        if self.has_seeds:
            body["seed"] = seed
        planned = Planned(body | self.fields, form)
        if role < self.cancel_share:
            planned.role = "leaver"
            planned.leaves_after_s = leaves_s
        elif role < self.cancel_share + self.slow_share:
            planned.role = "slow"
        return planned


def poisson(
    rate: float, seed: int, num_warmup: int, duration_s: float | None, num: int | None
) -> list[float]:
    """Return the arrival times of a Poisson process, in seconds from the start: `num_warmup` requests, and
    then `num` or those of the next `duration_s`, whichever are fewer."""
    assert duration_s is not None or num is not None, "duration_s or num must be given"
    chance = random.Random(f"{seed} arrivals")
    times: list[float] = []
    begin_s = 0.0
    for at_s in accumulate(iter(lambda: chance.expovariate(1.0) / rate, None)):
        if num is not None and len(times) == num_warmup + num:
            break
        if duration_s is not None and len(times) >= num_warmup and at_s > begin_s + duration_s:
            break
        times.append(at_s)
        if len(times) == num_warmup:
            begin_s = at_s
    return times
