"""The worker process of normalize.py: reads [language, [text, ...]] as one line of JSON and answers with the
normalized texts. It imports nothing from the zoo, so that it starts in half a second."""

import json
import signal
import sys

from wetext import Normalizer


def read(normalizer: Normalizer, text: str) -> str:
    """Normalize a text and keep the white space around it. Return it unchanged if the rules cannot parse
    it."""
    words = " ".join(text.split())
    start, stop = len(text) - len(text.lstrip()), len(text.rstrip())
    try:
        return text[:start] + normalizer.normalize(words) + text[stop:]
    except AssertionError:  # wetext raises it for characters that it cannot parse, such as a zero-width space
        return text


def main() -> None:
    # The parent handles Ctrl-C; this process ends with the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    normalizers: dict[str, Normalizer] = {}
    for line in sys.stdin:
        language, texts = json.loads(line)
        if language not in normalizers:
            normalizers[language] = Normalizer(lang=language, operator="tn")
        print(json.dumps([read(normalizers[language], text) for text in texts]), flush=True)


if __name__ == "__main__":
    main()
