"""A part of the fuzzing: the seconds of `python -m tests.fuzz` that fit into the test suite."""

import pytest

from tests.fuzz import conversations, documents, recordings, schema, texts
from tests.fuzz.target import fuzzed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fuzz", "examples", "reached"),
    [
        (schema.fuzz, 60, "POST /v1/audio/speech positive: 200"),
        (recordings.fuzz, 60, "ref_audio: 200"),
        (conversations.fuzz, 10, "response.done: incomplete"),
        (texts.fuzz, 20, "their characters"),
    ],
    ids=["schema", "recordings", "conversations", "texts"],
)
def test_no_request_breaks_the_server(fuzz, examples, reached, tmp_path):
    """reached: an outcome that proves that requests reached the engine."""
    with fuzzed(tmp_path) as target:
        counts = fuzz(target, examples, 0)
    assert sum(counts.values()) >= 50 and counts[reached] > 0, counts


def test_damaged_documents_become_books_or_are_refused_in_one_line():
    counts = documents.read_all(150, 0)
    assert counts["read"] > 10 and counts["refused"] > 10, counts


def test_damaged_files_differ_from_the_originals():
    """Check that damaged files differ from the originals, and that some still look like audio."""
    from hypothesis import find

    found = find(
        recordings.damaged(),
        lambda data: data not in recordings.files() and data[:4] == b"RIFF" and len(data) > 100,
    )
    assert found
    assert len(recordings.files()) == 14
