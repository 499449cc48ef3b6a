"""A model as four verbs, the folder that makes it a family, and its speech."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from compile_cache.strategy import Strategy
from zoo.contract.prompt import Lane, Prompt, following
from zoo.contract.spec import Spec
from zoo.contract.state import Batch, State, View
from zoo.nn.keys import prefix_key
from zoo.request import BLANK, Request, RequestError
from zoo.text.languages import own_name
from zoo.text.normalize import normalize
from zoo.text.pauses import HAS_WORD, MARK, stretches
from zoo.text.pieces import expected_s, language_of, sentences, split

S = TypeVar("S", bound=State)
NOTHING = "text has no letter and no digit, so there is nothing to speak"


@dataclass(frozen=True, eq=False)
class Said:
    """The first spoken piece of an answer, whose voice the later pieces continue."""

    text: str
    frames: Tensor  # [F, *frame], on the CPU


class Family(nn.Module, ABC, Generic[S]):
    """A speech LM as four verbs: embed (slot -> the LM's next input), hidden (through the layers), emit
    (hidden -> one frame on the tape) and render (a window of the tape -> samples)."""

    spec: Spec
    strategy: Strategy
    dtype: torch.dtype
    device: torch.device
    encoder_packages: tuple[str, ...] = ()  # that recordings need (zoo/nn/deferred.py)
    is_chunked: bool = False  # whether `render_in_chunks` changed its samples

    # once, after loading
    def render_in_chunks(self) -> None:
        """Let `render` begin before a speech is complete, although its samples then differ from those of the
        whole. Families whose chunks are exact have nothing to change."""

    def narrow_codec(self, dtype: torch.dtype) -> None:
        """Compute the codec's large convolutions, or its flow's estimator, in `dtype`, of 16 bits. Raises
        ValueError for a codec that has no such form."""
        raise ValueError(
            f"the codec of {self.spec.family} has no form in 16 bits; possible for --codec: float32, tf32"
        )

    # on the host, outside the engine's loop
    @abstractmethod
    def prompt(self, request: Request) -> Prompt:
        """Build the prompt of a request. May be called from several threads. References are encoded here,
        once, and kept. Raises RequestError, whose message says what was given and what is possible.
        `zoo.check.check` refuses everything that `spec` says the model does not take."""

    def prompts(self, request: Request, said: Said | None = None) -> Generator[Prompt, Tensor, None]:
        """Yield the passes (segments, turns) of a text that is not split; they follow each other in one
        stream of audio. Each pass's frames [F, *frame] (on the CPU) are sent back, so that the next pass can
        continue from them. All but the last pass have `is_final=False`. said: an earlier piece, in whose voice
        all passes speak."""
        yield self.prompt(request) if said is None else self.later_prompt(request, said)

    def later_prompt(self, request: Request, said: Said) -> Prompt:
        """Build the prompt of a later piece in the voice of the first one. Only for families whose spec has
        `keeps_voice`."""
        raise AssertionError(f"{self.spec.family} cannot continue in the voice of an earlier piece")

    # when a request enters a slot
    @abstractmethod
    def state(self, slots: int, max_frames: int | None = None) -> S: ...

    def admit(self, state: S, slot: int, prompt: Prompt) -> None:
        state.open(slot, prompt)

    def second_lane(self, length: int) -> Lane:
        """Return the inputs of the second lane before it opens, after `length` inputs of the first one. They
        are equal for all requests. Only for families whose spec has `opens_late`."""
        raise AssertionError(f"{self.spec.family} opens no lane")

    def fill_past(self, state: S, prompt: Prompt, first: int, pages: Tensor) -> None:
        """Write the chunks that `prompt.past_keys` names, from a first one on, to their pages [P] of
        `state.arena`. Only for families whose spec has a `past`."""
        raise AssertionError(f"{self.spec.family} keeps no past")

    def feed(self, state: S, slot: int, tokens: Sequence[int], is_last: bool) -> int:
        """Add text to a slot whose prompt was open -> the number of further steps that it allows. `is_last`:
        no text follows, so the text no longer limits the steps. Raises RequestError if the slot cannot hold
        the text, and then takes none of it. Only for families whose spec has `feeds`."""
        raise AssertionError(f"{self.spec.family} takes no text while it speaks")

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of fed text, for `feed`. The parts that zoo.text.open_text cuts have the same
        tokens as the whole text. Only for families whose spec has `feeds`."""
        raise AssertionError(f"{self.spec.family} takes no text while it speaks")

    # on the device: shapes are fixed, rows are updated in place, nothing is read back
    @abstractmethod
    def embed(self, state: S, slots: Tensor) -> Tensor:
        """[B] -> the LM's input after each slot's last step [L * B, D]; undefined before a slot's first
        step."""

    @abstractmethod
    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        """[T, D] -> [T, D]; also writes the keys and values of the positions to batch.kv."""

    @abstractmethod
    def emit(self, state: S, slots: Tensor, h: Tensor) -> None:
        """Append a frame to each slot's tape, or none, given h [L * B, D]. May write a text token and may set
        done. Slots that are done are left unchanged."""

    @abstractmethod
    def render(self, state: S, view: View) -> tuple[Tensor, Tensor]:
        """Render a stretch of each tape -> samples [B, N] float32 and the number of valid samples [B] int64.
        N depends on `view.frames` only. Advances the decoder's state by `view.count` frames."""

    # on the host, when the engine reads a step's report
    def detokenize(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a text token that the model wrote; a character may span tokens. Only for
        families that write text."""
        raise AssertionError(f"{self.spec.family} wrote the text token {token}, and cannot detokenize it")

    def end_turn(self, prompt: Prompt, frames: Tensor) -> tuple[int, ...]:
        """Remember the frames [F, *frame] (on the CPU) of a prompt for the conversation's next turn. Returns
        one prefix key per frame: those that the next prompt gives the positions after this prompt. Only for
        families whose spec has `shares_turns`."""
        raise AssertionError(f"{self.spec.family} does not share turns")

    def answer_tokens(self, frames: Tensor, steps: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of an answer, which are also the prefix keys of the positions after its prompt. frames
        [F, *frame], on the CPU; steps: of each step its text token, or -1 if it made a frame. A step gives one
        token. Only for families whose spec has `keeps_answers`."""
        raise AssertionError(f"{self.spec.family} does not keep answers")

    # the same for all families
    def passes(self, request: Request) -> Generator[Prompt, Tensor, None]:
        """Yield all passes of one answer: those of `prompts`, or one for each piece of a long text. The
        answer may end after a pass with `is_final=False`. Raises RequestError.

        The seed of piece i is derived from the request's seed and i. `max_frames` limits all pieces together.
        """
        request = understood(request, self.spec)
        pieces = paced_pieces(request, self.spec)
        if len(pieces) == 1:
            passes = self.prompts(replace(request, text=pieces[0].text))
            yield from self._spoken(request, pieces[0], next(passes), passes, None)
            return
        left = request.max_frames
        said: Said | None = None
        for i, piece in enumerate(pieces):
            seed = prefix_key(request.seed, i) if i else request.seed
            asked = replace(request, text=piece.text, seed=seed, max_frames=None)
            passes = self.prompts(asked, said)
            prompt = next(passes)
            if left is not None and left < prompt.max_frames:
                # The family may have other limits, which follow from this one.
                passes = self.prompts(replace(asked, max_frames=left), said)
                prompt = next(passes)
            is_last = i == len(pieces) - 1
            frames = yield from self._spoken(request, piece, prompt, passes, left, is_last)
            if left is not None:
                left -= len(frames)
                if left == 0:
                    return
            if self.spec.keeps_voice and not request.references and said is None and len(frames):
                said = Said(piece.text, frames)

    def _spoken(
        self,
        request: Request,
        piece: Piece,
        first: Prompt,
        later: Generator[Prompt, Tensor, None],
        left: int | None,
        is_last: bool = True,
    ) -> Generator[Prompt, Tensor, Tensor]:
        """Yield the passes of a piece and return their frames [F, *frame]. left: the most frames of all of them.
        is_last: no piece follows."""
        first.silence_before = piece.before
        if first.is_final and is_spoken(request, self.spec) and not request.is_open:
            first.expected_s, first.text = expected_s(piece.text), piece.text
        made: list[Tensor] = []
        prompt: Prompt | None = first
        while prompt is not None:
            if left is not None:
                prompt.max_frames = min(prompt.max_frames, left)
            prompt.silence_after = piece.after if prompt.is_final else 0
            prompt.is_final = prompt.is_final and is_last
            frames = yield prompt
            made.append(frames.clone())  # a copy, because the slot is reused
            if left is not None:
                left -= len(frames)
            prompt = following(later, frames) if left != 0 else None
        return torch.cat(made)

    def step(self, state: S, batch: Batch) -> Tensor:
        """Run one step of every slot of the launch -> the report [B, 4]: frames ready, whether the slot is
        done, the text token of this step or -1, and whether all values were finite. With lanes that open late it
        is [B, 5] and ends with the step from which the second lane runs. A slot's first step reads the prompt's
        last input, so prefill never emits; only this function does."""
        # `unbind` makes the number of lanes a constant of the graph. A tensor size that differs between
        # models would become a variable there.
        slots, first = batch.slots, state.first[batch.slots].unbind(1)  # of [B, D]
        is_first = state.steps[slots] == 0
        first_is_audio = torch.cat(state.first_is_audio[slots].unbind(1))  # [L B]
        inputs, is_audio = self._step_inputs(state, batch, first, is_first, first_is_audio)
        h = self.hidden(inputs, replace_audio(batch, is_audio))
        lanes = len(first)
        if batch.outputs is not None:
            h, lanes = h[batch.outputs.flatten()], batch.outputs.shape[0]
        state.check(slots, h.unflatten(0, (lanes, -1)).transpose(0, 1))  # [B, L, D]
        self.emit(state, slots, h)
        done, finite = state.done[slots].long(), state.finite[slots].long()
        report = [state.ready[slots], done, state.written[slots], finite]
        if self.spec.opens_late:
            report.append(state.lane_at[slots])
        return torch.stack(report, 1)

    def _step_inputs(
        self, state: S, batch: Batch, first: Sequence[Tensor], is_first: Tensor, first_is_audio: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs [T, D] of a step, and which of them are audio [T]. first: L of [B, D]."""
        slots, embedded = batch.slots, self.embed(state, batch.slots)
        if self.spec.opens_late:
            own, second = embedded.unflatten(0, (2, -1)).unbind(0)
            own = torch.where(is_first[:, None], first[0], own)
            inputs = torch.cat((own, second))
            is_audio = torch.cat((first_is_audio | ~is_first, torch.ones_like(is_first)))
        else:
            if batch.reads is None:
                torch._check(batch.positions.shape[0] == len(first) * slots.shape[0])
            is_first = is_first.repeat(len(first))  # [L B]
            inputs = torch.where(is_first[:, None], torch.cat(tuple(first)), embedded)
            is_audio = first_is_audio | ~is_first
        if batch.reads is not None:
            inputs, is_audio = inputs[batch.reads], is_audio[batch.reads]
        if batch.prompts is not None and batch.prompt_rows is not None:
            is_prompt, at = batch.prompt_rows >= 0, batch.prompt_rows.clamp(min=0)
            inputs = torch.where(is_prompt[:, None], batch.prompts[at], inputs)
            is_audio = torch.where(is_prompt, batch.is_audio[at], is_audio)
        return inputs, is_audio


def replace_audio(batch: Batch, is_audio: Tensor) -> Batch:
    """Return a step's batch that says which inputs are audio. A graph cannot trace `dataclasses.replace`."""
    return Batch(
        slots=batch.slots,
        positions=batch.positions,
        kv_write_index=batch.kv_write_index,
        page_table=batch.page_table,
        kv_lens=batch.kv_lens,
        cu_seqlens=batch.cu_seqlens,
        kv=batch.kv,
        page=batch.page,
        is_audio=is_audio,
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        attention=batch.attention,
    )


def is_spoken(request: Request, spec: Spec) -> bool:
    """Return whether the request's text is what is spoken."""
    return request.output == "speech" and not spec.answers


class Piece(NamedTuple):
    """The words of one pass, and the samples of silence around it."""

    text: str
    before: int = 0
    after: int = 0


def understood(request: Request, spec: Spec) -> Request:
    """Return the request with the model's own name of its language, and with its first voice if it chooses
    none."""
    if request.voice is None and len(spec.voices) > 1 and not request.references:
        request = replace(request, voice=spec.voices[0])
    if request.language is None:
        return request
    return replace(request, language=own_name(request.language, spec.languages))


def paced_pieces(request: Request, spec: Spec) -> list[Piece]:
    """Return the pieces to speak one after the other, with the pauses between them. Raises RequestError for a
    text that has nothing to speak, and for pauses that cannot be made."""
    check_gap(request, spec)
    if request.is_open or not is_spoken(request, spec) or not request.text.strip(BLANK):
        return [Piece(text) for text in pieces_of(request, spec)]
    if not MARK.search(request.text) and not request.sentence_gap_s:
        if not HAS_WORD.search(request.text):
            raise RequestError("text", NOTHING)
        return [Piece(text) for text in pieces_of(request, spec)]
    if request.turns or request.conversation:
        field, what = ("text", "a pause") if MARK.search(request.text) else ("sentence_gap_s", "a gap")
        raise RequestError(
            field, f"{field} has {what}, which a turn of a conversation cannot make; leave it out"
        )
    return _with_pauses(request, spec)


def _with_pauses(request: Request, spec: Spec) -> list[Piece]:
    begin, *parts = stretches(request.text)
    if not parts:
        raise RequestError("text", NOTHING)
    lead = re.match(spec.lead, parts[0].text)
    prefix = parts[0].text[: lead.end()] if lead is not None else ""
    whole = replace(request, language=language_of(request)) if request.language is None else request
    pieces: list[Piece] = []
    gap = round((request.sentence_gap_s or 0) * spec.sample_rate_hz)
    for part in parts:
        for sentence in sentences_of(part.text, whole, spec):
            texts = pieces_of(replace(whole, text=prefix + sentence if pieces else sentence), spec)
            pieces += [Piece(text) for text in texts]
            pieces[-1] = pieces[-1]._replace(after=gap)
        pieces[-1] = pieces[-1]._replace(after=round(part.silence_s * spec.sample_rate_hz))
    pieces[0] = pieces[0]._replace(before=round(begin.silence_s * spec.sample_rate_hz))
    return pieces


def check_gap(request: Request, spec: Spec) -> None:
    """Raise RequestError for a gap between sentences that cannot be made."""
    if not request.sentence_gap_s:
        return
    name = spec.name or f"{spec.family} {spec.variant}"
    if spec.answers:
        why = "answers a text instead of speaking it"
    elif spec.piece_s is None:
        why = "speaks each text in one pass"
    elif request.is_open:
        why = "needs all of the text at once for it"
    else:
        return
    raise RequestError("sentence_gap_s", f"sentence_gap_s is not possible: {name} {why}; leave it out")


def sentences_of(text: str, request: Request, spec: Spec) -> list[str]:
    """Return the sentences between which there are gaps; without gaps, the whole text."""
    is_whole = spec.unsplit and re.search(spec.unsplit, text)
    if not request.sentence_gap_s or is_whole:
        return [text]
    return [sentence.strip(BLANK) for sentence in sentences(text, language_of(request))]


def pieces_of(request: Request, spec: Spec) -> list[str]:
    """Return the pieces to speak one after the other: a single one if the text fits in a pass or must not be
    split.

    A prefix that applies to all of the text (`Spec.lead`) is repeated before each piece. Raises RequestError
    if the text cannot be normalized.
    """
    text, language = request.text, language_of(request)
    if request.normalize and request.is_open:
        raise RequestError(
            "normalize", "normalize needs all of the text at once: leave out normalize or is_open"
        )
    if request.normalize:
        text = normalize(text, language)
    is_alone = is_spoken(request, spec) and not (request.is_open or request.turns or request.conversation)
    if spec.piece_s is None or not (request.split_text and is_alone):
        return [text]
    if spec.unsplit and re.search(spec.unsplit, text):
        return [text]
    lead = re.match(spec.lead, text)
    start = lead.end() if lead is not None else 0
    pieces = split(text[start:], spec.piece_s, language)
    if len(pieces) == 1:
        return [text]
    return [text[:start] + piece.strip(BLANK) for piece in pieces]


class FamilyFolder(Protocol):
    """The interface that makes a folder of `zoo/` a family."""

    NAME: str

    def claims(self, path: Path) -> bool:
        """Return whether this family can load the model directory `path`."""

    def load(
        self, directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None
    ) -> Family[Any]:
        """Load the family with its weights and the adapter in directory `adapter`. Raises ValueError that
        names the fault, also for an adapter if the family does not take one."""

    def survey(self, directory: Path) -> tuple[Spec, int]:
        """Return the spec and the number of parameters without reading the weights. Raises ValueError."""

    def write_demo(
        self, directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None
    ) -> Path:
        """Write a random checkpoint in the published layout. Raises ValueError, OSError."""


class SpokenPiece(NamedTuple):
    """A piece of a text, and the samples start .. stop of its speech."""

    text: str
    start: int
    stop: int


@dataclass
class Speech:
    frames: Tensor  # [F, *frame]
    samples: Tensor  # [N] float32
    sample_rate_hz: int
    text: str = ""  # written by the model
    pieces: tuple[SpokenPiece, ...] = ()  # of the text, if it is known what each pass said
    tokens: tuple[int, ...] = ()  # of an answer, for a later `Turn`, if the model keeps answers
