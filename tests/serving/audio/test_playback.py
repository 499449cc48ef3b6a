"""Playback agrees with a player that is simulated step by step."""

from hypothesis import given
from hypothesis import strategies as st

from serving.audio.playback import Playback

RATE_HZ = 1024  # makes every time here an exact float
gaps = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 3000)), min_size=1, max_size=30)


def arrivals(steps):
    """Turn (gap to the previous chunk in ticks, samples) into (arrival time, samples)."""
    at, found = 5000, []
    for gap, num_samples in steps:
        at += gap
        found.append((at / RATE_HZ, num_samples))
    return found


def player(chunks):
    """Return the length of each wait of a simulated player."""
    waits, plays_until_s = [], None
    for at_s, num_samples in chunks:
        if num_samples == 0:
            continue
        if plays_until_s is not None and at_s > plays_until_s:
            waits.append(at_s - plays_until_s)
            plays_until_s = at_s
        plays_until_s = (at_s if plays_until_s is None else plays_until_s) + num_samples / RATE_HZ
    return waits


def test_a_stream_with_late_chunks():
    heard = Playback.of(
        [(10.0, 0), (11.0, 512), (11.5, 512), (12.25, 512), (12.5, 256), (14.0, 100)], RATE_HZ
    )
    assert heard.first_s == 11.0  # the header at 10.0 does not count
    assert heard.num_chunks == 5 and heard.num_followers == 4
    # The first chunk's schedule makes the others due at 11.5, 12.0, 12.5 and 12.75.
    assert heard.num_late == 2 and not heard.is_viable
    # The wait of 0.25 s delays everything after it.
    assert heard.num_underruns == 2 and heard.underrun_s == 1.25 and heard.longest_underrun_s == 1.0
    assert heard.audio_s == (3 * 512 + 256 + 100) / RATE_HZ


def test_one_chunk_is_viable_and_an_empty_one_does_not_count():
    assert Playback.of([(3.0, 100)], RATE_HZ).is_viable
    nothing = Playback.of([(3.0, 0)], RATE_HZ)
    assert nothing.first_s is None and nothing.num_chunks == nothing.num_followers == 0


@given(gaps)
def test_waits_are_those_of_a_player(steps):
    chunks = arrivals(steps)
    heard, waits = Playback.of(chunks, RATE_HZ), player(chunks)
    assert heard.underrun_s == sum(waits)
    assert heard.longest_underrun_s == max(waits, default=0.0)
    assert heard.num_underruns == len(waits)
    assert heard.is_viable == (not waits)


@given(gaps)
def test_lateness_is_counted_against_the_first_chunks_schedule(steps):
    """This spells out the definition."""
    chunks = [chunk for chunk in arrivals(steps) if chunk[1]]
    late = [
        i
        for i in range(1, len(chunks))
        if chunks[i][0] > chunks[0][0] + sum(n for _, n in chunks[:i]) / RATE_HZ
    ]
    assert Playback.of(chunks, RATE_HZ).num_late == len(late)


@given(gaps, st.data())
def test_splitting_a_chunk_does_not_change_what_is_heard(steps, data):
    chunks = arrivals(steps)
    which = data.draw(st.integers(0, len(chunks) - 1))
    at_s, num_samples = chunks[which]
    part = data.draw(st.integers(0, num_samples))
    halves = Playback.of(
        [*chunks[:which], (at_s, part), (at_s, num_samples - part), *chunks[which + 1 :]], RATE_HZ
    )
    whole = Playback.of(chunks, RATE_HZ)
    for fact in ("underrun_s", "longest_underrun_s", "num_underruns", "is_viable", "audio_s", "first_s"):
        assert getattr(halves, fact) == getattr(whole, fact)


@given(gaps, st.integers(1, 4000))
def test_earlier_chunks_never_hurt(steps, ticks):
    """The first chunk keeps its time, because it sets the schedule."""
    chunks = [chunk for chunk in arrivals(steps) if chunk[1]]
    sooner = chunks[:1] + [(max(at_s - ticks / RATE_HZ, chunks[0][0]), n) for at_s, n in chunks[1:]]
    before, after = Playback.of(chunks, RATE_HZ), Playback.of(sooner, RATE_HZ)
    assert after.underrun_s <= before.underrun_s and after.num_late <= before.num_late
