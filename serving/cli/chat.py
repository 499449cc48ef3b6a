"""The command `zoo chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from serving.cli.common import Device, DType, app, fail, recording
from serving.cli.flags import with_groups
from serving.cli.request_flags import SAMPLING, ModelOptions
from serving.cli.say import output_format, parsed_option
from zoo.hub import resolved

if TYPE_CHECKING:
    from zoo.contract import Family, Speech
    from zoo.request import Turn

HOW = "Type a text, or press Enter to speak and Enter again to end; Ctrl+D ends the conversation."
HOW_WITHOUT = "Type a text; Ctrl+D ends the conversation."


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
            help="The answers go into files: answer.wav stands for answer-1.wav, answer-2.wav and so on. Default: "
            "they are played.",
        ),
    ] = None,
    system: Annotated[str | None, Option(help="The conversation begins with this system prompt.")] = None,
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

    The model answers in text and speech, and each turn continues the conversation.
    """
    from serving.audio import sound_card

    form = None if out is None else output_format(out)
    recordings = [recording(path) for path in files]
    problem = sound_card.problem()
    if out is None and problem is not None:
        raise ValueError(
            f"the answers cannot be played: {problem}; or write them to files with -o answer.wav"
        )

    import zoo
    from serving.engine.wire import audio_clip

    family = zoo.load(resolved(model), device=device, dtype=dtype)
    spec = family.spec
    name = spec.name or spec.family
    if not spec.answers:
        raise ValueError(f"{name} speaks texts, it does not answer: use zoo say")
    if spec.licence:
        print(f"zoo: the licence of the weights limits their use: {spec.licence}", file=sys.stderr)
    given: dict[str, Any] = {"seed": seed, "temperature": temperature}
    given["options"] = dict(parsed_option(option, spec) for option in options)
    talk = Conversation(family, given, out, form)
    if system is not None:
        talk.turns.append(zoo.Turn("system", system))
    clips = (zoo.Turn("user", clip=audio_clip(clip)) for clip in recordings)
    for turn in clips if files else turns_of_a_user(has_microphone=problem is None):
        talk.answer(turn)
    return 0


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


@dataclass
class Conversation:
    """given: the fields of each request. out: the answers' files, in the format form; None: they are played."""

    family: Family[Any]
    given: dict[str, Any]
    out: Path | None
    form: str | None
    turns: list[Turn] = field(default_factory=list)
    num_answers: int = 0

    def answer(self, turn: Turn) -> None:
        """Answer a turn, which then belongs to the conversation. Raises ValueError for what the model refuses."""
        import zoo

        self.turns.append(turn)
        speech = zoo.generate(self.family, zoo.Request(text="", turns=tuple(self.turns), **self.given))
        if not speech.text and not len(speech.samples):
            fail("the model ended without an answer; another seed may give one", 1)
        self.turns.append(self._as_turn(speech))
        self.num_answers += 1
        print(speech.text, flush=True)
        if len(speech.samples):
            self._give(speech)

    def _as_turn(self, speech: Speech) -> Turn:
        import zoo

        if self.family.spec.keeps_answers:
            return zoo.Turn("assistant", tokens=speech.tokens)
        return zoo.Turn("assistant", speech.text)

    def _give(self, speech: Speech) -> None:
        from serving.audio import encode, sound_card
        from serving.audio.pcm import pcm16

        samples = speech.samples.numpy()
        if self.out is None or self.form is None:
            return sound_card.play(samples, speech.sample_rate_hz)
        path = self.out.with_stem(f"{self.out.stem}-{self.num_answers}")
        path.write_bytes(encode.file(self.form, pcm16(samples), speech.sample_rate_hz))
        print(f"{path}: {len(samples) / speech.sample_rate_hz:.2f} s of audio")
