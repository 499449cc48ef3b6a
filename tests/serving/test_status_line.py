"""The status line below the log of `zoo serve`."""

import asyncio
import io
import os
import re
import sys

import pytest
from rich.console import Console

from serving import supervisor
from serving.protocol import ModelStats, Stats
from serving.status_line import StatusLine

CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")


def stats(audio_s=0.0, first_audio_s=None, running=2, waiting=1, **others):
    models = {
        "m": ModelStats(8, running, waiting, 0, 0, audio_s=audio_s, first_audio_s=first_audio_s),
        **others,
    }
    return Stats(100, 60, 7, 3, 0, models)


def screen(output):
    """Return the lines that a terminal shows for this output, without trailing spaces."""
    rows, row, column = [[]], 0, 0
    while output:
        if match := CONTROL.match(output):
            number = int(match[1]) if match[1].isdigit() else 1
            if match[2] == "A":
                row = max(0, row - number)
            elif match[2] == "K":
                rows[row] = [] if match[1] == "2" else rows[row][:column]
            output = output[match.end() :]
            continue
        character, output = output[0], output[1:]
        if character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
            if row == len(rows):
                rows.append([])
        else:
            cells = rows[row]
            cells.extend(" " * (column + 1 - len(cells)))
            cells[column] = character
            column += 1
    return [line for cells in rows if (line := "".join(cells).rstrip())]


@pytest.fixture
def line():
    return StatusLine(Console(file=io.StringIO(), force_terminal=True, width=100, color_system="truecolor"))


def shown(line):
    return screen(line.console.file.getvalue())


def test_the_rate_begins_again_when_a_model_is_unloaded(line):
    for now_s, audio_s in ((0.0, 10.0), (1.0, 30.0)):
        line.show(stats(audio_s), now_s)
    assert "20.0 audio-s/s" in line.line(stats(50.0), 2.0)
    assert "0.0 audio-s/s" in line.line(stats(5.0), 3.0)
    assert "3.0 audio-s/s" in line.line(stats(8.0), 4.0)


def test_the_line_shows_requests_audio_per_second_and_first_audio(line):
    assert line.line(stats(), 0.0) == "2 speaking, 1 waiting   0.0 audio-s/s"
    assert line.line(stats(6.0, 0.0234), 1.0) == "2 speaking, 1 waiting   6.0 audio-s/s   first audio 23 ms"
    for second in range(2, 12):
        said = line.line(stats(6.0 + 10 * second, 1.5), float(second))
    assert said == "2 speaking, 1 waiting   10.0 audio-s/s   first audio 1,500 ms"
    line.hide()
    assert "0.0 audio-s/s" in line.line(stats(1.0), 12.0)  # a new engine starts counting at zero


def test_the_line_names_the_models_if_there_are_several(line):
    other = ModelStats(8, 1, 0, 0, 0, preparing=4, first_audio_s=0.1)
    said = line.line(stats(0.0, 0.02, n=other), 0.0)
    assert said == "3 speaking, 5 waiting   0.0 audio-s/s   first audio 20 ms (m)   first audio 100 ms (n)"


def test_there_is_one_status_line_below_the_log(line):
    with line.open():
        print("before", file=sys.stderr)
        for second in range(4):
            line.show(stats(float(second)), float(second))
            print(f"line {second}", file=sys.stderr)
        line.show(stats(9.0), 4.0)
        print("no end of a li", end="", file=sys.stderr)
        assert shown(line) == [
            "before",
            *(f"line {i}" for i in range(4)),
            "2 speaking, 1 waiting   2.2 audio-s/s",
        ]
        print("ne yet", file=sys.stderr)
        sys.stderr.write("\x1b[32mgreen\x1b[0m\nlast")
    assert shown(line) == [
        "before",
        *(f"line {i}" for i in range(4)),
        "no end of a line yet",
        "green",
        "last",
    ]
    assert sys.stderr is not line and "\x1b[32m" in line.console.file.getvalue()


def test_a_long_log_line_stays_whole_and_a_long_status_is_cut(line):
    command = "curl " + "x" * 300
    with line.open():
        line.show(
            stats(**{f"a-long-name-{i}": ModelStats(8, 1, 0, 0, 0, first_audio_s=1.0) for i in range(9)}), 0.0
        )
        print(command, file=sys.stderr)
        *_, said, last = shown(line)
    assert said == command and len(last) <= 100 and last.endswith("…")


def test_brackets_in_the_log_are_not_markup(line):
    with line.open():
        print("[info     ] speech [bold] 2 [/] {x}", file=sys.stderr)
    assert shown(line) == ["[info     ] speech [bold] 2 [/] {x}"]


def test_the_output_of_children_is_relayed_line_by_line(line):
    """The child may write in any portions, and its last line may lack an end."""
    child = (
        "import sys, os\nos.write(2, b'one\\ntwo'); os.write(2, b' more\\n\\xff\\n'); os.write(2, b'last')"
    )

    async def scene():
        found = supervisor.Child(
            "child", [sys.executable, "-c", child], [], dict(os.environ), is_proven=False
        )
        found.is_relayed = True
        with line.open():
            line.show(stats(), 0.0)
            assert await found.supervise() == 1

    asyncio.run(scene())
    assert shown(line) == [
        "one",
        "two more",
        "\ufffd",
        "last",
        "zoo: the child ended with status 0 before it was ready",
    ]
