"""A program that reads [language, [text, ...]] as JSON, a line each, and answers with the texts in words: see normalize.py. Imports
nothing of the zoo, so that it starts in half a second."""

import json
import signal
import sys

from wetext import Normalizer


def read(normalizer: Normalizer, text: str) -> str:
    """With the white space around it as it was; all of it as it was, where the rules find no way through it."""
    words = " ".join(text.split())
    start, stop = len(text) - len(text.lstrip()), len(text.rstrip())
    try:
        return text[:start] + normalizer.normalize(words) + text[stop:]
    except AssertionError:  # so wetext says it, as of a zero-width space
        return text


def main() -> None:
    # Ctrl-C is the parent's: this process ends with the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    normalizers: dict[str, Normalizer] = {}
    for line in sys.stdin:
        language, texts = json.loads(line)
        if language not in normalizers:
            normalizers[language] = Normalizer(lang=language, operator="tn")
        print(json.dumps([read(normalizers[language], text) for text in texts]), flush=True)


if __name__ == "__main__":
    main()
