"""`zoo audiobook`: the parts of a book as lines of `zoo batch`."""

from __future__ import annotations

from typing import Any

import msgspec

from serving.books.read import Book, spoken_parts
from serving.tools.batch import Fields, Item


def items_of(book: Book, defaults: dict[str, Any]) -> list[list[Item]]:
    """Return the items of each chapter, in order. Raises ValueError for wrong defaults."""
    fields = msgspec.convert({**defaults, "text": ""}, Fields, str_keys=True)
    found: list[list[Item]] = []
    line = 0
    for number, chapter in enumerate(book.chapters, 1):
        found.append([])
        for at, part in enumerate(spoken_parts(chapter.text), 1):
            line += 1
            item = Item(line, f"{number:04}-{at:03}", msgspec.structs.replace(fields, text=part))
            found[-1].append(item)
    return found
