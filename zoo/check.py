"""Refuse what a model does not take: `check` for a request, `shares` for a mix of voices.

Each RequestError names the field and says what was given and what is possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zoo.contract.spec import Spec
from zoo.request import (
    BLANK,
    SAMPLING,
    SOUND_ONLY,
    Reference,
    Request,
    RequestError,
    Share,
    Turn,
    is_mix,
    parts_of,
)

RANDOM = ("default", "random")  # names of no voice in particular, which may stand next to a reference
MOST_ROLES = 8  # in an error
OF_CLIP = ("transcript", "continuation")  # outputs that are made of a clip alone


def check(request: Request, spec: Spec) -> dict[str, Any]:
    """Return the value of each of the model's options: the request's, or else the default.

    Raises RequestError if the model does not take a field or a value; the message says what it takes.
    """
    name = spec.name or f"{spec.family} {spec.variant}"
    _check_output(request, spec, name)
    is_spoken, is_of_clip = request.output == "speech", request.output in OF_CLIP
    is_turn = spec.answers and bool(request.turns) and request.turns[-1].role in ("user", "tool")
    if not request.text.strip(BLANK) and spec.answers and request.turns and not is_turn:
        role = request.turns[-1].role
        raise RequestError("turns", f"the last turn is by {role}, and {name} answers one by the user")
    if not request.text.strip(BLANK) and not (is_turn or is_of_clip):
        raise RequestError("text", "text is empty")
    if request.normalize and spec.answers:
        raise RequestError("normalize", f"{name} answers a text instead of speaking it: leave out normalize")
    is_mixed = bool(shares(request, spec))
    if is_spoken and not is_mixed:
        _check_voice(request, spec, name)
    _check_language(request, spec, name)
    _check_instructions(request, spec, name)
    if is_spoken and not is_mixed:
        _check_references(request, spec, name)
    if request.turns and not (spec.listens or is_of_clip):
        raise RequestError("turns", f"{name} takes no turns: it does not listen to conversations")
    if request.conversation is not None and not spec.shares_turns:
        raise RequestError("conversation", f"{name} takes no conversation: its requests are independent")
    if request.conversation == "":
        raise RequestError("conversation", "conversation is empty: give it a name, or leave it out")
    if request.stop and not (spec.answers or request.output == "text"):
        raise RequestError("stop", f"{name} takes no stop strings: it speaks the text that it is given")
    if not all(request.stop):
        raise RequestError("stop", "stop has an empty string: give strings of at least one character")
    if any(turn.tokens is not None for turn in request.turns) and not spec.keeps_answers:
        raise RequestError("turns", f"{name} takes earlier answers as text, not as tokens")
    if request.is_open and not spec.feeds:
        raise RequestError("is_open", f"{name} takes no text while it speaks: give all of it at once")
    return _options(request, spec, name)


def _check_output(request: Request, spec: Spec, name: str) -> None:
    if request.output not in spec.outputs:
        possible = _listed(spec.outputs)
        raise RequestError("output", f"{name} cannot give {request.output!r}; possible: {possible}")
    if request.output not in OF_CLIP:
        return
    turns = request.turns
    is_clip = len(turns) == 1 and turns[0].clip is not None and not turns[0].text
    if request.text or not (is_clip or (request.output == "continuation" and not turns)):
        raise RequestError("turns", f"a {request.output} is of one turn with a clip, and nothing else")


def shares(request: Request, spec: Spec) -> tuple[Share, ...]:
    """Return the voices that a request mixes, as in "vivian(2)+ryan(1)", or () without a mix. Raises
    RequestError for a malformed mix and for one that the model cannot make.
    """
    voice = request.voice
    voices = {name.lower(): name for name in spec.voices}
    if voice is None or not is_mix(voice) or voice.lower() in voices:
        return ()
    name = spec.name or f"{spec.family} {spec.variant}"
    if not spec.mixes:
        reason = "it has no speaker vectors to add up; give one voice"
        raise RequestError("voice", f"{name} cannot mix voices, and {voice!r} is a mix: {reason}")
    if request.references:
        _check_clones(spec, name)
    parts = [(part.lower(), weight) for part, weight in parts_of(voice)]
    names = [part for part, _ in parts]
    given = {(reference.name or "").lower(): reference for reference in request.references}
    for part in names:
        if part not in voices and part not in given:
            possible = _listed([*spec.voices, *filter(None, given)]) or "none"
            raise RequestError("voice", f"{name} has no voice {part!r} to mix; it has: {possible}")
    for part, reference in given.items():
        if part not in names:
            raise RequestError(
                "references", "a mix of voices and another reference are both given; leave one out"
            )
        _check_is_sound_alone(part, reference, request, spec)
    total = sum(weight for _, weight in parts)
    return tuple(Share(part, weight / total, given.get(part)) for part, weight in parts)


def _check_is_sound_alone(part: str, reference: Reference, request: Request, spec: Spec) -> None:
    """Raise RequestError for a reference that cannot be mixed: with a transcript, the model reads the
    recording itself."""
    if not (reference.transcript or "").strip(BLANK) or request.options.get(SOUND_ONLY) is True:
        return
    has_option = any(option.name == SOUND_ONLY for option in spec.options)
    instead = f", or set {SOUND_ONLY}" if has_option else ""
    raise RequestError(
        "voice",
        f"voice {part!r} has a transcript, and only the sound of a voice can be mixed: use one without a transcript{instead}",
    )


def _options(request: Request, spec: Spec, name: str) -> dict[str, Any]:
    known = {option.name: option for option in spec.options}
    given = {
        param: value for param in SAMPLING if (value := getattr(request, param)) is not None
    } | request.options
    for param in given:
        if param not in known:
            takes = ", ".join(known) or "no options"
            raise RequestError(param, f"{name} takes no {param}{_hint(spec, param)}; it takes: {takes}")
    defaults = {option.name: option.default for option in spec.options}
    return defaults | {param: known[param].read(value) for param, value in given.items()}


def _check_voice(request: Request, spec: Spec, name: str) -> None:
    voices = {voice.lower() for voice in spec.voices}
    if request.voice is None:
        if len(voices) > 1 and not request.references:
            raise RequestError("voice", f"a voice is needed; {name} has: {_listed(spec.voices)}")
    elif not voices:
        raise RequestError(
            "voice", f"{name} has no voice {request.voice!r}; it has no named voices{_hint(spec, 'voice')}"
        )
    elif request.voice.lower() not in voices:
        raise RequestError(
            "voice",
            f"{name} has no voice {request.voice!r}; it has: {_listed(spec.voices)}{_instead(spec, 'voice')}",
        )


def _check_language(request: Request, spec: Spec, name: str) -> None:
    language = (request.language or "auto").lower()
    if language not in (spec.languages or ("auto",)):
        possible = _listed(spec.languages) if spec.languages else "auto"
        raise RequestError(
            "language",
            f"{name} has no language {request.language!r}; possible: {possible}{_instead(spec, 'language')}",
        )


def _check_instructions(request: Request, spec: Spec, name: str) -> None:
    is_given = bool((request.instructions or "").strip(BLANK))
    if is_given and not {"instruct", "design"} & set(spec.modes):
        raise RequestError("instructions", f"{name} takes no instructions{_hint(spec, 'instructions')}")
    if request.instructions is None and spec.modes == ("design",) and request.output == "speech":
        needed = f"instructions are needed: {name} makes a voice from a description of it"
        raise RequestError("instructions", f"{needed}; with empty ones it chooses the voice")


def _check_references(request: Request, spec: Spec, name: str) -> None:
    num = len(request.references)
    if num:
        _check_clones(spec, name)
        if (request.voice or RANDOM[0]).lower() not in RANDOM:
            raise RequestError(
                "voice", "a voice and a reference are both given, but a request has one voice; leave one out"
            )
    if num > spec.max_references:
        raise RequestError(
            "references", f"{num} references are given; {name} takes up to {spec.max_references}"
        )
    if spec.needs_transcript and not all(
        (given.transcript or "").strip(BLANK) for given in request.references
    ):
        raise RequestError("transcript", f"a transcript is needed: {name} reads the words of each reference")
    if not num and spec.modes == ("clone",):
        needed = f"a reference is needed: {name} clones the voice of a recording"
        raise RequestError("references", f"{needed}{_instead(spec, 'references')}")


def _check_clones(spec: Spec, name: str) -> None:
    if spec.reference_s is None:
        raise RequestError("references", f"{name} takes no reference{_hint(spec, 'references')}")


def _hint(spec: Spec, param: str) -> str:
    return f": {spec.hints[param]}" if param in spec.hints else ""


def _instead(spec: Spec, param: str) -> str:
    """Return the hint behind a list of what is possible."""
    return f"; {spec.hints[param]}" if param in spec.hints else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def roles_of(turns: Sequence[Turn]) -> str:
    """Return the roles of turns for an error, at most MOST_ROLES of them."""
    shown = ", ".join(str(turn.role) for turn in turns[:MOST_ROLES])
    return shown if len(turns) <= MOST_ROLES else f"{shown} and {len(turns) - MOST_ROLES} more"


def check_turn(turn: Turn) -> None:
    """Raise RequestError for a turn that says nothing, or that speaks where only text is read. An answer may be empty:
    the model may have said nothing, or the user interrupted it. So may be a tool's result."""
    has_text = bool((turn.text or "").strip(BLANK))
    if turn.clip is not None and turn.role != "user":
        raise RequestError("turns", f"a turn by {turn.role} has audio; the model reads only its text")
    if turn.tokens is not None and (turn.role != "assistant" or turn.text is not None):
        raise RequestError("turns", f"a turn by {turn.role} has tokens; only answers have, in place of text")
    if not has_text and turn.clip is None and turn.role not in ("assistant", "tool"):
        raise RequestError("turns", f"a turn by {turn.role} has neither text nor audio")
