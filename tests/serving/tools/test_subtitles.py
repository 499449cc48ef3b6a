"""`zoo say --subtitles`, with the small voice and a tiny random aligner."""

import re

import pytest
import soundfile
from shell import zoo
from tiny_aligner import write

TEXT = "The old man told a story. It was about 7 children."


@pytest.fixture(scope="module")
def aligner(tmp_path_factory):
    return write(tmp_path_factory.mktemp("aligner"))


def seconds(time):
    hours, minutes, rest = time.replace(",", ".").split(":")
    return 3600 * int(hours) + 60 * int(minutes) + float(rest)


@pytest.mark.parametrize(("suffix", "speed"), [(".srt", 1), (".vtt", 2)])
def test_subtitles_have_all_words_within_the_speech(aligner, tmp_path, suffix, speed):
    out, subtitles = tmp_path / "a.wav", tmp_path / f"a{suffix}"
    done = zoo(
        "say", TEXT, "-o", out, "--subtitles", subtitles, "--aligner", aligner, "--speed", speed,
        "--sentence-gap-s", 0.5,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{subtitles}: 11 words, 10 of them aligned" in done.stdout
    content = subtitles.read_text()
    said = re.sub(r"<[^>]*>", "", "\n".join(line for line in content.split("\n") if "-->" not in line))
    words = [word for word in said.split() if word not in ("WEBVTT", "1", "2")]
    assert " ".join(words) == TEXT
    spans = re.findall(r"(\S+) --> (\S+)", content)
    times = [seconds(time) for span in spans for time in span]
    assert times == sorted(times) and len(spans) == 2
    assert times[-1] <= soundfile.info(out).duration + 0.001
    assert times[2] - times[1] >= 0.5 / speed - 0.002  # the gap


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--subtitles", "a.srt"], "name it with --aligner DIR"),
        (["--subtitles", "a.txt", "--aligner", "{}"], "must end in one of: .srt, .vtt"),
        (["--subtitles", "none/a.srt", "--aligner", "{}"], "cannot be written"),
        (["--subtitles", "a.srt", "--aligner", "none"], "is not a directory"),
    ],
)
def test_subtitles_that_cannot_be_made_are_refused(aligner, tmp_path, flags, says):
    done = zoo("say", TEXT, "-o", tmp_path / "a.wav", *(flag.format(aligner) for flag in flags))
    assert done.returncode == 2 and says in done.stderr and not (tmp_path / "a.wav").exists()
