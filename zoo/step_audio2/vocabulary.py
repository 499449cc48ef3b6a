"""The ids of a checkpoint, and its text tokenizer. Special tokens are known by their names: small checkpoints have
other ids than the published one."""

from __future__ import annotations

import re
from pathlib import Path

from zoo.nn.plain_tokenizer import PlainTokenizer
from zoo.nn.s3.sizes import NUM_CODES
from zoo.step_audio2.config import TITLE
from zoo.text.bpe import in_bytes

TOKENS = "tokenizer.json"
BEGIN, END = "<|BOT|>", "<|EOT|>"
AUDIO_START, AUDIO_END, AUDIO_PATCH = "<audio_start>", "<audio_end>", "<audio_patch>"
SPEECH_START, SPEECH_END, SPEECH_PAD = "<tts_start>", "<tts_end>", "<tts_pad>"
NEEDED = (BEGIN, END, AUDIO_START, AUDIO_END, AUDIO_PATCH, SPEECH_START)
THOUGHT_END = "</think>"
_CODE = re.compile(r"<audio_(\d+)>")
NUM_AUDIO = NUM_CODES + 1  # the last one is padding


def audio(code: int) -> str:
    return f"<audio_{code}>"


def is_code(token: str) -> bool:
    """Return whether a token is one of audio, padding included."""
    return _CODE.fullmatch(token) is not None


class Vocabulary:
    """special: added tokens other than codes -> ids. first_code: the id of code 0; the others follow. first_hidden: no
    token from this one on is text. num_tokens: ids that are tokens."""

    def __init__(self, directory: Path, rows: int):
        """rows: of the model's tables. Raises ValueError if the file does not fit the model."""
        path = directory / TOKENS
        needed = (*NEEDED, audio(0), audio(NUM_CODES - 1), audio(NUM_CODES))
        self._plain = PlainTokenizer(path, needed, rows, TITLE)
        self._words = {id: in_bytes(token) for token, id in self._plain.words.items()}
        if None in self._words.values():
            raise ValueError(f"{path} is not a byte-level vocabulary")
        ids = self._plain.special
        self.first_code = ids[audio(0)]
        if any(ids.get(audio(code)) != self.first_code + code for code in range(NUM_AUDIO)):
            where = f"{audio(0)} is {self.first_code}"
            raise ValueError(f"{path}: the ids of the {NUM_AUDIO} audio tokens are not in order; {where}")
        self.special = {token: id for token, id in ids.items() if not is_code(token)}
        self.first_hidden = ids[AUDIO_START]
        self.num_tokens = self.first_code + NUM_AUDIO
        late = [token for token, id in ids.items() if id >= self.num_tokens]
        early = [token for token in (AUDIO_PATCH, SPEECH_START) if ids[token] < self.first_hidden]
        if late or early or not self.first_hidden < self.first_code:
            order = (
                f"{AUDIO_START} comes before the other audio tokens, and {audio(NUM_CODES)} is the last one"
            )
            raise ValueError(f"{path}: the order of the ids is not known; {order}")
        self.begin, self.end = ids[BEGIN], ids[END]
        self.speech_start = ids[SPEECH_START]
        self._names = {id: token for token, id in self.special.items()}
        self._special = re.compile("|".join(map(re.escape, sorted(self.special, key=len, reverse=True))))

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text. None of them is special, even if the text spells a special token."""
        return self._plain(text)

    def own(self, text: str) -> list[int]:
        """Return the ids of a text of ours, whose special tokens are special."""
        ids, at = list[int](), 0
        for match in self._special.finditer(text):
            ids += [*self._plain(text[at : match.start()]), self.special[match[0]]]
            at = match.end()
        return ids + self._plain(text[at:])

    def has(self, token: int) -> bool:
        """Return whether an answer can have this token."""
        return 0 <= token < self.num_tokens

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token; those of a special token are its name, and a code has none."""
        if token in self._names:
            return self._names[token].encode()
        return self._words.get(token) or b""
