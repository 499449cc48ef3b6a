"""Numbers, dates, times and amounts of a text in words, by the rules of wetext (the extra `text`) for Chinese, English and Japanese.

The rules hold up every thread of the process that they run in, up to 50 ms at a time: an engine would stutter. So they run in a
process of their own (normalize_worker.py), which starts when it is first needed and ends with this one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

from sentencex import segment

from zoo.request import RequestError

LANGUAGES = {"zh": "chinese", "en": "english", "ja": "japanese"}
MAX_CHARS = 60  # that the rules read at a time: they take a second for a thousand
WORKER = Path(__file__).with_name("normalize_worker.py")
# What the rules would change without reading it: tags, brackets and braces; quotation marks, line ends; and what has no end
_UNREAD = re.compile(r"(<[^<>\s]{1,60}>|\[[^\[\]]{1,100}\]|\{[^{}]{1,100}\}|[\"\\\n\r\0]+|\S{61,})")
_DIGIT = re.compile(r"\d")


def normalize(text: str, language: str) -> str:
    """What has no digit stays as it is, and so does what is in tags and brackets. language: an ISO code. Raises RequestError for
    one without rules, and where wetext is not installed."""
    if language not in LANGUAGES:
        takes = ", ".join(LANGUAGES.values())
        raise RequestError("normalize", f"normalize is possible in {takes}; the language is {language!r}")
    if find_spec("wetext") is None:
        instead = "pip install 'speechzoo[text]', or leave normalize out"
        raise RequestError("normalize", f"normalize needs wetext, which is not installed here: {instead}")
    stretches = [stretch for sentence in segment(language, text) for stretch in _stretches(sentence)]
    at = [i for i, stretch in enumerate(stretches) if _DIGIT.search(stretch) and not _UNREAD.match(stretch)]
    said = _rules([stretches[i] for i in at], language) if at else []
    for i, words in zip(at, said, strict=True):
        stretches[i] = words
    return "".join(stretches)


def _stretches(sentence: str) -> Iterator[str]:
    """What the rules read at a time, and between it what they do not."""
    for i, part in enumerate(_UNREAD.split(sentence)):
        if i % 2:
            yield part
            continue
        begun = ""
        for word in re.split(r"(?<=\s)(?=\S)", part):
            if len(begun) + len(word) > MAX_CHARS:
                yield begun
                begun = ""
            begun += word
        yield begun


_lock = Lock()
_worker: subprocess.Popen[str] | None = None


def _rules(stretches: list[str], language: str) -> list[str]:
    """May be called from several threads. Raises RuntimeError where the worker ended; the next call starts another."""
    global _worker
    with _lock:
        if _worker is None or _worker.poll() is not None:
            pipe = subprocess.PIPE
            command = [sys.executable, str(WORKER)]
            _worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8")
        assert _worker.stdin is not None and _worker.stdout is not None
        try:
            _worker.stdin.write(json.dumps([language, stretches]) + "\n")
            _worker.stdin.flush()
            answer = _worker.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"the normaliser ended with status {_worker.wait()}")
        return json.loads(answer)
