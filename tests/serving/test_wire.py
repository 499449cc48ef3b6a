"""The wire: every message comes back as it went, and what is no message is refused."""

import asyncio

import msgspec
import pytest

from serving import wire

TO_ENGINE = [
    wire.Speak("a", "m", {"text": "héllo", "seed": 2**63 - 1, "temperature": 0.5}),
    wire.Speak("b", "m", {"text": "x", "reference_text": "y"}, wire.Clip(bytes(range(256)) * 4, 16000)),
    wire.Cancel("a"),
]
TO_HTTP = [
    wire.Status("warming", 0.25, "step, 4 slots"),
    wire.Models([wire.ModelInfo("m", "qwen3_tts", "custom_voice", 24000, 12.5, 655.4, ["vivian"], ["english"], ["voice"])]),
    wire.Models([wire.ModelInfo("m", "toy", "base", 24000, 12.5, 655.4, [], [], ["clone"], (0.5, 30.0))]),
    wire.Stats(100, 60, 7, 3, 0, {"m": wire.ModelStats(8, 2, 1, 5, 0), "n": wire.ModelStats(8, 0, 0, 0, 1)}),
    wire.Rejected("a", "no", "voice", "c", 503, 1.5),
    wire.Audio("a", bytes(range(256)) * 300, 25),
    wire.Text("a", "größer 天"),
    wire.Finished("a", "length", 7, {"output_frames": 7}),
    wire.Failed("a", "broke"),
]


def read(data: bytes, decoder: msgspec.msgpack.Decoder) -> list:
    async def collect() -> list:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return [message async for message in wire.read(reader, decoder)]

    return asyncio.run(collect())


@pytest.mark.parametrize(("messages", "decoder"), [(TO_ENGINE, wire.to_engine), (TO_HTTP, wire.to_http)])
def test_messages_come_back_as_they_went(messages, decoder):
    assert read(b"".join(map(wire.pack, messages)), decoder) == messages


def test_a_cut_message_ends_the_stream_after_the_whole_ones():
    data = wire.pack(wire.Cancel("a")) + wire.pack(wire.Cancel("b"))[:-1]
    assert read(data, wire.to_engine) == [wire.Cancel("a")]


def test_a_message_of_the_other_direction_is_refused():
    with pytest.raises(wire.WireError, match="no message"):
        read(wire.pack(wire.Failed("a", "broke")), wire.to_engine)


@pytest.mark.parametrize("body", [b"\xc1", b"", b"GET / HTTP/1.1", msgspec.msgpack.encode({"type": "Cancel"})])
def test_bytes_that_are_no_message_are_refused(body):
    with pytest.raises(wire.WireError, match="no message"):
        read(len(body).to_bytes(4, "big") + body, wire.to_engine)


def test_a_frame_over_the_limit_is_refused_before_it_is_read():
    with pytest.raises(wire.WireError, match="limit"):
        read((wire.MAX_FRAME_BYTES + 1).to_bytes(4, "big"), wire.to_engine)
    with pytest.raises(AssertionError, match="limit"):
        wire.pack(wire.Audio("a", bytes(wire.MAX_FRAME_BYTES), 1))
