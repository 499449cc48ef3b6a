"""The spoken part of a Markdown text: its words, without marks, addresses, emoji and blocks of code.

    "# News\n\nSee [the *docs*](https://a.b) 🎉\n\n```sh\nls\n```" ─> "News.\nSee the docs"

markdown-it-py parses it, by the rules of CommonMark with tables. This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token

_parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
_PICTURE = "[\u231a\u231b\u23e9-\u23fa\u2600-\u27bf\u2b1b\u2b1c\u2b50\u2b55\U0001f000-\U0001faff]"
# an emoji with what changes its colour and joins it to others, and the two marks of a digit in a box
_EMOJI = re.compile(rf"{_PICTURE}(?:[\ufe0e\ufe0f\u200d\U000e0020-\U000e007f]|{_PICTURE})*|\ufe0f?\u20e3")
_ADDRESS = re.compile(r"(?:https?://|www\.)[^\s<>]*[^\s<>.,;:!?)\]'\"]", re.IGNORECASE)
# Only these, because models have their own tags, such as <laugh>.
_HTML = re.compile(
    r"<!--.*?-->|</?(?:a|abbr|b|blockquote|br|center|code|dd|del|details|div|dl|dt|em|font|h[1-6]|hr|i|img|ins|kbd|li|mark"
    r"|ol|p|pre|q|s|small|span|strong|sub|summary|sup|table|tbody|td|th|thead|tr|u|ul)(?:\s[^<>]*)?/?>",
    re.IGNORECASE | re.DOTALL,
)
_STRAY = re.compile(r"\*{2,}|_{2,}|`+|~~+")  # marks whose other half stands in another sentence
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
_MAY_BE_FENCE = re.compile(r" {0,3}(?:`{0,2}|~{0,2}|`{3,}[^`]*|~{3,}.*)")


def spoken(text: str) -> str:
    """Return the words of a Markdown text, one block a line. It is empty if nothing is to be spoken."""
    lines = [line for line in map(_cleaned, _blocks(_parser.parse(text))) if line]
    ended = [f"{line}." if line[-1].isalnum() else line for line in lines[:-1]]
    return "\n".join(ended + lines[-1:])


def _blocks(tokens: Iterable[Token]) -> Iterator[str]:
    """Yield the text of each paragraph, heading, item and row."""
    row: list[str] | None = None
    for token in tokens:
        if token.type == "tr_open":
            row = []
        elif token.type == "tr_close" and row is not None:
            yield ", ".join(filter(None, row))
            row = None
        elif token.type == "html_block":
            yield token.content
        elif token.type == "inline":
            text = "".join(map(_words, token.children or ()))
            if row is None:
                yield text
            else:
                row.append(_cleaned(text))


def _words(token: Token) -> str:
    match token.type:
        case "softbreak" | "hardbreak":
            return " "
        case "image":
            return ""
    return token.content


def _cleaned(text: str) -> str:
    for pattern in (_HTML, _EMOJI, _ADDRESS):
        text = pattern.sub("", text)
    return " ".join(_STRAY.sub("", text).split())


class OutsideCode:
    """Leaves the blocks of code out of a Markdown text that arrives in parts. `more` takes a part and returns
    what is certainly outside of them; `rest` returns the remainder."""

    def __init__(self) -> None:
        self._held = ""
        self._fence = ""  # of the block that is open
        self._is_in_line = False  # whether the beginning of this line was returned

    def more(self, text: str) -> str:
        *lines, self._held = (self._held + text).split("\n")
        outside = "".join(self._line(f"{line}\n") for line in lines)
        if self._fence or (not self._is_in_line and _MAY_BE_FENCE.fullmatch(self._held)):
            return outside
        begun, self._held, self._is_in_line = self._held, "", True
        return outside + begun

    def rest(self) -> str:
        return self._line(self._held)

    def _line(self, line: str) -> str:
        is_in_line, self._is_in_line = self._is_in_line, False
        fence = None if is_in_line else _FENCE.match(line)
        if self._fence:
            is_end = fence is not None and fence[1].startswith(self._fence) and line.strip() == fence[1]
            self._fence = "" if is_end else self._fence
            return ""
        if fence is None:
            return line
        self._fence = fence[1]
        return "\n"
