"""The same seed gives the same bytes through all of `zoo serve`, alone and next to other requests."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from served import connected, serving

pytestmark = pytest.mark.slow
FORMATS = ["mp3", "opus", "aac", "flac", "wav", "pcm"]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with (
        serving(tmp_path_factory.mktemp("served"), "--no-warm", demo="tiny") as url,
        connected(url) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def deterministic(tmp_path_factory):
    with (
        serving(tmp_path_factory.mktemp("served"), "--no-warm", "--deterministic", demo="tiny") as url,
        connected(url) as client,
    ):
        yield client


def speak(client, seed=1, num_frames=12, name="pcm", **extra):
    extra = {"seed": seed, "max_new_tokens": num_frames, "repetition_penalty": 1.05, **extra}
    fields = {"model": "demo", "voice": "vivian", "input": "Good morning, everybody."}
    return client.audio.speech.create(response_format=name, extra_body=extra, **fields).content


@contextmanager
def others(client, num=3):
    """Keep `num` requests with other seeds running within the `with` block."""
    is_over = threading.Event()

    def speak_on(seed):
        count = 0
        while not is_over.is_set():
            speak(client, seed + 100 * count, num_frames=20)
            count += 1
        return count

    with ThreadPoolExecutor(num) as pool:
        speaking = [pool.submit(speak_on, seed) for seed in range(2, 2 + num)]
        yield
        is_over.set()
        assert all(future.result() for future in speaking)


@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_file_is_the_same_under_load(client, name):
    alone = {speak(client, name=name, stream=False) for _ in range(4)}
    with others(client):
        beside = {speak(client, name=name, stream=False) for _ in range(4)}
    assert len(alone | beside) == 1
    assert speak(client, seed=7, name=name, stream=False) not in alone


@pytest.mark.parametrize("name", FORMATS)
def test_a_deterministic_server_streams_the_same_bytes(deterministic, name):
    alone = {speak(deterministic, name=name) for _ in range(4)}
    with others(deterministic):
        beside = {speak(deterministic, name=name) for _ in range(4)}
    assert len(alone | beside) == 1
    assert speak(deterministic, seed=7, name=name) not in alone
