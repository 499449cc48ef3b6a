"""The command `zoo chat`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from typer import Argument, Option

from serving.cli.common import Device, DType, app, fail, recording
from serving.cli.flags import with_groups
from serving.cli.request_flags import SAMPLING, ModelOptions
from serving.cli.say import output_format, parsed_option
from zoo.hub import resolved

if TYPE_CHECKING:
    import numpy as np

    from serving.engine.engine import Engine, Event
    from zoo.contract import Family
    from zoo.request import Request, Turn

HOW = "Type a text, or press Enter to speak and Enter again to end; Ctrl+D ends the conversation."
HOW_WITHOUT = "Type a text; Ctrl+D ends the conversation."
IDLE_S = 0.001  # while the engine waits for a prompt


@app.command()
@with_groups
def chat(
    *,
    files: Annotated[
        list[Path],
        Argument(
            metavar="[FILE]...",
            help="These recordings are the user's turns, one after the other. Without files, the turns come from "
            "the microphone and from stdin.",
        ),
    ] = [],  # noqa: B006
    model: Annotated[
        str,
        Option("-m", "--model", help="The model is a directory, or ORG/NAME on the Hugging Face Hub."),
    ],
    out: Annotated[
        Path | None,
        Option(
            "-o",
            "--out",
            help="The answers go into files, which grow while the model speaks: answer.wav stands for answer-1.wav, "
            "answer-2.wav and so on. Default: they are played.",
        ),
    ] = None,
    system: Annotated[str | None, Option(help="The conversation begins with this system prompt.")] = None,
    voice: Annotated[str | None, Option(help="The answers are spoken in this voice of the model.")] = None,
    reference: Annotated[
        Path | None, Option(help="The answers are spoken in the voice of this recording.")
    ] = None,
    seed: Annotated[
        int,
        Option(min=0, max=2**63 - 1, help="Equal seeds give equal answers.", rich_help_panel=SAMPLING),
    ] = 0,
    temperature: Annotated[
        float | None,
        Option(
            min=0,
            max=2,
            help="The model samples with this temperature; 0 is greedy. Default: the model's.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    options: ModelOptions = [],  # noqa: B006
    device: Device = None,
    dtype: DType = None,
) -> int:
    """Talk to a model that listens.

    The model answers in text and speech, which come while the answer is made. Each turn continues the conversation.
    """
    from serving.audio import sound_card

    form = None if out is None else output_format(out)
    recordings = [recording(path) for path in files]
    problem = sound_card.problem()
    if out is None and problem is not None:
        raise ValueError(
            f"the answers cannot be played: {problem}; or write them to files with -o answer.wav"
        )

    spoken_like = None if reference is None else recording(reference)

    import zoo
    from serving.engine.engine import Engine
    from serving.engine.wire import audio_clip

    family = loaded(resolved(model), device, dtype)
    spec = family.spec
    given: dict[str, Any] = {"seed": seed, "temperature": temperature, "voice": voice}
    if spoken_like is not None:
        given["references"] = (zoo.Reference(audio_clip(spoken_like)),)
    given["options"] = dict(parsed_option(option, spec) for option in options)
    talk = Conversation(Engine(family, max_slots=1, compile=False), given, out, form)
    if system is not None:
        talk.turns.append(zoo.Turn("system", system))
    clips = (zoo.Turn("user", clip=audio_clip(clip)) for clip in recordings)
    for turn in clips if files else turns_of_a_user(has_microphone=problem is None):
        talk.answer(turn)
    return 0


def loaded(directory: str, device: str | None, dtype: str | None) -> Family[Any]:
    """Load a model that answers, and print the licence of its weights if it limits their use. Raises ValueError."""
    import zoo

    family = zoo.load(directory, device=device, dtype=dtype)
    if not family.spec.answers:
        name = family.spec.name or family.spec.family
        raise ValueError(f"{name} speaks texts, it does not answer: use zoo say")
    if family.spec.licence:
        print(f"zoo: the licence of the weights limits their use: {family.spec.licence}", file=sys.stderr)
    return family


def turns_of_a_user(*, has_microphone: bool) -> Iterator[Turn]:
    """Yield what a user types or says, until stdin ends."""
    from serving.audio import sound_card
    from zoo.request import AudioClip, Turn

    print(HOW if has_microphone else HOW_WITHOUT, file=sys.stderr)
    for line in sys.stdin:
        if text := line.strip():
            yield Turn("user", text)
        elif has_microphone:
            print("Recording; Enter ends it.", file=sys.stderr)
            samples = sound_card.record(until=sys.stdin.readline)
            yield Turn("user", clip=AudioClip(samples, sound_card.RATE_HZ))


class Sink(Protocol):
    """Takes the audio of an answer while it is made."""

    def write(self, samples: np.ndarray) -> None: ...

    def close(self) -> None: ...


class Growing:
    """A file that grows while an answer is made. In the end its header gets the true length."""

    def __init__(self, path: Path, form: str, rate_hz: int):
        from serving.audio.encode import Encoder

        self.path, self.form, self.rate_hz = path, form, rate_hz
        self.encoder, self.pcm = Encoder(form, rate_hz), bytearray()
        self.file = path.open("wb", buffering=0)

    def write(self, samples: np.ndarray) -> None:
        from serving.audio.pcm import pcm16

        pcm = pcm16(samples)
        self.pcm += pcm
        with self.removed_if_refused():
            self.file.write(self.encoder.feed(pcm))

    def close(self) -> None:
        from serving.audio import encode

        self.file.close()
        with self.removed_if_refused():
            self.path.write_bytes(encode.file(self.form, bytes(self.pcm), self.rate_hz))
        print(f"{self.path}: {len(self.pcm) / 2 / self.rate_hz:.2f} s of audio")

    @contextmanager
    def removed_if_refused(self) -> Iterator[None]:
        """End the command if the system refuses to write the file, such as on a full disk."""
        try:
            yield
        except OSError as error:
            if self.path.is_file():
                self.path.unlink()
            print(flush=True)  # ends the line of the answer's text
            fail(f"{self.path} cannot be written: {error.strerror}", 1)


@dataclass
class Conversation:
    """given: the fields of each request. out: the answers' files, in the format form; None: they are played."""

    engine: Engine
    given: dict[str, Any]
    out: Path | None
    form: str | None
    turns: list[Turn] = field(default_factory=list)
    num_answers: int = 0

    def answer(self, turn: Turn) -> None:
        """Answer a turn, which then belongs to the conversation. Raises ValueError for what the model refuses."""
        import zoo

        self.turns.append(turn)
        answer = self._heard(zoo.Request(text="", turns=tuple(self.turns), **self.given))
        if not answer.text and answer.sink is None:
            fail("the model ended without an answer; another seed may give one", 1)
        if self.engine.family(None).spec.keeps_answers:
            self.turns.append(zoo.Turn("assistant", tokens=answer.tokens))
        else:
            self.turns.append(zoo.Turn("assistant", answer.text))
        print(flush=True)
        if answer.sink is not None:
            answer.sink.close()

    def _heard(self, request: Request) -> Answer:
        """Run the engine until an answer has ended. Raises ValueError for what the model refuses."""
        self.num_answers += 1
        answer = Answer(self._sink)
        self.engine.speak(str(self.num_answers), request, answer.take)
        while not answer.has_ended:
            if not self.engine.turn():
                time.sleep(IDLE_S)
        if answer.failure is not None:
            fail(answer.failure, 1)
        return answer

    def _sink(self) -> Sink:
        from serving.audio import sound_card

        rate_hz = self.engine.family(None).spec.sample_rate_hz
        if self.out is None or self.form is None:
            return sound_card.Player(rate_hz)
        return Growing(self.out.with_stem(f"{self.out.stem}-{self.num_answers}"), self.form, rate_hz)


@dataclass
class Answer:
    """An answer while it is made: its text is printed and its audio goes to a sink as they come."""

    open_sink: Callable[[], Sink]
    sink: Sink | None = None
    text: str = ""
    tokens: tuple[int, ...] = ()
    has_ended: bool = False
    failure: str | None = None

    def take(self, event: Event) -> None:
        from serving.engine import events

        match event:
            case events.Text(text=text):
                self.text += text
                print(text, end="", flush=True)
            case events.Audio(samples=samples) if len(samples):
                if self.sink is None:
                    self.sink = self.open_sink()
                self.sink.write(samples)
            case events.Finished(answer=answer):
                self.tokens, self.has_ended = tuple(answer.tokens), True
            case events.Failed(message=message, code=code):
                self.has_ended = True
                self.failure = None if code == "no_audio" else message
