"""Measure how many words are understood: word error rates by stage and by length of the text.

A stage adds one source of errors to the stage before, so the table shows which part makes them.

    flite       its samples
    features    their features through the channel vocoder: what the decoder learns
    codes       the codes of these features through the channel vocoder
    decoder     the same codes through our decoder
    talker      codes of our talker, from text, through the channel vocoder
    voice       the same codes through our decoder
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

import zoo
from train_a_voice import judge, sentences, track, vocoder
from train_a_voice.features import RATE_HZ
from train_a_voice.flite import RATE_HZ as FLITE_HZ
from train_a_voice.flite import SPEAKERS, flite_of
from train_a_voice.pack import SPAWN, Maker
from zoo.nn.conv import CodecState
from zoo.qwen3_tts.codec import Decoder
from zoo.qwen3_tts.model import Qwen3TTS
from zoo.request import Request

if TYPE_CHECKING:  # the stages need no HTTP
    import httpx

SHORT, MEDIUM = 40, 80  # most letters
JOINED = 420  # letters of several sentences, about 30 s
KINDS = ("short", "medium", "long", "sentences", "joined")


@dataclass(frozen=True)
class Case:
    text: str
    speaker: int
    seed: int
    is_joined: bool

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the rows of the table to which it belongs."""
        if self.is_joined:
            return ("joined",)
        length = len(self.text)
        return ("short" if length <= SHORT else "medium" if length <= MEDIUM else "long", "sentences")


def cases(texts: Sequence[str], seed: int, speakers: Sequence[str] = SPEAKERS) -> list[Case]:
    """Return each text by each speaker, alone and joined to others."""
    joined = [""]
    for text in texts:
        if len(joined[-1]) > JOINED:
            joined.append("")
        joined[-1] = f"{joined[-1]} {text}".strip()
    return [
        Case(text, speaker, seed + i, is_joined)
        for is_joined, some in ((False, texts), (True, joined))
        for speaker in map(SPEAKERS.index, speakers)
        for i, text in enumerate(some)
    ]


@cache
def _parts(folder: Path, voice: Path | None) -> tuple[Maker, Qwen3TTS | None]:
    torch.set_num_threads(1)
    if voice is None:
        return Maker.load(folder), None
    family = zoo.load(voice, device="cpu", dtype=torch.float32)
    assert isinstance(family, Qwen3TTS), f"{voice} holds another model"
    return Maker.load(folder), family


def hear(case: Case, folder: Path, voice: Path | None) -> dict[str, str]:
    """Return what is heard at each stage."""
    maker, family = _parts(folder, voice)
    speech = flite_of().speak(case.text, case.speaker, has_samples=True)
    assert speech.samples is not None
    found = track.analyse(speech, case.speaker, maker.colours)
    codes = maker.codebooks.encode(found.mel, found.cycles, found.voicing)
    sounds = {
        "features": vocoder.speak(found.mel, found.cycles, found.voicing, case.speaker),
        "codes": vocoder.speak(*maker.codebooks.decode(codes), case.speaker),
    }
    if family is not None:
        request = Request(text=case.text, voice=SPEAKERS[case.speaker], seed=case.seed)
        said = zoo.generate(family, request, max_frames=2 * len(codes))
        sounds["decoder"] = decode(family.codec.decoder, torch.from_numpy(codes.astype(np.int64)))
        sounds["talker"] = vocoder.speak(*maker.codebooks.decode(said.frames.numpy()), case.speaker)
        sounds["voice"] = said.samples.numpy()
    heard = {stage: judge.transcribe(samples, RATE_HZ) for stage, samples in sounds.items()}
    return {"flite": judge.transcribe(speech.samples / 32768, FLITE_HZ)} | heard


@torch.inference_mode()
def decode(model: Decoder, codes: torch.Tensor) -> np.ndarray:
    """Return samples [T * FRAME] of codes [T, K]."""
    start, rows = torch.zeros(1, dtype=torch.int64), torch.zeros(1, model.state_size)
    state = CodecState(model.layout, rows, len(codes), start + len(codes))
    return model(codes[None], start, state)[0].numpy()


def speakers_of(url: str) -> list[str]:
    """Return the speakers that a server has. A voice of an earlier recipe has one."""
    import httpx

    address, names_only = f"{url.rstrip('/')}/v1/audio/voices", {"legacy": "true"}
    try:
        found = succeeded(url, httpx.get(address, params=names_only)).json()["voices"]
    except httpx.TransportError as error:
        raise ValueError(f"{url} does not answer: {error}") from None
    known = [name for name in SPEAKERS if name in found]
    if not known:
        raise ValueError(f"{url} has no voice of {' or '.join(SPEAKERS)}")
    return known


def succeeded(url: str, answer: httpx.Response) -> httpx.Response:
    if answer.status_code != 200:
        raise SystemExit(f"{url} answered {answer.status_code}: {answer.text[:300]}")
    return answer


def hear_server(url: str, case: Case) -> dict[str, str]:
    import httpx
    import soundfile

    body = {"input": case.text, "voice": SPEAKERS[case.speaker], "response_format": "wav", "seed": case.seed}
    answer = succeeded(url, httpx.post(f"{url.rstrip('/')}/v1/audio/speech", json=body, timeout=300))
    return {"server": judge.transcribe(*soundfile.read(io.BytesIO(answer.content), dtype="float32"))}


def score(
    work: Path, voice: Path | None, url: str | None, texts: Sequence[str], seed: int, processes: int | None
) -> str:
    """Return a table in Markdown. The transcripts of all stages are written to work/heard.jsonl. Raises ValueError
    for a server without a speaker."""
    if url is not None:
        todo = cases(texts, seed, speakers_of(url))
        return table(todo, [hear_server(url, case) for case in todo])
    todo = cases(texts, seed)
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=SPAWN) as pool:
        num = len(todo)
        heard = list(pool.map(hear, todo, [work / "pack"] * num, [voice] * num))
    with open(work / "heard.jsonl", "w", encoding="utf-8") as file:
        for case, words in zip(todo, heard, strict=True):
            file.write(json.dumps({"speaker": SPEAKERS[case.speaker], "text": case.text} | words) + "\n")
    return table(todo, heard)


def table(todo: Sequence[Case], heard: Sequence[dict[str, str]]) -> str:
    stages = list(heard[0])
    lines = [["speaker", "texts", "words", *stages], ["---"] * (3 + len(stages))]
    for speaker, name in enumerate(SPEAKERS):
        for kind in KINDS:
            chosen = [i for i, case in enumerate(todo) if case.speaker == speaker and kind in case.kinds]
            if not chosen:
                continue
            texts = [todo[i].text for i in chosen]
            rates = [judge.word_error_rate(texts, [heard[i][stage] for i in chosen]) for stage in stages]
            words = sum(len(judge.words(text)) for text in texts)
            lines.append([name, kind, str(words), *(f"{rate:.3f}".removeprefix("0") for rate in rates)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def held_out(count: int | None) -> list[str]:
    """Return the first sentences that were written by hand and that no part learns from."""
    return sentences.LINES["held_out"][:count]
