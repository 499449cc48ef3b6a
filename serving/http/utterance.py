"""One utterance of a session: it takes text and sends audio.

    token by token    text ─ Feed ─ one request that stays open ─ audio
    by sentences      text ─ Sentences ─ one request per sentence, in order, with one voice and seed ─ audio

Both give one stream from one encoder. A fed request ends at the first sentence end after `piece_s` seconds
of speech, and a new request continues, because models drift on longer texts.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
from litestar.exceptions import HTTPException
from litestar.types import Message, Send

from serving import protocol
from serving.aligner.client import AlignerFailed
from serving.audio import encode
from serving.http.bodies import read_beside
from serving.http.errors import refusal
from serving.http.events import (
    AudioChunk,
    AudioDone,
    AudioHeard,
    AudioSegment,
    AudioStart,
    AudioWords,
    ModelLoading,
    ServerEvent,
    Timings,
)
from serving.http.objects import Model, Usage
from serving.http.recordings import digest
from serving.http.references import LoadedVoice
from serving.http.schemas import SpeechRequest
from serving.http.sentences import MarkdownSentences, PassEnd, Sentences
from serving.http.server import Server
from serving.http.speech import ENCODING, PartOfSession
from serving.http.voice_choice import VoiceChoice
from serving.http.word_times import Word, WordTimes
from zoo.request import RequestError
from zoo.text.pauses import Part, check_total, is_pause, next_part
from zoo.text.pronunciations import Reader

REFUSED = 400
LOADING = "model.loading"  # a message of our own from a segment to its utterance


class Idle(Exception):
    """No text arrived within the idle limit."""


class Settings(msgspec.Struct):
    """The settings of a session.config for its utterances. request: with an empty input. voice: the
    choice; loaded: the same voice, with its recordings decoded."""

    request: SpeechRequest
    model: Model
    options: dict[str, bool | int | float | str]
    voice: VoiceChoice
    loaded: LoadedVoice
    is_base64: bool
    is_fed: bool  # whether text goes to the model token by token
    may_fall_back: bool  # whether to go on by sentences if the model refuses to take tokens
    is_cancelling: bool  # whether a new utterance cancels those before it
    sample_rate_hz: int  # the rate that the audio decodes to
    warnings: list[str]


class Segment(PartOfSession):
    """One request of an utterance. `asked` is set once the request was sent to the
    engine."""

    def __init__(
        self,
        server: Server,
        settings: Settings,
        text: str,
        seed: int,
        max_frames: int | None,
        voice: LoadedVoice,
        is_open: bool,
        words: WordTimes | None,
    ):
        request = msgspec.structs.replace(
            settings.request,
            input=text,
            seed=seed,
            max_new_tokens=max_frames,
            response_format="pcm",
            sample_rate=None,
            speed=1.0,
            loudness=None,
            stream=True,
        )
        options = dict(settings.options)
        if is_open and "text_mode" in settings.model.option_names:
            options.setdefault("text_mode", "interleaved")
        super().__init__(server, request, options, settings.model, settings.voice)
        self.loaded, self.is_open, self.is_judged = voice, is_open, not is_open
        self.listening_speed = settings.request.speed  # the utterance's encoder changes the speed
        self.asked = asyncio.Event()
        self.words = words  # of the whole utterance
        self.said = text  # with what was fed

    async def tell_loading(self, state: protocol.ModelState, send: Send) -> None:
        await send(cast(Message, {"type": LOADING, "state": state}))

    def word_times(self) -> None:
        """The utterance has them."""

    def own_words(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def take_piece(self, piece: protocol.Spoken, send: Send) -> None:
        if self.words is not None:
            self.words.spoken(piece.text, piece.start, piece.stop)

    async def send_words(self, send: Send) -> None:
        """The utterance sends them."""

    async def send_last_words(self, send: Send) -> None:
        if self.words is not None:
            self.words.spoken_whole(self.said)

    async def prepare_text(self) -> None:
        """The utterance has prepared it."""

    async def message(self) -> protocol.Speak:
        message = self.speak_message(self.loaded)
        message.listener = replace(message.listener, speed=self.listening_speed)
        message.request.is_open = self.is_open
        return message

    def begin(self) -> None:
        self.asked.set()


class Utterance:
    """One utterance. `say` adds text and `end` ends it, while `speak` runs until everything is spoken."""

    def __init__(
        self,
        number: int,
        server: Server,
        settings: Settings,
        seed: int,
        send_event: Callable[[ServerEvent], Awaitable[None]],
        send_bytes: Callable[[bytes], Awaitable[None]],
    ):
        self.number, self.server, self.settings, self.seed = number, server, settings, seed
        self.send_event, self.send_bytes = send_event, send_bytes
        request, model = settings.request, settings.model
        self.encoder = encode.Encoder(request.response_format, model.sample_rate_hz, *request.encoding)
        self.began_s = time.perf_counter()
        self.ended_s: float | None = None  # when its text was complete
        self.heard_s: float | None = None  # when its first audio was sent
        self.text = ""  # all text so far, with its terms replaced unless it is Markdown
        self.lexicon = server.lexicon(request, model, settings.voice)
        self.reader = None if self.lexicon is None or self._is_markdown else Reader(self.lexicon)
        self.num_taken = 0  # how many characters of it `more` has returned
        self.came = asyncio.Event()
        self.is_over = False
        self.frames = self.num_samples = self.input_tokens = self.text_tokens = 0
        self.silence_s = 0.0  # of the pauses so far
        self.was_cut = False  # whether the frame limit ended it
        self.words = server.word_times(request, model)
        self.found: list[Word] = []  # all words so far
        self.spoken: Segment | None = None  # the one that is spoken
        self.voice = settings.loaded
        self.pcm = bytearray()  # of the current segment, if its voice is to be kept

    # Text.

    def say(self, text: str) -> None:
        """Add text. Raises the refusal."""
        if self.is_over:  # it has failed, and the client is still sending its text
            return
        reader = copy(self.reader)  # a text that is refused must not change it
        if reader is not None:
            text = reader.more(text)
        most, count = self.server.limits.text_chars, len(self.text) + len(text)
        if count > most:
            message = f"the utterance has {count} characters; this server takes up to {most}"
            raise refusal(400, message, "text")
        self.reader = reader
        self.text += text
        self.came.set()

    def end(self) -> None:
        if self.reader is not None:
            self.text += self.reader.rest()
        self.ended_s = time.perf_counter()
        self.came.set()

    async def more(self) -> Part | None:
        """Wait for text, and return what is new up to the next pause, or that pause; None at the end. Raises
        the refusal, Idle."""
        while not (part := self._next_part()).text:
            if self.ended_s is not None:
                return None
            self.came.clear()
            try:
                async with asyncio.timeout(self.server.limits.text_idle_s):
                    await self.came.wait()
            except TimeoutError:
                raise Idle from None
        self.num_taken += len(part.text)
        return part

    def _next_part(self) -> Part:
        try:
            return next_part(self.text[self.num_taken :], is_whole=self.ended_s is not None)
        except RequestError as error:
            raise refusal(400, str(error), "text") from None

    # Speech.

    async def speak(self) -> AudioDone:
        """Speak all text, and return the last event. Raises the refusal, Away, Idle."""
        if self.settings.is_fed:
            try:
                await self._speak_fed()
            except HTTPException as error:
                is_early = self.heard_s is None and error.status_code == REFUSED
                if not (self.settings.may_fall_back and is_early):
                    raise
                self.settings.is_fed = False  # for later utterances too
                self.num_taken = 0
                await self._speak_sentences()
        else:
            await self._speak_sentences()
        await self._send_audio(await self._encode(self.encoder.finish))
        if self.words is not None:
            try:
                await self._tell_words(await self.words.rest())
            except AlignerFailed as error:
                raise refusal(503, str(error), code="aligner_failed") from None
        return self.done()

    async def cut_off(self) -> None:
        """Send the words of what was spoken when the utterance was cancelled. Raises AlignerFailed."""
        if self.words is None:
            return
        await self._tell_words(await self.words.rest())
        if self.spoken is not None:
            await self._tell_words([await self.words.cut_off(self.spoken.said)])

    def close(self) -> None:
        if self.words is not None:
            self.words.close()

    async def _tell_words(self, pieces: Iterable[list[Word]]) -> None:
        for words in filter(None, pieces):
            self.found += words
            await self.send_event(AudioWords(self.number, words))

    def done(self, reason: str | None = None) -> AudioDone:
        now_s, made = time.perf_counter(), self.frames + self.text_tokens
        timings = Timings(
            self._since_ms(self.ended_s),
            self._since_ms(self.heard_s),
            round(1000 * (now_s - self.began_s), 1),
        )
        usage = Usage(self.input_tokens, made, self.input_tokens + made)
        reason = reason or ("length" if self.was_cut else "stop")
        return AudioDone(self.number, reason, round(self._at_s(self.num_samples), 4), usage, timings)

    def _at_s(self, num_samples: int) -> float:
        """Return the time in the audio, in seconds, at which so many of the model's samples have been heard."""
        return round(num_samples / self.settings.model.sample_rate_hz / self.settings.request.speed, 6)

    def _since_ms(self, then_s: float | None) -> float | None:
        return None if then_s is None else round(1000 * (then_s - self.began_s), 1)

    async def _speak_sentences(self) -> None:
        sentences = MarkdownSentences(self.lexicon) if self._is_markdown else Sentences()
        gap_s = self.settings.request.sentence_gap_s or 0.0
        has_spoken = is_behind_sentence = False
        while self.frames_left != 0:
            part = await self.more()
            is_more = part is not None and not is_pause(part)
            for sentence in sentences.more(part.text) if part is not None and is_more else sentences.rest():
                if self.frames_left != 0:
                    if is_behind_sentence:
                        await self._send_silence(gap_s)
                    await self._speak_segment(self._segment(sentence, is_open=False))
                    has_spoken = is_behind_sentence = True
            if part is None:
                break
            if not is_more:
                await self._pause(part.silence_s)
                is_behind_sentence = False
        if not has_spoken:
            raise refusal(400, "the utterance has no text", "text")

    @property
    def _is_markdown(self) -> bool:
        return self.settings.request.text_format == "markdown"

    async def _speak_fed(self) -> None:
        text, has_spoken = await self._first(), False
        while text is not None and not self.was_cut:
            ending = PassEnd(self.settings.model.piece_s)
            text, is_whole = self._of_pass(ending, text)
            segment = self._segment(text, is_open=True)
            speaking = asyncio.create_task(self._speak_segment(segment))
            feeding = asyncio.create_task(self._feed(segment, ending, is_whole))
            try:
                await asyncio.wait((speaking, feeding), return_when=asyncio.FIRST_COMPLETED)
                if feeding.done() and not speaking.done():
                    feeding.result()
                await speaking
            finally:
                for task in (speaking, feeding):
                    task.cancel()
                await asyncio.gather(speaking, feeding, return_exceptions=True)
            has_spoken, text = True, None if self.was_cut else await self._first()
        if not has_spoken:
            raise refusal(400, "the utterance has no text", "text")

    async def _first(self) -> str | None:
        """Wait for text that is not blank, and make the pauses before it; None if the utterance ends without
        any."""
        first = ""
        while not first.strip():
            part = await self.more()
            if part is None:
                return None
            if is_pause(part):
                await self._pause(part.silence_s)
            else:
                first += part.text
        return first

    def _of_pass(self, ending: PassEnd, text: str) -> tuple[str, bool]:
        """Return what of a new text belongs to the pass, and whether the pass ends with it. The rest stays
        for the next one."""
        end = ending.find(text)
        if end is None:
            return text, False
        self.num_taken -= len(text) - end
        return text[:end], True

    async def _feed(self, segment: Segment, ending: PassEnd, is_whole: bool) -> None:
        """Feed text to a request until the text or the pass ends, or a pause comes. Raises the refusal,
        Idle."""
        await segment.asked.wait()
        engine = self.server.engine
        while not is_whole and (new := await self.more()) is not None:
            if is_pause(new):
                self.num_taken -= len(new.text)  # `_first` makes it
                break
            text, is_whole = self._of_pass(ending, new.text)
            segment.num_chars += len(text)
            segment.said += text
            engine.feed(segment.id, text)
        engine.feed(segment.id, "", is_last=True)

    def _segment(self, text: str, is_open: bool) -> Segment:
        return Segment(
            self.server, self.settings, text, self.seed, self.frames_left, self.voice, is_open, self.words
        )

    @property
    def frames_left(self) -> int | None:
        most = self.settings.request.max_new_tokens
        return None if most is None else max(most - self.frames, 0)

    async def _speak_segment(self, segment: Segment) -> None:
        self.pcm.clear()
        if self.words is not None:
            self.words.begin_request()
        self.spoken, start = segment, self.num_samples
        finished = await segment.speak(self._take)
        self.spoken = None
        self.frames += finished.frames
        self.input_tokens += finished.usage.get("input_tokens", 0)
        self.text_tokens += finished.usage.get("text_tokens", 0)
        self.was_cut |= finished.reason == "length"
        if self.settings.request.loudness is not None:  # the next text may be late
            await self._send_audio(await self._encode(self.encoder.flush))
        if "segment" in (self.settings.request.timestamp_granularities or ()):
            start_s, end_s = self._at_s(start), self._at_s(self.num_samples)
            await self.send_event(AudioSegment(self.number, segment.said, start_s, end_s))
        await self._keep_voice(segment)

    async def _tell_loading(self, state: protocol.ModelState) -> None:
        model = self.settings.model.id
        await self.send_event(ModelLoading(self.number, model, state.stage, state.progress))

    async def _keep_voice(self, segment: Segment) -> None:
        """Keep a random voice: the segment's audio becomes the reference of the next sentences. Raises the
        refusal."""
        model, pcm = self.settings.model, bytes(self.pcm)
        if not self._is_keeping or model.reference_s is None:
            return
        samples = np.frombuffer(pcm, "<i2").astype("<f4") / encode.FULL_SCALE
        if len(samples) >= model.reference_s[0] * model.sample_rate_hz:
            clip = protocol.AudioClip(samples.tobytes(), model.sample_rate_hz)
            clip = self.server.references.recordings.hold(clip, await read_beside(digest, clip))
            self.voice = LoadedVoice(None, [protocol.Reference(clip, segment.request.input)])

    @property
    def _is_keeping(self) -> bool:
        return self.settings.model.keeps_voice and not self.voice.references

    # Audio.

    async def _take(self, message: Message) -> None:
        """Encode and send the PCM of a segment."""
        if message["type"] == LOADING:
            return await self._tell_loading(cast(Any, message)["state"])
        if message["type"] != "http.response.body" or not message["body"]:
            return
        pcm: bytes = message["body"]
        model = self.settings.model
        if self._is_keeping and model.reference_s is not None:
            room = 2 * int(model.reference_s[1] * model.sample_rate_hz) - len(self.pcm)
            self.pcm += pcm[: max(room, 0)]
        self.num_samples += len(pcm) // 2
        await self._send_audio(await self._encode(self.encoder.feed, pcm))
        if self.words is not None:
            await self._tell_words(self.words.ready())

    async def _pause(self, silence_s: float) -> None:
        """Send silence. Raises the refusal."""
        self.silence_s += silence_s
        try:
            check_total(self.silence_s)
        except RequestError as error:
            raise refusal(400, str(error), "text") from None
        await self._send_silence(silence_s)

    async def _send_silence(self, silence_s: float) -> None:
        num_samples = round(silence_s * self.settings.model.sample_rate_hz)
        if not num_samples:
            return
        self.num_samples += num_samples
        if self.words is not None:
            self.words.skip(num_samples)
        await self._send_audio(await self._encode(self.encoder.feed, bytes(2 * num_samples)))

    async def _encode(self, step: Callable[..., bytes], *args: bytes) -> bytes:
        if self.encoder.is_light:
            return step(*args)
        return await asyncio.get_running_loop().run_in_executor(ENCODING, step, *args)

    async def _send_audio(self, audio: bytes) -> None:
        if not audio:
            return
        if self.heard_s is None:
            self.heard_s = time.perf_counter()
            request = self.settings.request
            rate_hz = self.encoder.sample_rate_hz
            await self.send_event(AudioStart(self.number, rate_hz, request.response_format, self.seed))
        if self.settings.is_base64:
            await self.send_event(AudioChunk(self.number, base64.b64encode(audio).decode()))
        else:
            await self.send_bytes(audio)


def heard(number: int, found: Iterable[Word], played_s: float | None) -> AudioHeard:
    """Return which words of an utterance had ended after `played_s` seconds; None: after all that was sent."""
    ended = [each.word for each in found if played_s is None or each.end_s <= played_s]
    return AudioHeard(number, " ".join(ended), len(ended))
