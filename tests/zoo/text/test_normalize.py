"""Numbers are written out as words."""

from __future__ import annotations

import os
import signal

import pytest

from zoo.contract.family import pieces_of
from zoo.request import Request, RequestError
from zoo.text import normalize as module
from zoo.text.normalize import normalize

pytest.importorskip("wetext")


@pytest.mark.parametrize(
    ("language", "text", "said"),
    [
        (
            "en",
            "It is $12.50 on Jan. 5, 2024.",
            "It is twelve point five dollars on the fifth of january, twenty twenty four.",
        ),
        ("en", "  At 7:45\nI had 3 apples. ", "  At seven forty five\nI had three apples. "),
        ("zh", "价格是3.5元，50%。", "价格是三点五元，百分之五十。"),  # noqa: RUF001
        ("ja", "3,500円です。", "三千五百円です。"),
    ],
)
def test_numbers_become_words(language, text, said):
    assert normalize(text, language) == said


def test_text_without_numbers_is_unchanged():
    """Quotation marks, tags and text that the rules cannot parse are unchanged, with or without numbers."""
    for text in (
        'I don\'t "know" Dr. Müller, ok… 🎉',
        "<|speaker:3|>[pause 2]{HH AH0}",
        "a\u200b3",
        "1" * 100,
        "",
        " \n",
    ):
        assert normalize(text, "en") == text
    assert normalize('<|speaker:3|>He said "3".', "en") == '<|speaker:3|>He said "three".'


def test_a_language_without_rules_is_refused():
    with pytest.raises(
        RequestError, match="possible in chinese, english, japanese; the language is 'de'"
    ) as refused:
        normalize("3 Uhr", "de")
    assert refused.value.param == "normalize"


def test_without_wetext_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install -e '\.\[text\]'"):
        normalize("3", "en")


def test_a_worker_that_dies_fails_only_one_text():
    normalize("3", "en")
    os.kill(module._worker.pid, signal.SIGKILL)
    module._worker.wait()
    assert normalize("3", "en") == "three"
    os.kill(module._worker.pid, signal.SIGSTOP)  # so that it dies during a request
    with pytest.raises(RuntimeError, match="status -9"):
        pid = module._worker.pid
        import threading

        threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
        normalize("4", "en")
    assert normalize("3", "en") == "three"


def test_a_text_is_normalized_before_splitting_and_only_on_request():
    from models import family

    spec = family("toy").spec
    assert pieces_of(Request(text="It is 3.", normalize=True), spec) == ["It is three."]
    assert pieces_of(Request(text="It is 3."), spec) == ["It is 3."]
    assert len(pieces_of(Request(text="It is 1234567. " * 4, normalize=True), spec)) > 2
    with pytest.raises(RequestError, match="needs all of the text at once"):
        pieces_of(Request(text="It is 3.", normalize=True, is_open=True), spec)
