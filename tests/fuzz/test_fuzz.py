"""A part of the fuzzing: seconds of `python -m tests.fuzz`."""

import pytest

from tests.fuzz import recordings, schema
from tests.fuzz.target import fuzzed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fuzz", "reached"),
    [(schema.fuzz, "POST /v1/audio/speech positive: 200"), (recordings.fuzz, "ref_audio: 200")],
    ids=["schema", "recordings"],
)
def test_no_request_breaks_the_whole_server(fuzz, reached, tmp_path):
    """reached: some of what is thrown is spoken, or nothing was tried."""
    with fuzzed(tmp_path) as target:
        counts = fuzz(target, 120, 0)
    assert sum(counts.values()) >= 100 and counts[reached] > 0, counts


def test_damage_is_damage():
    """Most of what is thrown is no longer the file that it was, and some of it still looks like one."""
    from hypothesis import find

    found = find(
        recordings.damaged(),
        lambda data: data not in recordings.files() and data[:4] == b"RIFF" and len(data) > 100,
    )
    assert found
    assert len(recordings.files()) == 14
