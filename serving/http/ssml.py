"""SSML as the text that a speech request takes: breaks become pauses, and a rate around all of it becomes a
`[rate:...]` in front. Other elements are read as their content."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, ParseError, fromstring

RATES = {"x-slow": 0.5, "slow": 0.75, "medium": 1.0, "default": 1.0, "fast": 1.25, "x-fast": 1.5}
STRENGTHS_S = {"none": 0.0, "x-weak": 0.0, "weak": 0.25, "medium": 0.5, "strong": 1.0, "x-strong": 1.5}
TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*")
MAX_DEPTH = 50
BLOCKS = ("p", "s")


def is_ssml(text: str) -> bool:
    return re.match(r"\s*(<\?xml[^>]*\?>\s*)?<speak\b", text) is not None


def text_of(ssml: str) -> str:
    """Return the text of a document. Raises ValueError."""
    if "<!DOCTYPE" in ssml or "<!ENTITY" in ssml:
        raise ValueError("a document type is not allowed")
    try:
        root = fromstring(ssml)
    except ParseError as error:
        raise ValueError(f"it is not well-formed: {error}") from None
    rate, inner = _rate_around(root)
    words = re.sub(r"\s+", " ", "".join(_words(inner, 0))).strip()
    return words if rate is None else f"[rate:{rate:g}] {words}"


def _rate_around(root: Element) -> tuple[float | None, Element]:
    """Return the rate of a prosody element that holds all of a document, and the element within."""
    children = list(root)
    if len(children) != 1 or _tag(children[0]) != "prosody" or children[0].get("rate") is None:
        return None, root
    [only] = children
    if (root.text or "").strip() or (only.tail or "").strip():
        return None, root
    return _rate(only.get("rate", "")), only


def _rate(given: str) -> float:
    given = given.strip().lower()
    if given in RATES:
        return RATES[given]
    number = given.removesuffix("%")
    try:
        return float(number) / (100 if given.endswith("%") else 1)
    except ValueError:
        raise ValueError(
            f"the rate {given[:40]!r} is none of: {', '.join(RATES)}, a number, a percentage"
        ) from None


def _words(element: Element, depth: int) -> list[str]:
    if depth > MAX_DEPTH:
        raise ValueError(f"its elements are nested more than {MAX_DEPTH} deep")
    found = [element.text or ""]
    for child in element:
        found += _child(child, depth)
        found.append(child.tail or "")
    return found


def _child(child: Element, depth: int) -> list[str]:
    match _tag(child):
        case "break":
            silence_s = _silence_s(child)
            return [f" [pause:{silence_s:g}s] "] if silence_s else [" "]
        case "sub" if child.get("alias"):
            return [child.get("alias", "")]
        case "desc":
            return []
        case "prosody" if child.get("rate") is not None:
            raise ValueError("a rate must be around the whole text")
        case "voice":
            raise ValueError("voices within a text are not supported; name the voice in the request")
        case tag if tag in BLOCKS:
            return [" ", *_words(child, depth + 1), " "]
    return _words(child, depth + 1)


def _silence_s(element: Element) -> float:
    given = element.get("time")
    if given is None:
        strength = element.get("strength", "medium")
        if strength not in STRENGTHS_S:
            raise ValueError(f"the strength {strength[:40]!r} is none of: {', '.join(STRENGTHS_S)}")
        return STRENGTHS_S[strength]
    if (time := TIME.fullmatch(given)) is None:
        raise ValueError(f"the time {given[:40]!r} is not a number of s or ms")
    return float(time[1]) / (1000 if time[2] == "ms" else 1)


def _tag(element: Element) -> str:
    return str(element.tag).rpartition("}")[2].lower()
