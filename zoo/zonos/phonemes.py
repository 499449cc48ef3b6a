"""Text to ids of phonemes: numbers in English words, or readings of Japanese; then espeak-ng through phonemizer;
then one id per character.

    "It's 7:45." ─ numbers ─> "It's seven:forty-five." ─ espeak-ng ─> "ɪts sˈɛvən:fˈɔːɹɾifˈaɪv." ─> 2 65 76 ... 7 3

The packages are an extra, because phonemizer and espeak-ng are under the GPL. espeak-ng is not thread-safe,
so one text is read at a time, in well under a millisecond. Source: Zyphra/Zonos at bc40d98, conditioning.py.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

from zoo.request import Request, RequestError
from zoo.text.pieces import language_of
from zoo.zonos.japanese import readings
from zoo.zonos.spelling import spell

EXTRA = "pip install -e '.[phonemes]'"
UNKNOWN, BEGIN, FINISH = 1, 2, 3
NUM_SPECIAL = 4
PUNCTUATION = ';:,.!?¡¿—…"«»“”() *~-/\\&'
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
IPA = (
    "ɑɐɒæɓʙβɔɕçɗɖðʤəɘɚɛɜɝɞɟʄɡɠɢʛɦɧħɥʜɨɪʝɭɬɫɮʟɱɯɰŋɳɲɴøɵɸθœɶʘɹɺɾɻʀʁɽʂʃʈʧʉʊʋⱱʌɣɤʍχʎʏʑʐʒʔʡʕʢǀǁǂǃˈˌːˑʼʴʰʱʲʷˠˤ˞↓↑→↗↘"
    "'̩'ᵻ"
)
SYMBOLS = PUNCTUATION + LETTERS + IPA
NUM_IDS = NUM_SPECIAL + len(SYMBOLS)
# The apostrophe is in the table twice; the later row counts.
ID_OF = {symbol: i for i, symbol in enumerate(SYMBOLS, NUM_SPECIAL)}
# espeak-ng's names; a language's index is its id.
_LANGUAGES = """
af am an ar as az ba bg bn bpy bs ca cmn cs cy da de el en-029 en-gb en-gb-scotland en-gb-x-gbclan
en-gb-x-gbcwmd en-gb-x-rp en-us eo es es-419 et eu fa fa-latn fi fr-be fr-ch fr-fr ga gd gn grc gu
hak hi hr ht hu hy hyw ia id is it ja jbo ka kk kl kn ko kok ku ky la lfn lt lv mi mk ml mr ms mt my
nb nci ne nl om or pa pap pl pt pt-br py quc ro ru ru-lv sd shn si sk sl sq sr sv sw ta te tn tr tt
ur uz vi vi-vn-x-central vi-vn-x-south yue
"""
LANGUAGES = tuple(_LANGUAGES.split())
# ISO codes that espeak-ng names otherwise.
ALIASES = {"en": "en-us", "fr": "fr-fr", "zh": "cmn"}
JAPANESE = "ja"
SPOKEN = ("auto", *ALIASES, *LANGUAGES)


def espeak_name(request: Request) -> str:
    """Return espeak-ng's name of a request's language. Without a language, the script decides."""
    name = language_of(request)
    return ALIASES.get(name, name)


class Phonemizer:
    """(text, espeak-ng's name of a language) -> ids. May be called from several threads.

    Raises ValueError if the packages are not installed.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.backends: dict[str, Any] = {}
        self._engine = _engine()

    def __deepcopy__(self, memo: object) -> Phonemizer:
        """Return a new one for a copy of a family: espeak-ng's library cannot be copied."""
        return Phonemizer()

    def __call__(self, text: str, language: str) -> tuple[int, ...]:
        return (BEGIN, *(ID_OF.get(symbol, UNKNOWN) for symbol in self.read(text, language)), FINISH)

    def read(self, text: str, language: str) -> str:
        """Return the phonemes of a text, with its punctuation and with stress marks. Raises RequestError."""
        with self.lock:
            words = readings(text) if language == JAPANESE else spell(text)
            if language not in self.backends:
                self.backends[language] = self._backend(language)
            lines = self.backends[language].phonemize([words], strip=True)
        return lines[0] if lines else ""

    def _backend(self, language: str) -> Any:
        quiet = logging.getLogger("zoo.zonos.espeak")
        quiet.setLevel(logging.ERROR)
        try:
            backend = self._engine(
                language,
                preserve_punctuation=True,
                with_stress=True,
                punctuation_marks=PUNCTUATION,
                logger=quiet,
            )
        except RuntimeError as error:
            raise RequestError("language", f"espeak-ng cannot read {language}: {error}") from None
        delete_copies(Path(self._engine.library()))
        return backend


def delete_copies(library: Path) -> None:
    """Delete the copies of espeak-ng's library that this process has loaded.

    phonemizer loads some from temporary directories, and deletes them when the process exits. A process that
    is killed would leave them, and loaded code needs no file."""
    maps, temporary = Path("/proc/self/maps"), Path(tempfile.gettempdir()).resolve()
    lines = maps.read_text().splitlines() if maps.exists() else []
    for path in {Path(line.split(maxsplit=5)[-1]) for line in lines if "libespeak" in line}:
        if path.parent.parent == temporary and path != library.resolve():
            path.unlink(missing_ok=True)


def _engine() -> Any:
    """Return phonemizer's espeak backend. Raises ValueError if it is not installed."""
    try:
        import espeakng_loader

        os.environ.setdefault("PHONEMIZER_ESPEAK_LIBRARY", espeakng_loader.get_library_path())
        os.environ.setdefault("ESPEAK_DATA_PATH", espeakng_loader.get_data_path())
        from phonemizer.backend import EspeakBackend
    except ImportError as error:
        raise ValueError(f"Zonos reads phonemes, and {error.name} is not installed: {EXTRA}") from None
    return EspeakBackend
