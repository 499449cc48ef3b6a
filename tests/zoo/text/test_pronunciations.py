"""A dictionary of how words are spoken."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.text.pronunciations import Lexicon, Pronunciation, Reader, read_file

ENTRIES = {
    "nginx": "engine x",
    "US": "U S",
    "New York": "Noo York",
    "New York City": "the city",
    "C++": "C plus plus",
    "pause": "wrong",
    "东京": "Tokyo",
    "x": "nginx",
}


def lexicon(entries=ENTRIES):
    return Lexicon([Pronunciation(term, say) for term, say in entries.items()])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Ask nginx.", "Ask engine x."),
        ("Nginx, NGINX's (nginx)-like", "engine x, engine x's (engine x)-like"),
        ("xnginx nginxs nginx_2 nginx2", "xnginx nginxs nginx_2 nginx2"),
        ("the US told us", "the U S told us"),
        ("New York City, New York, New Yorkers, New York", "the city, Noo York, New Yorkers, Noo York"),
        ("C++20, C++ and C", "C plus plus20, C plus plus and C"),
        ("在东京都", "在Tokyo都"),
        ("[pause:1s] <nginx> pause [soft nginx] [x", "[pause:1s] <nginx> wrong [soft nginx] [nginx"),
        ("1 < 2 nginx > x", "1 < 2 engine x > nginx"),
        ("", ""),
    ],
)
def test_whole_words_are_replaced_longest_first(text, said):
    assert lexicon().said(text) == said


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["nginx", "New York", " City", "US", "us", " ", "C++", "[x", "]", "<x", "东京", "e", "."]
        ),
        max_size=12,
    ).map("".join),
    st.integers(1, 7),
)
def test_a_text_that_arrives_in_parts_is_read_like_the_whole(text, size):
    reader = Reader(lexicon())
    parts = [reader.more(text[at : at + size]) for at in range(0, len(text), size)]
    assert "".join(parts) + reader.rest() == lexicon().said(text)


def test_no_more_than_a_term_is_held_back():
    reader = Reader(lexicon())
    assert reader.more("Good day, New Yo") == "Good day, "
    assert reader.more("del. ") == "New Yodel. "


@pytest.mark.parametrize(
    ("language", "voice", "said"),
    [
        ("de", None, "German"),
        ("German", "anna", "German"),
        ("fr-CA", "anna", "anna"),
        (None, "bert", "all"),
        (None, None, "all"),
    ],
)
def test_an_entry_may_be_for_one_language_or_voice(language, voice, said):
    shared = [
        Pronunciation("a", "German", language="de-DE"),
        Pronunciation("a", "anna", voice="anna"),
        Pronunciation("a", "all"),
    ]
    assert Lexicon.of((), shared, language, voice).said("a") == said


def test_the_entries_of_a_request_win_over_shared_ones():
    own, shared = (
        [Pronunciation("sql", "sequel")],
        [Pronunciation("SQL", "S Q L"), Pronunciation("my sql", "M")],
    )
    assert Lexicon.of(own, shared, None, None).said("SQL, my sql") == "sequel, M"
    assert Lexicon.of((), shared[:0], None, None) is None
    assert Lexicon.of([Pronunciation("a", "b", "de")], (), "en", None) is None


@pytest.mark.parametrize(
    "content", [b"{", b'{"a": "b"}', b'[{"term": "", "say": "a"}]', b'[{"term": "a"}]', b"\xff"]
)
def test_a_file_that_is_no_list_of_entries_is_refused(tmp_path, content):
    path = tmp_path / "words.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="must be a JSON list such as"):
        read_file(path)
    with pytest.raises(ValueError, match="No such file"):
        read_file(tmp_path / "none.json")


def test_a_file_has_the_entries_of_a_request(tmp_path):
    entry = Pronunciation("nginx", "engine x", "en")
    (tmp_path / "words.json").write_bytes(msgspec.json.encode([entry]))
    assert read_file(tmp_path / "words.json") == [entry]
