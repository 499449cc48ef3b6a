"""Subtitles from word times."""

from zoo.align.subtitles import LINE_CHARS, MAX_CUE_S, TimedWord, cues, joined, srt, vtt

STORY = "The old man told a story. It was about the sea"


def timed(text, each_s=0.5, gap_s=0.0):
    return [
        TimedWord(word, i * (each_s + gap_s), i * (each_s + gap_s) + each_s)
        for i, word in enumerate(text.split())
    ]


def texts(words):
    return [joined([word.text for word in cue]) for cue in cues(words)]


def test_a_subtitle_ends_with_its_sentence():
    assert texts(timed(STORY, 0.2)) == ["The old man told a story.", "It was about the sea"]
    assert texts(timed('He said "No." Then he left.', 0.2)) == ['He said "No."', "Then he left."]


def test_a_subtitle_ends_before_a_pause_and_after_six_seconds():
    assert texts(timed("one two", 0.5, 0.8)) == ["one", "two"]
    found = cues(timed("word " * 40))
    assert all(cue[-1].end_s - cue[0].start_s <= MAX_CUE_S for cue in found) and len(found) > 3


def test_a_subtitle_has_two_lines():
    words = timed("lengthy " * 30, 0.05)
    lines = [block.split("\n")[2:] for block in srt(words).strip().split("\n\n")]
    assert max(map(len, lines)) == 2 and all(len(line) <= LINE_CHARS for each in lines for line in each)
    assert " ".join(" ".join(each) for each in lines).split() == ["lengthy"] * 30


def test_srt():
    assert srt([TimedWord("Good", 0, 0.5), TimedWord("day.", 0.5, 1), TimedWord("So", 3661, 3661.25)]) == (
        "1\n00:00:00,000 --> 00:00:01,000\nGood day.\n\n2\n01:01:01,000 --> 01:01:01,250\nSo\n"
    )


def test_vtt_has_the_time_of_each_word_and_escapes_marks():
    assert vtt([TimedWord("A", 0, 0.5), TimedWord("<b>", 0.5, 1)]) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nA<00:00:00.500> &lt;b&gt;\n"
    )


def test_chinese_characters_have_no_spaces_between_them():
    assert joined(["我", "们。", "Go", "on"]) == "我们。 Go on"


def test_no_words_give_an_empty_file():
    assert srt([]) == "" and vtt([]) == "WEBVTT\n"
