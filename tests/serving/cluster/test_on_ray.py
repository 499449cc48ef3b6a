"""A server with two replicas on Ray, both on this machine's processors, with the bundled small voice."""

import asyncio
import hashlib
import os
import signal
import time
from pathlib import Path

import aiohttp
import httpx
import pytest
from served import serving

pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.ray]

TEXT = "The old man told the children a story about the sea. "
FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ray")
    options = ("--replicas", "2", "--no-warm", "--max-slots", "4", "--deterministic", "--max-ttfa", "0")
    with serving(directory, *options, key=None) as url:
        yield url


def body(text=TEXT, **fields):
    return {"input": text, "voice": "slt", "response_format": "pcm", "seed": 3, **fields}


class Answer:
    """What a client got. error: the body of a refusal. is_whole: the answer did not break off."""

    def __init__(self):
        self.error = ""
        self.status, self.num_chunks, self.is_whole, self.digest = 0, 0, False, hashlib.sha256()


async def ask(session, url, leave_after=None, **fields):
    """Send a request, and twice more if no replica is ready, as OpenAI's clients do."""
    for _ in range(3):
        answer = await ask_once(session, url, leave_after, **fields)
        if "engine_not_ready" not in answer.error:
            break
        await asyncio.sleep(1)
    return answer


async def ask_once(session, url, leave_after, **fields):
    answer = Answer()
    try:
        async with session.post(f"{url}/v1/audio/speech", json=body(**fields)) as response:
            answer.status = response.status
            if response.status != 200:
                answer.error = await response.text()
                return answer
            async for chunk in response.content.iter_any():
                answer.num_chunks += 1
                answer.digest.update(chunk)
                if answer.num_chunks == leave_after:
                    return answer
            answer.is_whole = True
    except aiohttp.ClientPayloadError:
        pass
    return answer


def together(url, asks):
    """Return the answers of requests that are sent at once."""

    async def scene():
        timeout = aiohttp.ClientTimeout(total=120)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            return await asyncio.gather(*(ask(session, url, **fields) for fields in asks))

    return asyncio.run(scene())


def figures(url, name):
    """Return the values of a metric by replica."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f"{name}{{")]
    return {line.partition('replica="')[2].partition('"')[0]: float(line.split()[-1]) for line in found}


def until(fact, seconds=60.0):
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, f"still false after {seconds} s"
        time.sleep(0.2)


def settled(url, name):
    """Return the values of a metric by replica, once all have come: replicas report once a second."""
    found, since = figures(url, name), time.monotonic()
    while time.monotonic() - since < 2.5:
        time.sleep(0.2)
        if (now := figures(url, name)) != found:
            found, since = now, time.monotonic()
    return found


def engines_and_replicas():
    """Return the engine processes below this one, and the replicas, which are their parents."""
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"serving.engine.engine_process" in line and is_below(pid, os.getpid()):
            found[pid] = parent_of(pid)
    return found


def parent_of(pid):
    """Return the parent's process ID; 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def is_below(pid, ancestor):
    while pid not in (0, ancestor):
        pid = parent_of(pid)
    return pid == ancestor


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_streams(url, form):
    [answer] = together(url, [{"response_format": form}])
    assert answer.status == 200, answer.error
    assert answer.is_whole and answer.num_chunks > 2


def test_both_replicas_speak_and_equal_seeds_give_equal_bytes(url):
    before = settled(url, "zoo_requests_admitted_total")
    answers = together(url, [{}] * 8)
    assert len({answer.digest.hexdigest() for answer in answers}) == 1
    assert all(answer.status == 200 and answer.is_whole for answer in answers)
    after = settled(url, "zoo_requests_admitted_total")
    assert sum(after.values()) == sum(before.values()) + 8
    assert len(after) == 2 and all(after[name] > before[name] for name in after)


def test_text_goes_in_while_speech_comes_out(url):
    async def scene():
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{url}/v1/audio/speech/stream") as socket,
        ):
            await socket.send_json({"type": "session.config", "voice": "slt"})
            for word in TEXT.split():
                await socket.send_json({"type": "input.text", "text": f"{word} "})
            await socket.send_json({"type": "input.done"})
            num_bytes = 0
            async for message in socket:
                if message.type == aiohttp.WSMsgType.BINARY:
                    num_bytes += len(message.data)
                elif message.json()["type"] in ("audio.done", "error"):
                    return message.json()["type"], num_bytes

    kind, num_bytes = asyncio.run(asyncio.wait_for(scene(), 60))
    assert kind == "audio.done" and num_bytes > 48_000


def test_the_other_routes_are_those_of_one_server(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["small_voice"]
        batch = {"items": [{"input": "Yes."}, {"input": ""}], "voice": "slt"}
        results = client.post("/v1/audio/speech/batch", json=batch).json()["data"]
        assert [result["error"] is None for result in results] == [True, False]
        assert client.get("/", headers={"accept": "text/html"}).text.startswith("<!doctype html>")
        assert client.get("/v1/audio/voices").status_code == 200
        assert client.post("/v1/audio/speech", json=body(voice="nobody")).status_code in (400, 404)


def test_clients_that_leave_free_their_slots(url):
    answers = together(url, [{"text": TEXT * 10, "leave_after": 2, "seed": i} for i in range(6)])
    assert all(answer.status == 200 for answer in answers)
    for name in ("zoo_requests_running", "zoo_requests_waiting", "zoo_requests_preparing"):
        until(lambda name=name: set(figures(url, name).values()) == {0.0})


@pytest.mark.parametrize("what", ["replica", "engine"])
def test_a_killed_replica_costs_only_the_streams_that_it_held(url, what):
    """Requests that were not heard are answered by the other one; then there are two again."""

    async def scene():
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            tasks = [asyncio.create_task(ask(session, url)) for _ in range(10)]
            await asyncio.sleep(0.5)
            engine, replica = min(engines_and_replicas().items())
            os.kill(replica if what == "replica" else engine, signal.SIGKILL)
            return await asyncio.gather(*tasks)

    [expected] = together(url, [{}])
    answers = asyncio.run(scene())
    assert [answer.status for answer in answers] == [200] * 10
    whole = [answer for answer in answers if answer.is_whole]
    assert len(whole) >= 6  # a replica holds at most four streams
    assert {answer.digest.hexdigest() for answer in whole} == {expected.digest.hexdigest()}
    until(lambda: len(figures(url, "zoo_pages")) == 2, 120)
    assert len(engines_and_replicas()) == 2
    assert all(answer.is_whole for answer in together(url, [{}] * 2))
