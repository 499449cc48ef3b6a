"""The words of Markdown texts."""

import pytest

from zoo.text.markdown import OutsideCode, spoken


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Good *morning*, **all** of ~~them~~ you.", "Good morning, all of them you."),
        ("# News\n\nIt rains.", "News.\nIt rains."),
        ("- one\n- two\n\n1. three", "one.\ntwo.\nthree"),
        ("Two\nlines  \nof one paragraph.", "Two lines of one paragraph."),
        ("See [the docs](https://a.b/c?d=1) or https://a.b/c.", "See the docs or ."),
        ("<https://a.b> www.a.b", ""),
        ("Run `pip` first.\n\n```sh\npip install x\n```\n\nDone.", "Run pip first.\nDone."),
        ("    indented code\n\nText.", "Text."),
        ("![a picture](a.png)", ""),
        ("| a | b |\n|---|---|\n| 1 | **2** |", "a, b.\n1, 2"),
        ("> Quoted.\n\n---\n\nNot.", "Quoted.\nNot."),
        ("Fine 👩‍👩‍👧 👍🏽 ✨ 1️⃣ 🇩🇪 at 20°, © 5 * 3 = 15, हिन्दी क्‍ष", "Fine 1 at 20°, © 5 * 3 = 15, हिन्दी क्‍ष"),
        ("<b>Bold</b>, <laugh> <!-- no --> and <|emotion:awe|>.", "Bold, <laugh> and <|emotion:awe|>."),
        (
            'One. [pause:1s] Two. <break time="1s"/> [laugh]',
            'One. [pause:1s] Two. <break time="1s"/> [laugh]',
        ),
        ("**One begins", "One begins"),  # a sentence of a longer text
        ("snake_case and 2 \\* 3", "snake_case and 2 * 3"),
        ("", ""),
    ],
)
def test_only_words_are_spoken(text, words):
    assert spoken(text) == words


CODE = "One `two`.\n```py\nthree\n~~~\nfour\n```\nFive ```six.\n  ~~~\nseven\n```\n~~~~\neight"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_blocks_of_code_are_left_out_however_they_arrive(size):
    outside = OutsideCode()
    found = "".join(outside.more(CODE[at : at + size]) for at in range(0, len(CODE), size)) + outside.rest()
    assert found == "One `two`.\n\nFive ```six.\n\neight"


def test_words_outside_of_code_do_not_wait_for_the_end_of_their_line():
    outside = OutsideCode()
    assert outside.more("One t") == "One t" and outside.more("wo ") == "wo "
    assert outside.more("\n``") == "\n" and outside.more("` py") == "" and outside.more("x\n") == "\n"
    assert outside.more("code") == ""
