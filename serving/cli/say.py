"""The command `zoo say`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from serving.cli.common import (
    Device,
    DType,
    SpeechModel,
    Weights,
    app,
    check_writable,
    fail,
    plural,
    recording,
)
from serving.cli.flags import with_groups
from serving.cli.request_flags import Loudness, ModelOptions, Pronunciations, RequestFlags, TextFormat
from serving.cli.subtitle_flags import SubtitleFlags
from zoo import SMALL_VOICE
from zoo.hub import resolved
from zoo.text.pronunciations import Lexicon, Pronunciation, read_file

if TYPE_CHECKING:
    from zoo.contract import Family, Spec, Speech
    from zoo.request import Request, Value

FORMAT_OF = {
    ".wav": "wav",
    ".mp3": "mp3",
    ".opus": "opus",
    ".ogg": "opus",
    ".webm": "webm",
    ".aac": "aac",
    ".m4a": "m4a",
    ".flac": "flac",
    ".pcm": "pcm",
    ".ulaw": "ulaw",
    ".alaw": "alaw",
}
# The flag that sets a field of zoo.request.Request.
FLAG = {
    "references": "--reference",
    "transcript": "--reference-text",
    "max_frames": "--max-new-tokens",
}

Normalize = Annotated[
    bool,
    Option(
        "--normalize",
        help="Numbers, dates and amounts are put into words first, in Chinese, English or Japanese.",
    ),
]


@app.command()
@with_groups
def say(
    *,
    text: Annotated[str, Argument(help="The model speaks this text; - reads it from stdin.")],
    model: SpeechModel = str(SMALL_VOICE),
    out: Annotated[
        Path,
        Option(
            "-o",
            "--out",
            help="The speech goes into this file; its suffix chooses the format: .wav, .mp3, .opus, .ogg, "
            ".webm, .aac, .m4a, .flac, .pcm, .ulaw or .alaw.",
        ),
    ] = Path("out.wav"),
    asked: RequestFlags,
    split_text: Annotated[
        bool,
        Option(help="A text that is too long for one pass is cut into pieces at sentences and clauses."),
    ] = True,
    normalize: Normalize = False,
    text_format: TextFormat = "plain",
    loudness: Loudness = None,
    pronunciations: Pronunciations = None,
    subtitles: SubtitleFlags,
    options: ModelOptions = [],  # noqa: B006
    device: Device = None,
    dtype: DType = None,
    weights: Weights = "published",
) -> int:
    """Speak a text into a file."""
    form = output_format(out)
    asked.check()
    subtitles.check()
    text = text_to_say(text, text_format)
    words = [] if pronunciations is None else read_file(pronunciations)
    directory = resolved(model)
    references = [] if asked.reference is None else [recording(asked.reference)]

    import zoo
    from serving.engine.wire import reference_of
    from serving.protocol import Reference

    family = loaded(directory, device, dtype, weights)
    request = zoo.Request(
        text=with_words(text, words, asked, family.spec),
        voice=asked.voice,
        language=asked.language,
        instructions=asked.instructions,
        references=tuple(reference_of(Reference(clip, asked.reference_text)) for clip in references),
        seed=asked.seed,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        repetition_penalty=asked.repetition_penalty,
        max_frames=asked.max_new_tokens,
        split_text=split_text,
        normalize=normalize,
        sentence_gap_s=asked.sentence_gap_s,
        options=dict(parsed_option(option, family.spec) for option in options),
    )
    speech = speak_into(out, form, family, request, asked.speed, loudness)
    subtitles.write(speech, request.text, asked.speed)
    return 0


def with_words(text: str, words: list[Pronunciation], asked: RequestFlags, spec: Spec) -> str:
    """Return a text with its terms replaced by how they are spoken."""
    first = None if asked.reference is not None else next(iter(spec.voices), None)
    lexicon = Lexicon.of(words, (), asked.language, asked.voice or first)
    return text if lexicon is None else lexicon.said(text)


def loaded(directory: str, device: str | None, dtype: str | None, weights: str) -> Family[Any]:
    """Load a model, and print the licence of its weights if it limits their use. Raises ValueError."""
    import zoo
    from compile_cache import threads
    from serving.engine.device.prepare_for_host import prepare_for_host

    is_rounded = weights != "published"
    family = zoo.load(directory, device=device, dtype=dtype, keeps_bf16=is_rounded)
    if is_rounded:
        prepare_for_host(family, weights=weights)
    else:
        threads.set_num_threads(family, is_compiled=False)
    if family.spec.licence:
        print(f"zoo: the licence of the weights limits their use: {family.spec.licence}", file=sys.stderr)
    return family


def speak_into(
    out: Path, form: str, family: Family[Any], request: Request, speed: float, loudness: float | None
) -> Speech:
    """Speak into a file, and print how long it took. Return the speech at its own speed. Raises ValueError for
    what the model refuses."""
    import zoo
    from serving.audio import encode
    from serving.audio.pcm import pcm16
    from serving.engine.job import NO_AUDIO
    from serving.replacing import replacing

    began_s = time.perf_counter()
    try:
        speech = zoo.generate(family, request)
    except zoo.RequestError as error:
        raise ValueError(f"{FLAG[error.param]}: {error}" if error.param in FLAG else str(error)) from None
    took_s = time.perf_counter() - began_s
    if not len(speech.samples):
        fail(NO_AUDIO, 1)
    pcm = pcm16(speech.samples.numpy())
    try:
        with replacing(out) as part:
            part.write_bytes(encode.file(form, pcm, speech.sample_rate_hz, speed=speed, loudness=loudness))
    except OSError as error:
        fail(f"{out} cannot be written: {error.strerror}", 1)
    audio_s = len(speech.samples) / speech.sample_rate_hz / speed
    frames = f"{plural(len(speech.frames), 'frame')}, {audio_s:.2f} s of audio"
    print(f"{out}: {frames} in {took_s:.2f} s, RTF {took_s / audio_s:.2f}")
    if speech.text:
        print(speech.text)
    return speech


def output_format(out: Path) -> str:
    """Return the format that a file's suffix names. Raises ValueError if it is unknown or not writable."""
    if (form := FORMAT_OF.get(out.suffix.lower())) is None:
        raise ValueError(f"{out} must end in one of: {', '.join(FORMAT_OF)}")
    check_writable(out)
    return form


def text_to_say(text: str, text_format: str = "plain") -> str:
    """Return the text, read from stdin if it is `-`. Raises ValueError for a text with nothing to say."""
    from zoo.request import BLANK
    from zoo.text.markdown import spoken

    try:
        if text == "-":
            text = sys.stdin.read()
        text.encode()  # in an argument, bytes that are not UTF-8 become half characters
    except UnicodeError:
        raise ValueError("the text is not in UTF-8") from None
    if text_format == "markdown":
        text = spoken(text)
    if not text.strip(BLANK):
        raise ValueError("there is no text to speak")
    return text


def parsed_option(given: str, spec: Spec) -> tuple[str, Value]:
    """Split NAME=VALUE and parse the value as the model's option. Raises ValueError."""
    from zoo.request import SAMPLING

    name, equals, value = given.partition("=")
    if not equals:
        raise ValueError(f"--option {given!r} must be NAME=VALUE")
    if name in SAMPLING:
        raise ValueError(
            f"{name} has its own flag: --{name.replace('_', '-')} {value}, if the command takes it"
        )
    known = {option.name: option for option in spec.options if option.name not in SAMPLING}
    if name not in known:
        raise ValueError(f"{spec.family} has no option {name!r}; possible: {', '.join(known) or 'none'}")
    return name, known[name].parse(value)
