"""References: preparing a clip for an encoder, refusing bad clips, and caching encoded ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from zoo.request import AudioClip, RequestError
from zoo.voices.references import References, content, first_channel, mono

LIMITS_S = (0.05, 2.0)


def tone(seconds: float = 1.0, rate_hz: int = 24000, hz: float = 440.0, loudness: float = 0.5) -> np.ndarray:
    at = np.arange(round(seconds * rate_hz)) / rate_hz
    return (loudness * np.sin(2 * np.pi * hz * at)).astype(np.float32)


def made(samples: np.ndarray, rate_hz: int = 24000) -> np.ndarray:
    return mono(AudioClip(samples, rate_hz), 24000, LIMITS_S)


# one channel at the model's rate


def test_audio_that_fits_is_left_as_it_is():
    assert np.array_equal(made(tone()), tone())


def test_channels_are_averaged():
    left, right = tone(), tone(hz=660, loudness=0.2)
    np.testing.assert_allclose(made(np.stack((left, right))), (left + right) / 2, atol=1e-7)
    assert np.array_equal(made(tone()[None]), tone())


def test_samples_that_are_read_backwards_become_a_tensor():
    assert torch.equal(torch.from_numpy(made(tone()[::-1])), torch.from_numpy(tone()).flip(0))


@pytest.mark.parametrize("rate_hz", [8000, 16000, 22050, 44100, 48000, 96000])
def test_other_rates_are_resampled(rate_hz):
    """A tone stays the same except at its edges; the length is rounded up."""
    found = made(tone(0.7, rate_hz), rate_hz)
    assert found.dtype == np.float32 and len(found) == -(-round(0.7 * rate_hz) * 24000 // rate_hz)
    np.testing.assert_allclose(found[2000:-2000], tone(0.7)[2000 : len(found) - 2000], atol=2e-3)


@pytest.mark.parametrize(
    ("samples", "rate_hz", "message"),
    [
        (tone(0.049), 24000, r"the reference lasts 0.049 s; from 0.05 to 2 s are possible"),
        (tone(2.01), 24000, r"the reference lasts 2.01 s; from 0.05 to 2 s are possible"),
        (tone(1.5), 8000, r"the reference lasts 4.5 s"),
        (tone()[:0], 24000, r"float32 \[0\]; a float32 array"),
        (tone()[None, :0], 24000, r"lasts 0 s"),
        (tone()[:, None], 24000, r"lasts 4.167e-05 s"),  # samples and channels are swapped
        (
            np.where(np.arange(24000) == 9, np.nan, tone()).astype(np.float32),
            24000,
            r"samples that are not finite",
        ),
        (
            np.where(np.arange(24000) == 9, np.inf, tone()).astype(np.float32),
            24000,
            r"samples that are not finite",
        ),
        (tone(loudness=0.0), 24000, r"the reference is silent: its loudest sample is 0 of full scale"),
        (np.stack((tone(), -tone())), 24000, r"the reference is silent"),  # the channels cancel each other
        (
            tone(loudness=1e30),
            24000,
            r"the reference's loudest sample is 1e\+30 times full scale; up to 2.1e\+09",
        ),
        (
            (tone() * 32767).astype(np.int16),
            24000,
            r"samples are int16 \[24000\]; a float32 array \[N\] or \[channels, N\] is needed",
        ),
        (tone().astype(np.float64), 24000, r"samples are float64 \[24000\]"),
        (tone()[None, None], 24000, r"samples are float32 \[1, 1, 24000\]"),
        (tone().tolist(), 24000, r"samples are list; a float32 array"),
        (tone(), 0, r"rate is 0 Hz; an integer from 8000 to 192000 is possible"),
        (tone(), 200_000, r"rate is 200000 Hz"),
        (tone(), 24000.0, r"rate is 24000.0 Hz; an integer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_audio_that_cannot_be_a_reference_is_refused(samples, rate_hz, message):
    with pytest.raises(ValueError, match=message) as refused:
        made(samples, rate_hz)
    assert refused.value.param == "references"
    with pytest.raises(RequestError, match=message.replace("the reference", "the clip")) as refused:
        mono(AudioClip(samples, rate_hz), 24000, LIMITS_S, "turns")
    assert refused.value.param == "turns" and str(refused.value).startswith("the clip")


def test_clips_of_the_shortest_and_of_the_longest_length_are_accepted():
    assert [len(made(tone(seconds))) for seconds in LIMITS_S] == [1200, 48000]


def test_a_model_that_hears_one_channel_gets_the_first():
    left, right = tone(rate_hz=16000), tone(rate_hz=16000, hz=660)
    for samples in (left, np.stack((left, right))):
        assert np.array_equal(first_channel(AudioClip(samples, 16000), LIMITS_S), left)
    with pytest.raises(RequestError, match=r"the clip lasts 0.05 s; from 0.1"):
        first_channel(AudioClip(left[:800], 16000), (0.1, 2.0), "turns")


def test_a_clip_that_has_a_name_is_not_hashed():
    named = content(AudioClip(tone(), 24000, name=b"morning"))
    assert (
        named == content(AudioClip(tone(hz=660), 24000, name=b"morning")) != content(AudioClip(tone(), 24000))
    )


def test_a_clip_whose_form_is_wrong_has_no_name():
    with pytest.raises(RequestError, match="the clip's samples are list"):
        content(AudioClip(tone().tolist(), 24000), field="turns")


def test_a_clips_name_depends_on_its_content():
    names = {
        content(AudioClip(tone(), 24000)),
        content(AudioClip(tone(), 16000)),
        content(AudioClip(tone(hz=441), 24000)),
        content(AudioClip(tone().reshape(2, -1), 24000)),
        content(AudioClip(tone().reshape(3, -1), 24000)),
        content(AudioClip(tone(), 24000), "something else"),
    }
    assert len(names) == 6
    strided = np.repeat(tone(), 2)[::2]
    assert content(AudioClip(strided, 24000)) == content(AudioClip(tone(), 24000)) in names


# the cache


@dataclass(frozen=True)
class Encoded:
    value: int
    num_bytes: int = 1


def encoder(value: int, num_bytes: int = 1) -> Callable[[], Encoded]:
    return lambda: Encoded(value, num_bytes)


def never() -> Encoded:
    raise AssertionError("it was held, and was encoded again")


def test_a_cached_reference_is_not_encoded_again():
    store: References[Encoded] = References()
    first = store.get(b"a", encoder(1))
    assert store.get(b"a", never) is first and store.get(b"b", encoder(2)).value == 2
    assert store.num_encoded == 2


@dataclass
class File:
    """A file, which is empty unless it has a value. calls: what was called, in order."""

    calls: list[str]
    value: Encoded | None = None
    while_read: Callable[[], object] = lambda: None

    def read(self) -> Encoded | None:
        self.calls.append("read")
        self.while_read()
        return self.value

    def read_recording(self) -> None:
        self.calls.append("read_recording")

    def write(self, value: Encoded) -> None:
        self.calls.append(f"write {value.value}")


def test_a_recording_is_read_before_it_is_encoded_and_its_file_is_written_afterwards():
    store, calls = References[Encoded](), list[str]()
    store.get(b"a", lambda: calls.append("encode") or Encoded(1), File(calls))
    assert calls == ["read", "read_recording", "encode", "write 1"]


def test_a_cached_reference_is_not_read_from_its_file_again():
    store, calls = References[Encoded](), list[str]()
    found = [store.get(b"a", never, File(calls, Encoded(1))) for _ in range(2)]
    assert calls == ["read"] and found[0] is found[1] is store.get(b"a", never)


def test_a_file_that_two_threads_read_counts_once():
    store = References[Encoded](max_bytes=10)
    first = File([], Encoded(1, 5), while_read=lambda: store.get(b"a", never, File([], Encoded(1, 5))))
    store.get(b"a", never, first)
    store.get(b"b", encoder(2, 5))
    assert store.get(b"a", never).value == 1


def test_the_least_recently_used_reference_is_evicted():
    store: References[Encoded] = References(max_bytes=10)
    for name in (b"a", b"b", b"c"):
        store.get(name, encoder(0, 3))
    store.get(b"a", never)
    store.get(b"d", encoder(0, 4))  # would be 13 bytes with b
    for name in (b"a", b"c", b"d"):
        store.get(name, never)
    assert store.get(b"b", encoder(7, 3)).value == 7  # would be 13 bytes with a, the oldest of the loop above
    store.get(b"c", never)
    assert store.get(b"a", encoder(8, 3)).value == 8


def test_a_reference_larger_than_the_cache_is_returned_but_not_kept():
    store: References[Encoded] = References(max_bytes=10)
    assert store.get(b"large", encoder(1, 11)).value == 1
    assert store.get(b"large", encoder(2, 11)).value == 2


def test_an_encoders_error_reaches_the_caller_and_nothing_is_kept():
    store: References[Encoded] = References()

    def fails() -> Encoded:
        raise ValueError("no audio")

    with pytest.raises(ValueError, match="no audio"):
        store.get(b"a", fails)
    assert store.num_encoded == 0 and store.get(b"a", encoder(1)).value == 1


def test_equal_references_that_arrive_together_are_encoded_once():
    """A cached reference is available while another one is encoded."""
    store: References[Encoded] = References()
    store.get(b"held", encoder(0))
    begun, go_on = threading.Event(), threading.Event()
    found: list[Encoded] = []

    def slow() -> Encoded:
        begun.set()
        assert go_on.wait(60)
        return Encoded(1)

    threads = [threading.Thread(target=lambda: found.append(store.get(b"new", slow))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    time.sleep(0.05)  # let the other threads reach the lock
    assert store.get(b"held", never).value == 0
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 and len({id(value) for value in found}) == 1 and store.num_encoded == 2
