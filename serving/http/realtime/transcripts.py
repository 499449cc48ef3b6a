"""What the user said in a realtime session, in words, for a client that wants to show them. The model that answers
does not read them: it hears the audio."""

from __future__ import annotations

import asyncio
from collections import deque

from litestar.exceptions import HTTPException
from litestar.types import Send

from serving import protocol
from serving.engine_client import Away
from serving.http.chat import NO_CHOICE
from serving.http.errors import log_refused, outcome_of
from serving.http.keys import admit
from serving.http.objects import Model
from serving.http.realtime.conversation import Item
from serving.http.realtime.response import Tell, nothing
from serving.http.references import LoadedVoice
from serving.http.schemas import SpeechRequest
from serving.http.server import Server
from serving.http.socket import away, ended
from serving.http.speech import PartOfSession
from serving.http.transcription import tokens_of

EVENT = "conversation.item.input_audio_transcription"


class Transcript(PartOfSession):
    """The words of an item with a clip, from one request for the engine."""

    def __init__(self, server: Server, model: Model, language: str | None, item: Item, tell: Tell):
        request = SpeechRequest(input="", response_format="pcm", stream=True, language=language)
        super().__init__(server, request, {}, model, NO_CHOICE)
        self.fields.output = "transcript"
        self.item, self.tell = item, tell
        self.text = ""

    async def run(self) -> None:
        """Write the words, and send all events."""
        where = {"item_id": self.item.id, "content_index": 0}
        try:
            admit(0)
            finished = await self.speak(nothing)
        except HTTPException as refused:
            error = log_refused(refused, id=self.id, model=self.model.id, reason=outcome_of(refused))
        except Away as refused:
            error = log_refused(away(refused), id=self.id, model=self.model.id, reason="unavailable")
        else:
            self.item.transcript = self.text.strip()
            said = {"transcript": self.item.transcript, "usage": tokens_of(finished)}
            return await self.tell(f"{EVENT}.completed", **where, **said)
        await self.tell(f"{EVENT}.failed", **where, error=error)

    async def prepare_text(self) -> None:
        """A clip has no text to prepare."""

    async def message(self) -> protocol.Speak:
        message = self.speak_message(LoadedVoice(None, []))
        message.turns.append(protocol.Turn("user", clip=self.item.clip))
        return message

    async def take(self, message: protocol.Outcome, send: Send) -> bool:
        if not isinstance(message, protocol.Text):
            return await super().take(message, send)
        self.text += message.text
        await self.tell(f"{EVENT}.delta", item_id=self.item.id, content_index=0, delta=message.text)
        return True

    async def finish(self, finished: protocol.Finished, send: Send) -> None:
        self.finished = finished
        self.ended(finished.reason, 200)


class Transcripts:
    """The transcripts of a session, one at a time and in order, so that a session takes one slot for them."""

    def __init__(self) -> None:
        self.waiting: deque[Transcript] = deque()
        self.writing: asyncio.Task[None] | None = None

    def add(self, transcript: Transcript) -> asyncio.Task[None]:
        """Return the task that writes it."""
        self.waiting.append(transcript)
        if self.writing is None or self.writing.done():
            self.writing = asyncio.create_task(self._write())
        return self.writing

    async def _write(self) -> None:
        while self.waiting:
            await self.waiting.popleft().run()

    async def close(self) -> None:
        self.waiting.clear()
        await ended(self.writing)
        self.writing = None
