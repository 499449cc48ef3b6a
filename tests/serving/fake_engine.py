"""An engine process without a model. It speaks the protocol, and the text of a request decides its answer:

"frames 3"      3 frames of 100 samples, then "stop"
"hold 3"        3 frames, then nothing until cancelled
"queued"        nothing until cancelled
"cold 3"        the model is loaded, which `go` holds up in the middle, then 3 frames and "stop"
"tone 25"       25 frames of 80 ms, 20 ms apart, then "stop"
"flood 40"      40 frames of 1 MiB, then nothing
"write 2"       2 frames with a word after each, then "stop"
"pieces 2"      2 pieces with a frame and a word each, then "stop"
"silent"        no frame, so the error no_audio
"mute"          a word, then the error no_audio
"fail 2"        2 frames, then a failure
"fail 0"        a failure before any audio
"reject PARAM"  a rejection of that field
(blank)         a rejection of the empty text
"full"          a rejection: the engine is full, try again in 7 s
"die"           the connection closes, as when an engine crashes

A request with turns, for ANSWERER, is answered: "talk 3" in the last turn gives 3 frames of 80 ms, 5 ms apart, with a
word before each; a turn with a clip alone is "talk 3". The answer has two tokens for each frame.

A request for a transcript, for TRANSCRIBER, gets "Guten Morgen.", a part at a time.

If a request's text is fed, each word of it gives one frame, and the end of the text ends the request. A fed text that
begins with "long" fails before any audio, because it has no room; one that is not fed is spoken without this word.

As a program (fake_engine.py SOCKET PARENT_FD [refuse|crash]) this is an engine process for the supervisor.
"die" kills the process, "refuse" stands for a model that cannot be loaded, and "crash" for a crash while
loading.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import msgspec
import numpy as np

from serving import protocol
from serving.audio.pcm import pcm16
from serving.exit_with_parent import exit_with_parent

RATE_HZ = 24000
MODEL = protocol.ModelInfo(
    id="fake",
    family="fake",
    variant="custom_voice",
    sample_rate_hz=RATE_HZ,
    frame_rate_hz=12.5,
    max_audio_s=60.0,
    voices=["vivian", "ryan"],
    languages=["english"],
    modes=["voice"],
    options=[
        protocol.OptionInfo(
            "temperature", "float", "how far sampling strays", "a number from 0 to 2", 0.9, (0, 2)
        ),
        protocol.OptionInfo(
            "text_mode",
            "str",
            "how the text is read",
            "full, interleaved",
            "full",
            None,
            ("full", "interleaved"),
        ),
        protocol.OptionInfo(
            "cfg_scale", "float", "how far guidance goes", "a number from 0 to 100", 2.0, (0, 100)
        ),
        protocol.OptionInfo(
            "solver_steps", "int", "steps from noise to a frame", "an integer from 1 to 100", None, (1, 100)
        ),
    ],
    licence="research only",
    piece_s=45.0,
)
FEEDER = msgspec.structs.replace(MODEL, id="feeder", feeds=True, piece_s=None)
SOUND_ONLY = protocol.OptionInfo("x_vector_only_mode", "bool", "take the sound alone", "true or false", False)
CLONER = protocol.ModelInfo(
    "cloner",
    "fake",
    "base",
    RATE_HZ,
    12.5,
    60.0,
    [],
    ["english"],
    ["clone"],
    (1.0, 30.0),
    options=[SOUND_ONLY],
)
ANSWERER = protocol.ModelInfo(
    "answerer", "fake", "chat", RATE_HZ, 12.5, 60.0, [], [], [], options=[], answers=True
)
CALLER = msgspec.structs.replace(
    ANSWERER,
    id="caller",
    voices=["anna", "bert"],
    reference_s=(1.0, 30.0),
    outputs=("speech", "text"),
    takes_tools=True,
)
TRANSCRIBER = protocol.ModelInfo(
    "transcriber",
    "fake",
    "asr",
    RATE_HZ,
    12.5,
    60.0,
    [],
    ["german"],
    [],
    outputs=("speech", "transcript"),
)
READY = protocol.Status("ready", 1.0)
CALL = '<tool_call>function\nadd\n{"a": 1}</tool_call>'  # at the end of answers to "call N" and "only N"; "half N" begins with a part
CALL_TOKENS = [71, 72]
NUMBERS = protocol.ModelStats(
    slots=8,
    running=2,
    waiting=1,
    underruns=5,
    graph_misses=0,
    preparing=4,
    refused=6,
    left_early=3,
    places=7,
    paused=1,
    held=2,
    predicted_turn_s=0.02,
    short_passes=4,
    long_passes=6,
    not_finite=1,
)
STATS = protocol.Stats(
    pages=100,
    pages_free=60,
    pages_shared=7,
    pages_evicted=3,
    compiles_after_warmup=2,
    models={"fake": NUMBERS},
    pauses=4,
    resident_bytes=1 << 30,
    reference_bytes=1 << 20,
)
for seconds in (0.003, 0.01, 0.011, 99.0):
    STATS.turn_times.add(seconds)
for seconds in (0.0, 1.5):
    NUMBERS.queue_times.add(seconds)
TONE_SAMPLES = 1920
NO_AUDIO = "the model ended before its first frame"


def frame(index: int) -> bytes:
    """Return 100 samples whose values identify the frame."""
    return pcm16(np.full(100, (index + 1) / 1000, np.float32))


def transcribe(writer: asyncio.StreamWriter, id: str) -> None:
    usage = {"input_tokens": 7, "input_audio_tokens": 5, "text_tokens": 4}
    for text in (" Gut", "en Morgen."):
        writer.write(protocol.pack(protocol.Text(id, text)))
    writer.write(protocol.pack(protocol.Finished(id, "stop", 0, usage)))


def answered(id: str, reason: str, frames: int, call: list[int]) -> protocol.Finished:
    """Return the end of an answer of a number of frames, each with a text token before it. call: tokens behind them."""
    answer = protocol.Answer([*range(2 * frames), *call], list(range(2, 2 * frames + 1, 2)))
    usage = {"input_tokens": 9, "input_audio_tokens": 4, "text_tokens": frames}
    return protocol.Finished(id, reason, frames, usage, answer=answer)


def tone(index: int) -> bytes:
    """Return 80 ms of a tone that continues from frame to frame."""
    at = np.arange(index * TONE_SAMPLES, (index + 1) * TONE_SAMPLES) / RATE_HZ
    return pcm16((0.5 * np.sin(2 * np.pi * 220 * at)).astype(np.float32))


class FakeEngine:
    """The fake engine. `asked`, `messages`, `cancelled`, `heard` and `fed` record what the HTTP process
    sent. While `go` is cleared, each request stops after its first frame."""

    def __init__(
        self, models: tuple[protocol.ModelInfo, ...] = (MODEL,), status: protocol.Status = READY
    ) -> None:
        self.models = models
        self.status = status
        self.asked: dict[str, dict] = {}
        self.messages: dict[str, protocol.Speak] = {}
        self.cancelled: list[str] = []
        self.heard: dict[str, int] = {}  # frames that clients have read, by request
        self.fed: dict[str, list[str]] = {}  # text fed to a request
        self.talking: dict[str, int] = {}  # frames of the answers under way
        self.interrupted: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.is_awake = True
        self.writers: set[asyncio.StreamWriter] = set()
        self.tasks: set[asyncio.Task] = set()

    async def listen(self, path: str) -> None:
        self.server = await asyncio.start_unix_server(self.connection, path)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        writer.write(protocol.pack(protocol.Models(list(self.models))))
        writer.write(protocol.pack(self.status))
        beating = asyncio.create_task(self.beat(writer))
        self.tasks.add(beating)
        async for message in protocol.read(reader, protocol.to_engine):
            match message:
                case protocol.Speak(id, request=request):
                    self.asked[id] = msgspec.to_builtins(request)
                    self.messages[id] = message
                    if message.turns:
                        if request.output != "transcript":
                            self.talking[id] = 0
                        task = asyncio.create_task(self.talk(writer, message))
                        self.tasks.add(task)
                        continue
                    if request.is_open and request.text.startswith("reject"):
                        await self.speak(writer, id, request.text.split())  # before the rest of its text
                        continue
                    if request.is_open:
                        self.feed(writer, id, request.text, is_last=False)
                        continue
                    task = asyncio.create_task(self.speak(writer, id, request.text.split()))
                    self.tasks.add(task)
                    task.add_done_callback(self.tasks.discard)
                case protocol.Feed(id, text, is_last):
                    self.feed(writer, id, text, is_last)
                case protocol.Cancel(id):
                    self.cancelled.append(id)
                    self.talking.pop(id, None)
                case protocol.Interrupt(id):
                    self.interrupted.append(id)
                    if (frames := self.talking.pop(id, None)) is not None:
                        writer.write(
                            protocol.pack(answered(id, "cancelled", frames + 1, []))
                        )  # one is in flight
                case protocol.Heard(id, frames):
                    self.heard[id] = self.heard.get(id, 0) + frames
        beating.cancel()
        self.writers.discard(writer)
        writer.close()

    async def beat(self, writer: asyncio.StreamWriter) -> None:
        while True:
            if self.is_awake:
                writer.write(protocol.pack(STATS))
            await asyncio.sleep(0.2)

    async def talk(self, writer: asyncio.StreamWriter, message: protocol.Speak) -> None:
        """Answer the last turn, until the request is interrupted or cancelled."""
        if message.request.output == "transcript":
            await self.go.wait()
            return transcribe(writer, message.id)
        id, said = message.id, message.turns[-1].text or "talk 3"
        what, count = said.split()[0], int(said.split()[1])
        if what == "reject":
            del self.talking[id]
            return writer.write(protocol.pack(protocol.Rejected(id, "turns are not possible", "turns")))
        if id not in self.talking:
            return None  # interrupted already
        if what in ("call", "half"):
            writer.write(protocol.pack(protocol.Text(id, "Hm. " if what == "call" else CALL[:30])))
        for index in range(count):
            writer.write(protocol.pack(protocol.Text(id, f"w{index} ")))
            await asyncio.sleep(0.005)
            if id not in self.talking:
                return
            writer.write(protocol.pack(protocol.Audio(id, tone(index), 1)))
            self.talking[id] = index + 1
            await self.go.wait()
        if what in ("call", "only"):
            for text in (CALL[:5], CALL[5:30], CALL[30:]):
                writer.write(protocol.pack(protocol.Text(id, text)))
        if self.talking.pop(id, None) is not None:
            most = message.request.options.get("max_tokens", count)
            end = "length" if count >= most < 3 else "stop"
            writer.write(
                protocol.pack(answered(id, end, count, CALL_TOKENS if what in ("call", "only") else []))
            )

    def feed(self, writer: asyncio.StreamWriter, id: str, text: str, is_last: bool) -> None:
        texts = self.fed.setdefault(id, [])
        if text.startswith("long"):
            writer.write(protocol.pack(protocol.Failed(id, "text has no room", 400, "cannot_continue")))
            return
        before = len("".join(texts).split())
        texts.append(text)
        count = len("".join(texts).split())
        for index in range(before, count):
            writer.write(protocol.pack(protocol.Audio(id, frame(index), 1)))
        if is_last:
            writer.write(protocol.pack(protocol.Finished(id, "stop", count, {"input_tokens": count})))

    async def speak(self, writer: asyncio.StreamWriter, id: str, words: list[str]) -> None:
        def send(message: protocol.Message) -> None:
            writer.write(protocol.pack(message))

        if words[:1] == ["long"]:
            del words[0]
        if not words:
            return send(protocol.Rejected(id, "text is empty", "text"))
        if words[0] == "reject":
            return send(protocol.Rejected(id, f"{words[1]} is not possible", words[1]))
        what, count = words[0], int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        match what:
            case "full":
                return send(protocol.Rejected(id, "256 requests wait already", None, "engine_full", 503, 7.0))
            case "late":
                return send(protocol.Failed(id, "first audio is expected in 30 s", 503, "engine_full", 30.0))
            case "cold":
                send(protocol.Loading(id, protocol.ModelState("loading", 0.0)))
                await self.go.wait()
                send(protocol.Loading(id, protocol.ModelState("warming", 0.4)))
                what = "frames"
            case "die":
                return self.away()
            case "queued":
                return
            case "mute":
                send(protocol.Text(id, "Hm."))
                return send(protocol.Failed(id, NO_AUDIO, 422, "no_audio"))
            case "silent":
                return send(protocol.Failed(id, NO_AUDIO, 422, "no_audio"))
            case "offered":
                return send(protocol.Finished(id, "stop", 0, replicas=words[1:]))
            case "write":
                for index in range(count):
                    send(protocol.Audio(id, frame(index), 1))
                    send(protocol.Text(id, f"größe {index} "))
                return send(
                    protocol.Finished(id, "stop", count, {"input_tokens": 2, "text_tokens": 3 * count})
                )
            case "pieces":
                for index in range(count):
                    send(protocol.Audio(id, frame(index), 1))
                    send(protocol.Text(id, "."))
                    send(protocol.Spoken(id, f"piece {index}", 100 * index, 100 * (index + 1)))
                return send(protocol.Finished(id, "stop", count, {"input_tokens": 2}))
            case "tone":
                for index in range(count):
                    send(protocol.Audio(id, tone(index), 1))
                    await asyncio.sleep(0.02)
                return send(protocol.Finished(id, "stop", count, {"input_tokens": 2}))
        for index in range(count):
            send(protocol.Audio(id, bytes(1 << 20) if what == "flood" else frame(index), 1))
            await self.go.wait()
        match what:
            case "fail":
                send(protocol.Failed(id, "the codec broke"))
            case "frames":
                send(protocol.Finished(id, "stop", count, {"output_frames": count}))

    def tell(self, message: protocol.Message) -> None:
        for writer in self.writers:
            writer.write(protocol.pack(message))

    def away(self) -> None:
        """Close every connection and stop listening."""
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()


async def main(path: str) -> None:
    engine = FakeEngine()
    engine.away = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    await engine.listen(path)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    exit_with_parent(int(sys.argv[2]))
    if "refuse" in sys.argv:
        print("zoo: this directory holds no model", file=sys.stderr)
        sys.exit(2)
    if "crash" in sys.argv:
        sys.exit(70)
    asyncio.run(main(sys.argv[1]))
