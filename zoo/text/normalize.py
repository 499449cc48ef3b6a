"""Write out numbers, dates, times and amounts as words, by the rules of wetext (the extra `text`) for
Chinese, English and Japanese.

The rules block every thread of their process for up to 50 ms at a time, and an engine would stutter. So they
run in a separate process (normalize_worker.py), which starts when it is first needed and ends with this one.
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
MAX_CHARS = 60  # characters per call of the rules, which take a second for a thousand
WORKER = Path(__file__).with_name("normalize_worker.py")
# The rules would damage these, so they never see them: tags, brackets, braces, quotation marks, line ends,
# very long words
_UNREAD = re.compile(r"(<[^<>\s]{1,60}>|\[[^\[\]]{1,100}\]|\{[^{}]{1,100}\}|[\"\\\n\r\0]+|\S{61,})")
_DIGIT = re.compile(r"\d")


def normalize(text: str, language: str) -> str:
    """Return the text with its numbers written out. Text without digits and text in tags and brackets stays
    as it is.

    language: an ISO code. Raises RequestError for a language without rules, and if wetext is not installed.
    """
    if language not in LANGUAGES:
        takes = ", ".join(LANGUAGES.values())
        raise RequestError("normalize", f"normalize is possible in {takes}; the language is {language!r}")
    if find_spec("wetext") is None:
        instead = "pip install -e '.[text]', or leave normalize out"
        raise RequestError("normalize", f"normalize needs wetext, which is not installed here: {instead}")
    stretches = [stretch for sentence in segment(language, text) for stretch in _stretches(sentence)]
    at = [i for i, stretch in enumerate(stretches) if _DIGIT.search(stretch) and not _UNREAD.match(stretch)]
    said = _rules([stretches[i] for i in at], language) if at else []
    for i, words in zip(at, said, strict=True):
        stretches[i] = words
    return "".join(stretches)


def _stretches(sentence: str) -> Iterator[str]:
    """Yield the stretches of a sentence: those for one call of the rules, and those that the rules never
    see."""
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
    """Apply the rules in the worker. May be called from several threads. Raises RuntimeError if the worker
    ended; the next call starts another."""
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
            raise RuntimeError(f"the text normalizer ended with status {_worker.wait()}")
        return json.loads(answer)
