"""Languages by name and by code, in the names of each kind of model."""

import pytest
from toy import Toy

from zoo.request import Request, RequestError
from zoo.text.languages import own_name

NAMES = ("auto", "chinese", "english", "portuguese")
CODES = ("auto", "no", "zh", "en")
REGIONS = ("auto", "en", "zh", "cmn", "en-gb", "en-us", "nb", "pt", "pt-br")


@pytest.mark.parametrize(
    ("language", "possible", "own"),
    [
        ("en", NAMES, "english"),
        ("EN-us", NAMES, "english"),
        ("zh-CN", NAMES, "chinese"),
        ("cmn-Hans-CN", NAMES, "chinese"),
        ("pt_BR", NAMES, "portuguese"),
        ("English", NAMES, "english"),
        ("auto", NAMES, "auto"),
        ("english", CODES, "en"),
        ("nb-NO", CODES, "no"),
        ("en-GB", REGIONS, "en-gb"),
        ("en-AU", REGIONS, "en"),
        ("pt-BR", REGIONS, "pt-br"),
        ("cmn", REGIONS, "cmn"),
        ("norwegian", REGIONS, "nb"),
        ("german", NAMES, "german"),  # which the model refuses as it was given
        ("de-DE", CODES, "de-DE"),
        ("en", (), "en"),
    ],
)
def test_a_language_gets_the_models_own_name(language, possible, own):
    assert own_name(language, possible) == own


@pytest.mark.parametrize("text", ["\u202e", "🎉", "…!?", "__", "🎉 🎉\n"])
def test_a_text_without_letters_and_digits_is_refused(text):
    with pytest.raises(RequestError, match="no letter and no digit") as error:
        next(Toy().passes(Request(text=text)))
    assert error.value.param == "text"


@pytest.mark.parametrize("text", ["5", "é", "नमस्ते", "好", "[laugh]", "🎉 a"])
def test_a_text_with_a_letter_or_a_digit_is_spoken(text):
    assert next(Toy().passes(Request(text=text))) is not None
