"""The aligner process and its client, with a tiny random model."""

import asyncio
import os
import signal

import msgspec
import numpy as np
import pytest
from http_server import until
from shell import zoo
from tiny_aligner import write

from serving.aligner import client
from serving.aligner.client import Aligner, AlignerFailed
from serving.aligner.messages import Piece
from zoo.align.ctc import Segment, load

TEXTS = ["The old man told a story.", "It was 7 o'clock.", "Hm."]


def piece(text, num_samples=24000, seed=0):
    samples = np.random.default_rng(seed).integers(-9000, 9000, num_samples).astype("<i2")
    return Piece(samples.tobytes(), 24000, text)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("aligner"))


@pytest.mark.slow
def test_the_process_gives_the_words_that_the_model_gives(directory):
    pieces = [piece(text, 24000 * (i + 1), i) for i, text in enumerate(TEXTS)]
    segments = [Segment(np.frombuffer(each.pcm, "<i2"), 24000, each.text) for each in pieces]
    alone = [load(directory).align([segment])[0] for segment in segments]

    async def asked():
        aligner = Aligner(str(directory))
        try:
            return await asyncio.gather(*map(aligner.align, pieces))
        finally:
            await aligner.close()

    found = asyncio.run(asked())
    for words, expected in zip(found, alone, strict=True):
        facts = [(word.text, word.start, word.stop, word.is_aligned) for word in words]
        assert facts == [(word.text, word.start, word.stop, word.is_aligned) for word in expected]


@pytest.mark.slow
def test_a_process_that_dies_fails_its_pieces_and_is_started_again(directory):
    async def asked():
        aligner = Aligner(str(directory))
        try:
            await aligner.align(piece("One."))
            os.kill(aligner._process.pid, signal.SIGKILL)
            with pytest.raises(AlignerFailed, match="the aligner has ended"):
                await aligner.align(piece("Two."))
            return await aligner.align(piece("Three."))
        finally:
            await aligner.close()

    assert [word.text for word in asyncio.run(asked())] == ["Three."]


@pytest.mark.slow
def test_weights_that_do_not_fit_are_told_once_and_to_all(tmp_path):
    write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")

    async def asked():
        aligner = Aligner(str(tmp_path))
        try:
            found = await asyncio.gather(
                *(aligner.align(piece("A.")) for _ in range(3)), return_exceptions=True
            )
            assert all(isinstance(error, AlignerFailed) for error in found)
            assert aligner.fault == str(found[0]) and "cannot be loaded" in aligner.fault
            with pytest.raises(AlignerFailed, match="cannot be loaded"):
                await aligner.align(piece("B."))
            assert aligner._process is None
        finally:
            await aligner.close()

    asyncio.run(asked())


class Recorded:
    """Stands for the process; it notes the batches."""

    def __init__(self):
        self.batches = []

    async def ask(self, pieces):
        self.batches.append([each.text for each in pieces])
        await asyncio.sleep(0.01)
        return client.Answer([[] for _ in pieces])

    def kill(self):
        pass

    async def wait(self):
        pass


def test_pieces_that_wait_share_a_batch_and_those_given_up_are_left_out(monkeypatch):
    monkeypatch.setattr(client, "MAX_PIECES", 3)

    async def asked():
        aligner = Aligner("none")
        process = aligner._process = Recorded()
        first = asyncio.create_task(aligner.align(piece("0")))
        await asyncio.sleep(0.005)
        waiting = [asyncio.create_task(aligner.align(piece(str(i)))) for i in range(1, 6)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.gather(first, *waiting, return_exceptions=True)
        await aligner.close()
        return process.batches

    assert asyncio.run(asked()) == [["0"], ["1", "3", "4"], ["5"]]


def test_a_batch_has_at_most_two_minutes_of_audio():
    async def asked():
        aligner = Aligner("none")
        process = aligner._process = Recorded()
        await asyncio.gather(*(aligner.align(piece(str(i), 24000 * 50)) for i in range(5)))
        await aligner.close()
        return process.batches

    assert asyncio.run(asked()) == [["0", "1"], ["2", "3"], ["4"]]


def test_a_process_that_gives_no_answer_is_ended(monkeypatch):
    monkeypatch.setattr(client, "MAX_WAIT_S", 0.05)

    class Silent(Recorded):
        is_killed = False

        async def ask(self, pieces):
            await asyncio.sleep(60)

        def kill(self):
            self.is_killed = True

    async def asked():
        aligner = Aligner("none")
        process = aligner._process = Silent()
        with pytest.raises(AlignerFailed, match="gave no answer"):
            await aligner.align(piece("0"))
        await aligner.close()
        return process.is_killed

    assert asyncio.run(asked())


@pytest.mark.slow
def test_the_process_ends_with_the_server(directory):
    async def asked():
        aligner = Aligner(str(directory))
        await aligner.align(piece("One."))
        pid = aligner._process.pid
        aligner._process._writer.close()
        return pid, aligner._process

    async def main():
        pid, process = await asked()
        await asyncio.wait_for(process.wait(), 10)
        return pid

    pid = asyncio.run(main())
    until(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_directory_that_is_no_aligner_stops_the_start(tmp_path):
    done = zoo("serve", "--aligner", tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "config.json cannot be read" in done.stderr and "Wav2Vec2ForCTC" in done.stderr


def test_messages_are_read_back():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(piece("A.")), type=Piece) == piece("A.")
