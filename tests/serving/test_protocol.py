"""Messages of the protocol survive the socket, and invalid bytes are refused."""

import asyncio
import dataclasses

import msgspec
import pytest

from serving import protocol
from zoo.request import Request

CLIP = protocol.AudioClip(bytes(range(256)) * 4, 16000)
OPTION = protocol.OptionInfo(
    "text_mode", "str", "help", "full, interleaved", "full", None, ("full", "interleaved")
)
TO_ENGINE = [
    protocol.Speak("a", "m", protocol.Request("héllo", seed=2**63 - 1, temperature=0.5)),
    protocol.Speak(
        "b",
        "m",
        protocol.Request("x", options={"a": True, "b": 1, "c": 0.5, "d": "e"}),
        [protocol.Reference(CLIP, "y", "z")],
        protocol.Listener(
            2.0, is_flexible=True, is_reproducible=True, is_metered=True, wants_timestamps=True
        ),
    ),
    protocol.Cancel("a"),
]
TO_HTTP = [
    protocol.Status("warming", 0.25, "step, 4 slots"),
    protocol.Models(
        [
            protocol.ModelInfo(
                "m", "qwen3_tts", "custom_voice", 24000, 12.5, 655.4, ["vivian"], ["english"], ["voice"]
            )
        ]
    ),
    protocol.Models(
        [
            protocol.ModelInfo(
                "m", "toy", "base", 24000, 12.5, 655.4, [], [], ["clone"], (0.5, 30.0), 16, [OPTION], "x"
            )
        ]
    ),
    protocol.Stats(
        100, 60, 7, 3, 0, {"m": protocol.ModelStats(8, 2, 1, 5, 0), "n": protocol.ModelStats(8, 0, 0, 0, 1)}
    ),
    protocol.Rejected("a", "no", "voice", "c", 503, 1.5),
    protocol.Audio("a", bytes(range(256)) * 300, 25),
    protocol.Text("a", "größer 天"),
    protocol.Spoken("a", "größer 天", 0, 1 << 40),
    protocol.Finished("a", "length", 7, {"output_frames": 7}),
    protocol.Failed("a", "broke"),
    protocol.Failed("a", "mute", 422, "no_audio"),
]


def read(data: bytes, decoder: msgspec.msgpack.Decoder) -> list:
    async def collect() -> list:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return [message async for message in protocol.read(reader, decoder)]

    return asyncio.run(collect())


@pytest.mark.parametrize(
    ("messages", "decoder"), [(TO_ENGINE, protocol.to_engine), (TO_HTTP, protocol.to_http)]
)
def test_messages_are_received_as_they_were_sent(messages, decoder):
    assert read(b"".join(map(protocol.pack, messages)), decoder) == messages


def test_an_incomplete_message_ends_the_stream_after_the_complete_ones():
    data = protocol.pack(protocol.Cancel("a")) + protocol.pack(protocol.Cancel("b"))[:-1]
    assert read(data, protocol.to_engine) == [protocol.Cancel("a")]


def test_a_message_of_the_other_direction_is_refused():
    with pytest.raises(protocol.ProtocolError, match="not a valid message"):
        read(protocol.pack(protocol.Failed("a", "broke")), protocol.to_engine)


@pytest.mark.parametrize(
    "body", [b"\xc1", b"", b"GET / HTTP/1.1", msgspec.msgpack.encode({"type": "Cancel"})]
)
def test_invalid_bytes_are_refused(body):
    with pytest.raises(protocol.ProtocolError, match="not a valid message"):
        read(len(body).to_bytes(4, "big") + body, protocol.to_engine)


def test_a_message_over_the_limit_is_refused_before_it_is_read():
    with pytest.raises(protocol.ProtocolError, match="limit"):
        read((protocol.MAX_FRAME_BYTES + 1).to_bytes(4, "big"), protocol.to_engine)
    with pytest.raises(AssertionError, match="limit"):
        protocol.pack(protocol.Audio("a", bytes(protocol.MAX_FRAME_BYTES), 1))


def test_a_request_in_transit_has_the_fields_and_the_defaults_of_a_request():
    without = {"references", "turns"}  # references travel next to it, and HTTP has no turns
    sent = msgspec.structs.asdict(protocol.Request("Hello."))
    plain = Request(text="Hello.")
    names = [field.name for field in dataclasses.fields(Request) if field.name not in without]
    assert sent == {name: getattr(plain, name) for name in names}
