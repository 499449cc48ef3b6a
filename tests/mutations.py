"""JSON files of the tiny checkpoints with one value changed: to another type, out of range, or to a nearly
right value."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from models import directory

FILES = (
    "config.json",
    "generation_config.json",
    "speech_tokenizer/config.json",
    "snac_24khz/config.json",
    "dac_44khz/config.json",
    "backbone/config.json",
)
REMOVED = object()
OTHERS = (REMOVED, None, "5", "", [], {}, True, -1, 0, 10**9, 0.5, float("nan"), [None])

Place = tuple[str | int, ...]  # the keys and indices that lead to a value


@cache
def sizes(name: str) -> tuple[str, ...]:
    """Return the names of a family's tiny models: its generations and variants."""
    known = importlib.import_module(f"zoo.{name}.demo").SIZES
    return tuple(size for size in known if size.startswith("tiny"))


@cache
def content(name: str, size: str, file: str) -> Any:
    path = directory(name, size) / file
    return json.loads(path.read_text()) if path.exists() else {}


def new_places(name: str, size: str, file: str) -> list[Place]:
    """Return the places whose values no earlier size has."""
    config = content(name, size, file)
    before = [content(name, other, file) for other in sizes(name)[: sizes(name).index(size)]]
    return [at for at in _places(config) if all(_value(other, at) != _value(config, at) for other in before)]


def mutations(config: Any, at: Place) -> Iterator[tuple[str, Any]]:
    """Yield descriptions of new values for a place, each with the whole changed file."""
    found = _value(config, at)
    near: tuple[Any, ...] = ()
    if type(found) is int:
        near = (found - 1, found + 1, 2 * found)
    elif isinstance(found, list):
        near = (found * 2, found[::-1])
    for value in (*OTHERS, *near):
        mutant = copy.deepcopy(config)
        block = _value(mutant, at[:-1])
        if value is REMOVED:
            del block[at[-1]]
        else:
            block[at[-1]] = value
        yield "is removed" if value is REMOVED else f"= {value!r}", mutant


def _places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Yield every key at every depth, and the first element of each list."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*at, key)
            yield from _places(inner, (*at, key))
    elif isinstance(value, list) and value:
        yield (*at, 0)
        yield from _places(value[0], (*at, 0))


def _value(config: Any, at: Place) -> Any:
    """Return the value at a place, or REMOVED if there is none."""
    for key in at:
        try:
            config = config[key]
        except (KeyError, IndexError, TypeError):
            return REMOVED
    return config
