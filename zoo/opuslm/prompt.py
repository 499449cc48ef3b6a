"""Builds the prompt: rows of nine ids, of which text uses only the first, delayed as a whole.

    random voice   E plain [text] text… P  [audio]                     E the end, also the begin; P eight rows of
    voice          E clone [text] text… P  [voice] 500 frames P  [audio]  pads, so that the delay mixes no two parts

A voice prompt has a fixed number of frames: a longer one is cut, a shorter one is followed by pads. Source:
ESPnet's SpeechLM at 5f0a39a, train/preprocessor.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.contract import Said
from zoo.opuslm.config import DELAY, PAD, STREAMS, Config, Vocabulary
from zoo.opuslm.delay import delayed
from zoo.opuslm.vocabulary import TextTokenizer
from zoo.opuslm.voices import DEFAULT
from zoo.request import Request, RequestError, sampling_options

PIECE_S = 12.0  # longer texts are split by sentence
MAX_FRAMES = 2048 - DELAY - 1  # of the reference's 2048 steps
TEMPERATURE, TOP_K, TOP_P = 0.8, 30, 1.0
OPTIONS = sampling_options(TEMPERATURE, TOP_K, TOP_P)
HINTS = {
    "references": "recordings need XEUS, which is not included; put the codes of a voice into MODEL/voices",
    "language": "the model was trained on English",
    "turns": "dialogues need OpusLM-Dialogue, which is not supported",
}


@dataclass(frozen=True, eq=False)
class Script:
    """A prompt as data: the ids [T, 9] that the model reads."""

    rows: Tensor
    num_text: int  # tokens of the text to speak


class PromptWriter:
    """Request -> Script. Raises RequestError. voices: the codes [F, 9] of each, by lower-case name."""

    def __init__(self, config: Config, tokenize: TextTokenizer, voices: Mapping[str, Tensor]):
        self.config, self.tokenize, self.voices = config, tokenize, voices

    def __call__(self, request: Request, said: Said | None = None) -> Script:
        """said: what was spoken before in a random voice that this text goes on in."""
        ids = self.tokenize(request.text)
        if len(ids) > self.config.max_positions:
            raise RequestError(
                "text",
                f"text has {len(ids)} tokens; the model reads {self.config.max_positions} positions in all",
            )
        name = (request.voice or DEFAULT).lower()
        voice = self.voices[name] if name != DEFAULT else None if said is None else said.frames
        known = self.config.vocabulary
        task = known.plain if voice is None else known.cloned
        parts = [_words([known.end, task, known.text, *ids]), _pads(DELAY)]
        if voice is not None:
            parts += [_words([known.voice]), self._voice(voice), _pads(DELAY)]
        return Script(delayed(torch.cat([*parts, _words([known.audio])])), len(ids))

    def _voice(self, codes: Tensor) -> Tensor:
        """Return the rows [N, 9] of a voice's codes [F, 9]."""
        length = self.config.voice_frames
        rows = ids_of(codes[:length], self.config.vocabulary)
        return torch.cat((rows, _pads(length - len(rows)))) if self.config.pads_voices else rows


def ids_of(codes: Tensor, known: Vocabulary) -> Tensor:
    """Return the ids of codes [F, 9]. Cluster 0 becomes a pad, as in the reference, which adds the first id only
    to values that are not zero; its codebooks count on, so that only the first one has a zero."""
    first = known.codec + known.num_codes * torch.arange(STREAMS - 1)
    ids = codes + torch.cat((torch.tensor([known.ssl]), first))
    ids[:, 0] = torch.where(codes[:, 0] == 0, PAD, ids[:, 0])
    return ids


def _words(ids: list[int]) -> Tensor:
    """Return rows [T, 9] with ids in their first stream."""
    rows = _pads(len(ids))
    rows[:, 0] = torch.tensor(ids)
    return rows


def _pads(num: int) -> Tensor:
    return torch.full((num, STREAMS), PAD)
