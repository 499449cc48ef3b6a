"""Numbers, amounts of money and ordinals as English words, as the reference's texts have them, whatever the
language is.

Source: Zyphra/Zonos at bc40d98, conditioning.py, which spells numbers by inflect 7; that package takes ten
seconds to import.
"""

from __future__ import annotations

import re

_SMALL = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen
"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_GROUPS = """
thousand million billion trillion quadrillion quintillion sextillion septillion octillion nonillion decillion
"""
SMALL = _SMALL.split()
TENS = ("", "", *_TENS.split())
GROUPS = ("", *_GROUPS.split())
MAX_DIGITS = 3 * len(GROUPS)  # of a number that has a name; longer ones are read digit by digit
ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth", "twelve": "twelfth",
}  # fmt: skip


def spell(text: str) -> str:
    """Return a text with its numbers in words."""
    text = re.sub(r"[0-9][0-9,]+[0-9]", lambda match: match[0].replace(",", ""), text)
    text = re.sub(r"£([0-9,]*[0-9]+)", r"\1 pounds", text)
    text = re.sub(r"\$([0-9.,]*[0-9]+)", lambda match: _dollars(match[1]), text)
    text = re.sub(r"[0-9]+\.[0-9]+", lambda match: match[0].replace(".", " point "), text)
    text = re.sub(r"([0-9]+)(?:st|nd|rd|th)", lambda match: _ordinal(match[1]), text)
    return re.sub(r"[0-9]+", lambda match: _integer(match[0]), text)


def _dollars(amount: str) -> str:
    """Return an amount such as "5.20" with its units; the numbers stay digits."""
    whole, *rest = amount.replace(",", "").split(".")
    if len(rest) > 1:
        return f"{amount} dollars"
    counted = ((whole, "dollar"), (rest[0] if rest else "", "cent"))
    said = [_counted(digits.lstrip("0"), unit) for digits, unit in counted if digits.strip("0")]
    return ", ".join(said) or "zero dollars"


def _counted(digits: str, unit: str) -> str:
    return f"{digits} {unit}" if digits == "1" else f"{digits} {unit}s"


def _ordinal(digits: str) -> str:
    """Return an ordinal; in it, tens and ones follow an "and"."""
    words = cardinal(digits, " and ")
    before, gap, last = re.fullmatch(r"(.*?)([ -]?)(\w+)", words).groups()  # type: ignore[union-attr]
    regular = f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th"
    return before + gap + ORDINALS.get(last, regular)


def _integer(digits: str) -> str:
    """Return an integer: from 1001 to 2999 as a year is read, except 2000."""
    number = digits.lstrip("0")
    if len(number) != 4 or not "1000" < number < "3000" or number == "2000":
        return cardinal(digits, " ")
    century, rest = number[:2], number[2:]
    if rest == "00":
        return f"{_below_thousand(int(century), ' ')} hundred"
    if century == "20" and rest < "10":
        return f"two thousand {SMALL[int(rest)]}"
    ending = f"oh {SMALL[int(rest)]}" if rest < "10" else _below_thousand(int(rest), " ")
    return f"{_below_thousand(int(century), ' ')} {ending}"


def cardinal(digits: str, link: str) -> str:
    """Return a number. link: what stands before the tens and ones."""
    digits = digits.lstrip("0")
    if len(digits) > MAX_DIGITS:
        return " ".join(SMALL[int(digit)] for digit in digits)
    value, said = int(digits or 0), list[str]()
    for i, name in reversed(list(enumerate(GROUPS))):
        group = value // 1000**i % 1000
        if not group:
            continue
        words = f"{_below_thousand(group, link)} {name}".strip()
        is_short = i == 0 and group < 100 and said
        said.append((link if is_short else ", " if said else "") + words)
    return "".join(said) or SMALL[0]


def _below_thousand(value: int, link: str) -> str:
    if value >= 100:
        rest = link + _below_thousand(value % 100, link) if value % 100 else ""
        return f"{SMALL[value // 100]} hundred{rest}"
    if value < 20:
        return SMALL[value]
    return TENS[value // 10] + (f"-{SMALL[value % 10]}" if value % 10 else "")
