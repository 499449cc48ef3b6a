"""Text that ends before a stop string."""

import pytest

from zoo.text.stops import Writing

TEXT = "Héllo, wörld. Good night."


def written(stops, parts):
    writing = Writing(stops)
    texts = [writing.more(part) for part in parts]
    return "".join(texts) + writing.more(b"", is_end=True), writing.is_stopped


@pytest.mark.parametrize(
    "stops", [("wörld",), ("ö",), ("night", "Good"), ("xx", "ll", "lo"), ("Good nighty",), ()]
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_text_is_cut_before_the_first_stop_string_however_it_comes(stops, size):
    data = TEXT.encode()
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    found = [TEXT.index(stop) for stop in stops if stop in TEXT]
    text, is_stopped = written(stops, parts)
    assert text == (TEXT[: min(found)] if found else TEXT) and is_stopped == bool(found)


def test_only_what_may_begin_a_stop_string_is_held_back():
    writing = Writing(("###",))
    assert [writing.more(part) for part in (b"a", b"b#", b"#", b"c", b"##")] == ["a", "b", "", "##c", ""]
    assert writing.more(b"", is_end=True) == "##" and not writing.is_stopped


def test_nothing_follows_a_stop_string():
    writing = Writing(("b",))
    assert (writing.more(b"abc"), writing.more(b"d"), writing.more(b"", is_end=True)) == ("a", "", "")
