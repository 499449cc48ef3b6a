"""Requests: the values of options, and `check`, which refuses everything that a model does not take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy import Toy

from zoo.check import check
from zoo.contract.family import understood
from zoo.request import AudioClip, Option, Reference, Request, RequestError, Turn, sampling_options

SCALE = Option("scale", float, "how far", 2.0, (0, 10))
STEPS = Option("steps", int, "how many", 4, (1, 9))
FAST = Option("fast", bool, "whether", False)
MODE = Option("mode", str, "which", "full", choices=("full", "interleaved"))
STYLE = Option("style", str, "any words")
GAIN = Option("gain", float, "any number")
OPTIONS = (SCALE, STEPS, FAST, MODE, STYLE, GAIN)
REFERENCE = Reference(AudioClip(np.zeros(8, np.float32), 8000))

PLAIN = replace(Toy().spec, name="Hum 1", options=(*sampling_options(0.9, 50, 1.0), *OPTIONS))
VOICES = replace(PLAIN, voices=("Anna", "bert"), languages=("auto", "english"), modes=("voice",))
CLONES = replace(PLAIN, modes=("clone",), reference_s=(0.1, 9.0), hints={"voice": "give a reference"})
DESIGNS = replace(PLAIN, modes=("design",))


def refused(param: str, message: str, **fields: Any) -> None:
    spec = fields.pop("spec", PLAIN)
    with pytest.raises(RequestError, match=message) as error:
        check(Request(**{"text": "a"} | fields), spec)
    assert error.value.param == param and "\n" not in str(error.value)


# an option


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        (SCALE, 3, 3.0),  # integers are numbers too
        (SCALE, 0.0, 0.0),
        (SCALE, 10.0, 10.0),
        (STEPS, 1, 1),
        (FAST, True, True),
        (MODE, "interleaved", "interleaved"),
        (STYLE, "slowly", "slowly"),
        (GAIN, -1e9, -1e9),
    ],
)
def test_a_possible_value_is_converted_to_the_options_type(option, value, expected):
    found = option.read(value)
    assert found == expected and type(found) is option.type


@pytest.mark.parametrize(
    ("option", "value", "possible"),
    [
        (SCALE, 10.1, "a number from 0 to 10"),
        (SCALE, -0.1, "a number from 0 to 10"),
        (SCALE, float("nan"), "a number from 0 to 10"),
        (SCALE, float("inf"), "a number from 0 to 10"),
        (SCALE, True, "a number from 0 to 10"),
        (SCALE, "2", "a number from 0 to 10"),
        (GAIN, float("nan"), "a number"),
        (GAIN, float("-inf"), "a number"),
        (GAIN, 10**400, "a number"),  # larger than any float
        (SCALE, 10**400, "a number from 0 to 10"),
        (STEPS, 0, "an integer from 1 to 9"),
        (STEPS, 10, "an integer from 1 to 9"),
        (STEPS, 2.0, "an integer from 1 to 9"),
        (STEPS, True, "an integer from 1 to 9"),
        (FAST, 1, "true or false"),
        (FAST, "true", "true or false"),
        (FAST, None, "true or false"),
        (MODE, "Full", "full, interleaved"),
        (MODE, ["full"], "full, interleaved"),
        (STYLE, 3, "a string"),
    ],
)
def test_an_impossible_value_is_refused_with_the_possible_ones(option, value, possible):
    with pytest.raises(RequestError) as error:
        option.read(value)
    assert str(error.value) == f"{option.name} is {value!r}; possible: {possible}"
    assert error.value.param == option.name


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        (SCALE, "2.5", 2.5),
        (SCALE, "3", 3.0),
        (STEPS, "3", 3),
        (FAST, "true", True),
        (FAST, "false", False),
        (MODE, "full", "full"),
        (STYLE, "3", "3"),
    ],
)
def test_a_command_line_value_is_parsed(option, text, expected):
    found = option.parse(text)
    assert found == expected and type(found) is option.type


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (SCALE, "nan"),
        (SCALE, "11"),
        (SCALE, "much"),
        (SCALE, ""),
        (STEPS, "2.0"),
        (STEPS, "10"),
        (FAST, "yes"),
        (FAST, "False"),
        (MODE, ""),
    ],
)
def test_a_wrong_command_line_value_is_refused(option, text):
    with pytest.raises(RequestError) as error:
        option.parse(text)
    assert str(error.value) == f"{option.name} is {text!r}; possible: {option.possible}"
    assert error.value.param == option.name


# requests, for any model


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 2**63), ("seed", -(2**63)), ("max_frames", 0), ("max_frames", 2**31 + 1)]
)
def test_numbers_out_of_range_for_every_model_are_refused(name, value):
    with pytest.raises(RequestError, match=f"^{name} is {value}; from ") as error:
        Request(text="a", **{name: value})
    assert error.value.param == name


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "repetition_penalty"])
def test_a_sampling_field_cannot_be_an_option(name):
    with pytest.raises(RequestError, match="is a field of the request") as error:
        Request(text="a", options={name: 1})
    assert error.value.param == name


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("text", {"text": "a \ud83d b"}),
        ("instructions", {"text": "a", "instructions": "\udfff"}),
        (
            "references",
            {"text": "a", "references": (Reference(AudioClip(np.zeros(8, np.float32), 8000), "\ud800"),)},
        ),
        ("turns", {"text": "a", "turns": (Turn("user", "\ud800"),)}),
        ("stop", {"text": "a", "stop": ("\ud800",)}),
    ],
)
def test_half_of_a_character_is_refused(name, fields):
    with pytest.raises(RequestError, match="half of a character") as error:
        Request(**fields)
    assert error.value.param == name


# requests, for one model


def test_defaults_are_the_models():
    defaults = {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 1.0,
        "scale": 2.0,
        "steps": 4,
        "fast": False,
        "mode": "full",
    }
    assert check(Request(text="a"), PLAIN) == defaults | {"style": None, "gain": None}


def test_given_values_replace_the_defaults():
    asked = Request(text="a", temperature=0, top_k=7, options={"scale": 3, "mode": "interleaved"})
    found = check(asked, PLAIN)
    assert (found["temperature"], found["top_k"], found["scale"], found["mode"]) == (
        0.0,
        7,
        3.0,
        "interleaved",
    )
    assert (found["top_p"], found["steps"]) == (1.0, 4)


def test_an_unknown_option_is_refused_with_the_known_ones():
    takes = "temperature, top_k, top_p, scale, steps, fast, mode, style, gain"
    refused("cfg_scale", f"^Hum 1 takes no cfg_scale; it takes: {takes}$", options={"cfg_scale": 2.0})
    refused(
        "repetition_penalty",
        f"^Hum 1 takes no repetition_penalty; it takes: {takes}$",
        repetition_penalty=1.1,
    )
    refused(
        "temperature",
        "^Hum 1 takes no temperature; it takes: no options$",
        temperature=0.0,
        spec=replace(PLAIN, options=()),
    )
    hinted = replace(PLAIN, hints={"cfg_scale": "it has one lane"})
    refused(
        "cfg_scale",
        "takes no cfg_scale: it has one lane; it takes: ",
        options={"cfg_scale": 2.0},
        spec=hinted,
    )


def test_an_impossible_value_is_refused_by_the_options_name():
    refused("steps", "^steps is 10; possible: an integer from 1 to 9$", options={"steps": 10})
    refused("temperature", "^temperature is nan; possible: a number from 0 to 2$", temperature=float("nan"))
    refused("top_k", "^top_k is 1.5; possible: an integer from 0 to ", top_k=1.5)


@pytest.mark.parametrize(
    "text", ["", " \n\t", "\0", "\u200b", "\ufeff", "\u00a0\u2060 \u3000", "\0 \u200d\r\n"]
)
def test_a_blank_text_is_refused(text):
    refused("text", "^text is empty$", text=text)


def test_a_text_with_one_visible_character_is_accepted():
    assert check(Request(text="\u200b.\0"), PLAIN)


def test_voices():
    for voice in ("anna", "Anna", "BERT"):
        check(Request(text="a", voice=voice), VOICES)
    refused("voice", "^Hum 1 has no voice 'carl'; it has: Anna, bert$", voice="carl", spec=VOICES)
    refused("voice", "^a voice is needed; Hum 1 has: Anna, bert$", spec=VOICES)
    check(Request(text="a"), replace(VOICES, voices=("Anna",)))  # the only voice needs no name
    refused("voice", "^Hum 1 has no voice 'anna'; it has no named voices$", voice="anna")
    refused(
        "voice",
        "has no voice 'anna'; it has no named voices: give a reference$",
        voice="anna",
        references=(REFERENCE,),
        spec=CLONES,
    )


def test_languages():
    for language in (None, "auto", "English", "ENGLISH"):
        check(Request(text="a", voice="anna", language=language), VOICES)
    refused(
        "language",
        "^Hum 1 has no language 'french'; possible: auto, english$",
        voice="anna",
        language="french",
        spec=VOICES,
    )
    check(Request(text="a", language="Auto"), PLAIN)
    refused("language", "^Hum 1 has no language 'english'; possible: auto$", language="english")


def test_instructions():
    refused("instructions", "^Hum 1 takes no instructions$", instructions="Sing.")
    check(Request(text="a", instructions=" \u200b"), PLAIN)  # blank instructions count as none
    check(Request(text="a", instructions="Sing."), replace(PLAIN, modes=("voice", "instruct")))
    check(Request(text="a", instructions="A child."), DESIGNS)
    check(Request(text="a", instructions=""), DESIGNS)
    refused("instructions", "^instructions are needed: .* voice from .*; with empty ones it", spec=DESIGNS)


def test_references():
    check(Request(text="a", references=(REFERENCE,)), CLONES)
    refused("references", "^a reference is needed: Hum 1 clones the voice of a recording$", spec=CLONES)
    refused("references", "^Hum 1 takes no reference$", references=(REFERENCE,))
    two = {"references": (REFERENCE, REFERENCE)}
    refused("references", "^2 references are given; Hum 1 takes up to 1$", **two, spec=CLONES)
    check(Request(text="a", **two), replace(CLONES, max_references=2))
    check(Request(text="a"), replace(CLONES, modes=("voice", "clone")))
    both = replace(VOICES, modes=("voice", "clone"), reference_s=(0.1, 9.0))
    check(Request(text="a", references=(REFERENCE,)), both)  # the reference is the voice
    hinted = replace(CLONES, hints={"references": "or move house"})
    refused("references", "clones the voice of a recording; or move house$", spec=hinted)


def test_a_request_has_one_voice():
    spec = replace(VOICES, voices=("Anna", "default"), modes=("voice", "clone"), reference_s=(0.1, 9.0))
    refused("voice", "both given.*leave one out$", voice="anna", references=(REFERENCE,), spec=spec)
    check(Request(text="a", voice="Default", references=(REFERENCE,)), spec)  # no voice in particular


@pytest.mark.parametrize("transcript", [None, " "])
def test_a_model_that_reads_the_words_of_references_needs_them(transcript):
    spec = replace(CLONES, needs_transcript=True, max_references=2)
    check(Request(text="a", references=(replace(REFERENCE, transcript="Hm."),)), spec)
    two = (replace(REFERENCE, transcript="Hm."), replace(REFERENCE, transcript=transcript))
    refused("transcript", "^a transcript is needed: Hum 1 reads", references=two, spec=spec)


def test_turns_and_open_text():
    asked = {"turns": (Turn("user", "Hi."),)}
    refused("turns", "^Hum 1 takes no turns", **asked)
    refused("turns", "^Hum 1 takes no turns", **asked, spec=replace(PLAIN, shares_turns=True))
    check(Request(text="a", **asked), replace(PLAIN, listens=True))
    refused(
        "conversation", "^Hum 1 takes no conversation", conversation="one", spec=replace(PLAIN, listens=True)
    )
    check(Request(text="a", conversation="one"), replace(PLAIN, shares_turns=True))
    refused("conversation", "^conversation is empty", conversation="", spec=replace(PLAIN, shares_turns=True))
    refused("is_open", "^Hum 1 takes no text while it speaks", is_open=True)
    check(Request(text="a", is_open=True), replace(PLAIN, feeds=True))


def test_messages_call_a_model_without_a_name_by_its_variant():
    refused("is_open", "^toy hum takes no text", is_open=True, spec=replace(PLAIN, name=""))


# what every family understands


def test_a_request_without_a_voice_has_the_models_first_one():
    assert understood(Request(text="a"), VOICES).voice == "Anna"
    assert understood(Request(text="a", voice="bert"), VOICES).voice == "bert"
    assert understood(Request(text="a", references=(REFERENCE,)), VOICES).voice is None
    assert understood(Request(text="a"), PLAIN).voice is None
    assert understood(Request(text="a"), replace(VOICES, voices=("Anna",))).voice is None  # it has no other
