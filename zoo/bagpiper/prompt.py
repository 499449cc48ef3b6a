"""From a request to rows of eight ids, of which text uses only the first.

    [bos]  [user] [text] text… [eos]                                      what to say, and how
    [bos]  [user] [audio] vectors… [eot]  [user] [text] question… [eos]   what is heard, and a question
    ... then [assistant] [text]                                           the answer begins with its text

A message ends with [eot] if the next one is of the same role, and else with [eos]. Source: espnet 202611,
espnet2/speechlm/model/speechlm/speechlm_job.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.bagpiper.config import (
    ASSISTANT,
    AUDIO,
    BOS,
    EOS,
    EOT,
    PAD,
    STREAMS,
    SYSTEM,
    TEXT,
    USER,
    Config,
    Sampling,
)
from zoo.bagpiper.listener import Listener
from zoo.bagpiper.vocabulary import TextTokenizer
from zoo.check import roles_of
from zoo.nn.keys import prefix_key
from zoo.request import BLANK, AudioClip, Option, Request, RequestError, Turn
from zoo.voices.references import content

ROLES = {"system": SYSTEM, "user": USER}
HINTS = {
    "voice": "describe the voice in the text itself",
    "references": "it cannot clone; describe the voice in the text itself",
    "instructions": "say in the text itself how it shall sound",
    "language": "say in the text itself which language to speak; the model was trained on English",
}


def options(sampling: Sampling, max_positions: int) -> tuple[Option, ...]:
    """Return the options of a checkpoint, with its defaults. Text takes half of the positions, unless a request
    says more."""
    heat = "; 0 is greedy: always the likeliest"
    return (
        Option(
            "temperature", float, f"how random both text and audio are{heat}; default: as below", None, (0, 2)
        ),
        Option(
            "text_temperature", float, f"how random the text is{heat} word", sampling.text.temperature, (0, 2)
        ),
        Option(
            "audio_temperature",
            float,
            f"how random the audio is{heat} code",
            sampling.audio.temperature,
            (0, 2),
        ),
        Option(
            "top_k",
            int,
            "sample from this many of the likeliest words and codes; 0 means all; default: as the checkpoint says",
            None,
            (0, 1_000_000),
        ),
        Option(
            "top_p",
            float,
            "sample from the likeliest words and codes that make up this share of the probability; 1 means all",
            1.0,
            (1e-6, 1),
        ),
        Option(
            "guidance", float, "how closely the audio follows the text; 1 is off", sampling.guidance, (1, 20)
        ),
        Option(
            "max_tokens",
            int,
            "the most tokens of the text: the plan and the caption, or the answer",
            min(MAX_TOKENS, sampling.text.max_steps, max_positions // 2),
            (1, sampling.text.max_steps),
        ),
    )


EXPECTED_TOKENS = 600  # of a plan and a caption: the published example has 579
MAX_TOKENS = 4096  # of the text, unless a request says more


@dataclass(frozen=True, eq=False)
class Script:
    """A prompt as data: rows of ids [T, 8], and where what is heard [N, D] stands in their place."""

    rows: Tensor
    keys: tuple[int, ...]
    heard: tuple[tuple[int, Tensor], ...]
    num_words: int

    @property
    def num_heard(self) -> int:
        return sum(len(vectors) for _, vectors in self.heard)


@dataclass(frozen=True)
class Message:
    role: int
    text: str | None = None
    clip: AudioClip | None = None


class PromptWriter:
    """Request -> Script. Raises RequestError. Clips are encoded last, after everything else was checked."""

    def __init__(self, config: Config, tokenize: TextTokenizer, listener: Listener | None):
        self.config, self.tokenize, self.listener = config, tokenize, listener

    def __call__(self, request: Request) -> Script:
        messages = messages_of(request)
        words = [[] if message.text is None else self.tokenize(message.text) for message in messages]
        num_words, most = sum(map(len, words)), self.config.max_positions
        if num_words > most:
            raise RequestError(
                "text", f"text has {num_words} tokens; the model reads {most} positions in all"
            )
        ids, keys, heard = [BOS], [prefix_key(BOS)], list[tuple[int, Tensor]]()

        def add(more: Sequence[int]) -> None:
            ids.extend(more)
            keys.extend(prefix_key(id) for id in more)

        later = [message.role for message in messages[1:]] + [None]
        for message, own, next_role in zip(messages, words, later, strict=True):
            add([message.role, TEXT if message.clip is None else AUDIO])
            if message.clip is not None:
                vectors = self._heard(message.clip)
                heard.append((len(ids), vectors))
                ids += [PAD] * len(vectors)
                name = content(message.clip, field="turns")
                keys += [prefix_key(name, i) for i in range(len(vectors))]
            add(own)
            add([EOT if next_role == message.role else EOS])
        add([ASSISTANT, TEXT])
        rows = torch.full((len(ids), STREAMS), PAD)
        rows[:, 0] = torch.tensor(ids)
        return Script(rows, tuple(keys), tuple(heard), num_words)

    def _heard(self, clip: AudioClip) -> Tensor:
        if self.listener is None:
            raise RequestError("turns", "this checkpoint has no audio encoder, so a turn is text")
        return self.listener(clip)


def messages_of(request: Request) -> list[Message]:
    """Return the messages of a request: those of its turns, and its text as the user's. Raises RequestError."""
    turns = list(request.turns)
    if request.text.strip(BLANK):
        turns.append(Turn("user", request.text))
    roles = [turn.role for turn in turns]
    if any(role not in ROLES for role in roles) or "system" in roles[1:] or roles[-1:] != ["user"]:
        order = "at most one system turn, then turns of the user; the model knows no earlier answers"
        raise RequestError("turns", f"the turns are by {roles_of(turns)}; possible: {order}")
    messages = []
    for turn in turns:
        has_text = bool((turn.text or "").strip(BLANK))
        if turn.clip is None and not has_text:
            raise RequestError("turns", f"a turn by {turn.role} has neither text nor audio")
        if turn.clip is not None:
            messages.append(Message(ROLES[turn.role], clip=turn.clip))
        if has_text:
            messages.append(Message(ROLES[turn.role], text=turn.text))
    return messages
