"""Tools and their calls, between OpenAI's form and that of the models here: Step-Audio 2's.

    <tool_call>function
    NAME
    {"argument": ...}</tool_call>

Source: stepfun's vLLM, step_audio_2_tool_parser, as its public readers describe it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from serving.http.errors import refusal

TEXTS = 4  # all tools together may be as long as so many texts
BEGIN, END, KIND = "<tool_call>", "</tool_call>", "function"


def schemas_of(tools: Iterable[Any], text_chars: int) -> str:
    """Return tools, in the form of chat completions, as the model reads them. Raises the refusal."""
    schemas = json.dumps(list(tools), ensure_ascii=False)
    most = TEXTS * text_chars
    if len(schemas) > most:
        message = f"tools have {len(schemas)} characters of JSON; this server takes up to {most}"
        raise refusal(400, message, "tools")
    return schemas


def takes_none(model: str) -> str:
    """Return why a model cannot have tools."""
    return f"model {model!r} takes no tools; leave tools out"


def written(name: str, arguments: str) -> str:
    """Return a call as the model writes it."""
    return f"{BEGIN}{KIND}\n{name}\n{arguments}{END}"


class Calls:
    """Takes the calls out of a text that arrives in parts."""

    def __init__(self) -> None:
        self.held = ""  # the beginning of a call, or of its tag
        self.found: list[tuple[str, str]] = []  # name and arguments

    def take(self, text: str) -> str:
        """Return the text outside calls, as far as it is certain."""
        self.held += text
        shown = ""
        while (start := self.held.find(BEGIN)) >= 0:
            shown += self.held[:start]
            self.held = self.held[start:]
            stop = self.held.find(END)
            if stop < 0:
                return shown
            inside, self.held = self.held[len(BEGIN) : stop], self.held[stop + len(END) :]
            call = read(inside)
            if call is None:
                shown += f"{BEGIN}{inside}{END}"
            else:
                self.found.append(call)
        kept = next(n for n in range(len(BEGIN), -1, -1) if self.held.endswith(BEGIN[:n]))
        end = len(self.held) - kept
        shown, self.held = shown + self.held[:end], self.held[end:]
        return shown

    def rest(self) -> str:
        """Return the held text when the answer has ended. An unfinished call is text."""
        rest, self.held = self.held, ""
        return rest


def read(inside: str) -> tuple[str, str] | None:
    """Return name and arguments of a call, or None if it is malformed."""
    lines = inside.strip().split("\n", 2)
    if len(lines) != 3 or lines[0].strip() != KIND or not lines[1].strip():
        return None
    try:
        arguments = json.loads(lines[2])
    except ValueError:
        return None
    return (lines[1].strip(), lines[2].strip()) if isinstance(arguments, dict) else None


def in_openais_form(calls: list[tuple[str, str]], id: str) -> list[dict[str, Any]]:
    """Return the calls of the answer `id`, each with its own ID."""
    return [
        {"id": f"call_{id}_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
