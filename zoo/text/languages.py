"""The names of languages: a model's own, English ones, and codes such as "en", "zh-CN" and "pt_BR" (BCP
47)."""

from __future__ import annotations

from collections.abc import Sequence

# English name -> ISO 639-1
ISO = {
    "arabic": "ar", "bengali": "bn", "bulgarian": "bg", "catalan": "ca", "chinese": "zh", "croatian": "hr", "czech": "cs",
    "danish": "da", "dutch": "nl", "english": "en", "estonian": "et", "finnish": "fi", "french": "fr", "german": "de",
    "greek": "el", "hebrew": "he", "hindi": "hi", "hungarian": "hu", "indonesian": "id", "italian": "it", "japanese": "ja",
    "korean": "ko", "latvian": "lv", "lithuanian": "lt", "malay": "ms", "norwegian": "no", "persian": "fa", "polish": "pl",
    "portuguese": "pt", "romanian": "ro", "russian": "ru", "slovak": "sk", "slovenian": "sl", "spanish": "es", "swahili": "sw",
    "swedish": "sv", "tamil": "ta", "thai": "th", "turkish": "tr", "ukrainian": "uk", "urdu": "ur", "vietnamese": "vi",
}  # fmt: skip
_SAME = {"cmn": "zh", "nb": "no", "iw": "he", "in": "id"}  # codes of which one model has this, another that


def own_name(language: str, possible: Sequence[str]) -> str:
    """Return a model's own name for a language, or the language as it is given if the model does not have it.

    A region that the model does not tell apart is ignored. possible: the model's languages, in lower case.
    """
    name = language.strip().lower().replace("_", "-")
    if name in possible:
        return name
    code = code_of(name)
    return next((own for own in possible if code_of(own) == code), language)


def code_of(language: str) -> str:
    """Return the ISO 639-1 code of a language that is given by name or by code, as far as it is known."""
    name = language.strip().lower().replace("_", "-")
    code = ISO.get(name, name).partition("-")[0]
    return _SAME.get(code, code)
