"""The state that all routes share: the engine's client, the voices, the metrics and the served models."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litestar.connection import ASGIConnection
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler
from litestar.openapi.datastructures import ResponseSpec

from serving.aligner.client import Aligner
from serving.api_keys import ApiKey
from serving.engine_client import Away, EngineClient
from serving.http.answers import Answers
from serving.http.errors import CHAT, SPEECH, cut, refusal
from serving.http.keys import Keys, current
from serving.http.metrics import Metrics
from serving.http.names import OPENAI_PCM_HZ, Names, Work, is_openais
from serving.http.objects import LOADED, ErrorBody, Model
from serving.http.pronunciations import Dictionary
from serving.http.quota import Quota
from serving.http.references import References
from serving.http.schemas import SpeechRequest
from serving.http.voice_choice import VoiceChoice, VoiceChooser
from serving.http.voices import Voices, default_directory
from serving.http.word_times import WordTimes
from serving.protocol import ModelInfo
from serving.settings import Limits
from zoo.text.pronunciations import Lexicon, Pronunciation

if TYPE_CHECKING:  # needs the extra `otel`
    from serving.http.tracing import Tracing

LOOK_S = 0.5  # how often the server looks whether the engine has told its models

WRONG = ResponseSpec(
    ErrorBody,
    description="a field is wrong: `param` names it, and the message says which values are possible",
)
UNKNOWN = ResponseSpec(ErrorBody, description="there is no such model or voice")
TOO_LARGE = ResponseSpec(ErrorBody, description="the body is too large")
REFUSALS = {
    401: ResponseSpec(ErrorBody, description="the API key is missing or wrong"),
    503: ResponseSpec(
        ErrorBody,
        description="the engine is full or not ready; Retry-After says after how many seconds to try again",
    ),
}


LIMITED = {429: ResponseSpec(ErrorBody, description="the API key's rate or quota is used up")}


class Server:
    """The shared state of one app. Routes get it as `server`; other code finds it at `app.state.server`."""

    def __init__(
        self,
        engine: EngineClient,
        keys: Sequence[ApiKey],
        limits: Limits,
        voices_dir: str | Path | None,
        names: Names,
        tracing: Tracing | None = None,
        pronunciations: Sequence[Pronunciation] = (),
        aligner: Aligner | None = None,
        sentence_gap_s: float | None = None,
        has_private_metrics: bool = False,
    ) -> None:
        self.engine, self.limits, self.names = engine, limits, names
        self.voices = Voices(voices_dir or default_directory(), limits.voices)
        self.bodies = Quota(limits.reading, "large bodies are being read")
        self.sessions = Quota(limits.sessions, "sessions are open")
        self.memory = Quota(
            limits.memory_bytes, "bytes of recordings and whole answers are held", is_bytes=True
        )
        self.voice_chooser = VoiceChooser(self.voices, names)
        self.references = References(self.voice_chooser, limits, self.memory)
        self.answers = Answers()
        self.metrics = Metrics(engine)
        self.keys = Keys(keys, self.metrics)
        self.metrics.sessions.set_function(lambda: self.sessions.num_held)
        self.metrics.memory.set_function(lambda: self.memory.num_held)
        self.tracing = tracing
        self.dictionary = Dictionary(self.voices.directory, pronunciations)  # of all requests
        self.aligner = aligner
        self.sentence_gap_s = sentence_gap_s  # of requests that do not set it
        self.has_private_metrics = has_private_metrics
        self.created = int(time.time())

    async def start_decoders(self) -> None:
        """Start the decoder processes once the engine serves a model that takes recordings."""
        while not any(takes_recordings(info) for info in self.engine.models):
            await asyncio.sleep(LOOK_S)
        self.references.decoders.start()

    @property
    def models(self) -> list[Model]:
        """The served models. Raises Away."""
        if self.engine.status.state != "ready":
            raise Away(self.engine.status)
        return [
            Model.of(
                info,
                self.created,
                self.limits,
                self.names.aliases_of(info.id),
                has_words=self.aligner is not None,
                state=self.engine.states.get(info.id, LOADED),
            )
            for info in self.engine.models
        ]

    def model(self, asked: str) -> Model:
        """Return a model by its ID or an alias. Raises Away, and the refusal."""
        return self._model(self.names.models.get(asked, asked))

    def _model(self, id: str) -> Model:
        models = {model.id: model for model in self.models}
        if id not in models:
            message = f"model {cut(id)!r} is not served; available models: {', '.join(models)}"
            raise refusal(404, message, "model", "model_not_found")
        return models[id]

    def _chosen(self, asked: str | None, work: Work) -> tuple[Model, list[str]]:
        """Return the model that a request names, and warnings. If only one can do the work, a request may leave the
        model out, or name one of OpenAI's. Raises Away, and the refusal."""
        models = self.models
        able = [model for model in models if can(model, work)]
        named = ", ".join(model.id for model in able or models)
        is_theirs = asked is not None and self.names.means(asked, work, models)
        if len(able) == 1 and (asked is None or is_theirs):
            instead = f"model {asked!a} is not served; {able[0].id!a} is used instead"
            return able[0], [] if asked is None else [instead]
        if len(able) > 1 and is_theirs:
            message = f"{asked!r} stands for the only model that can {work}; this server has several: {named}"
            raise refusal(404, message, "model", "model_not_found")
        if asked is None and len(models) > 1:
            message = f"model is missing; this server has several: {named}"
            raise refusal(400, message, "model", "missing_field")
        return models[0] if asked is None else self.model(asked), []

    def answering_model(self, asked: str | None) -> Model:
        """Return the model of a conversation. Raises Away, and the refusal."""
        model, _ = self._chosen(asked, "answer")
        if not model.answers:
            raise _only_speaks(model)
        return model

    def writing_model(self, asked: str | None) -> tuple[Model, list[str]]:
        """Return the model of a chat completion, which answers, or continues a text or a clip; and warnings. Raises
        Away, and the refusal."""
        model, warnings = self._chosen(asked, "answer")
        if not model.answers and not {"text", "continuation"} & set(model.outputs):
            raise _only_speaks(model)
        return model, warnings

    def transcribing_model(self, asked: str | None) -> tuple[Model, list[str]]:
        """Return the model of a transcription, and warnings. Raises Away, and the refusal."""
        model, warnings = self._chosen(asked, "transcribe")
        if not can(model, "transcribe"):
            able = ", ".join(each.id for each in self.models if can(each, "transcribe"))
            others = f"these can: {able}" if able else "no model of this server can"
            raise refusal(400, f"model {model.id!r} cannot transcribe; {others}", "model", "wrong_route")
        return model, warnings

    def chosen_model(self, request: SpeechRequest) -> tuple[Model, list[str]]:
        """Return the model of a speech request, and warnings. Raises Away, and the refusal."""
        model, warnings = self._chosen(request.model, "speak")
        if request.model not in (None, model.id) and is_openais(request.model, "speak"):
            warnings += use_openais_rate(request, model)
            if not self.names.is_strict:
                warnings += drop_instructions(request, model)
        if not can(model, "speak"):
            message = f"model {model.id!r} answers conversations, it does not speak texts: use POST {CHAT}"
            raise refusal(400, message, "model", "wrong_route")
        return model, warnings

    def name_of_conversation(self, given: str | None) -> str | None:
        """Return the name by which engines and gateways know a client's conversation. With an API key it
        follows from both: clients with other keys, of this server or of one that shares its replicas, cannot
        continue it."""
        key = current.get()
        if given is None or key is None:
            return given
        return hmac.digest(key.digest, given.encode(), "sha256").hex()

    def lexicon(self, request: SpeechRequest, model: Model, voice: VoiceChoice) -> Lexicon | None:
        """Return the pronunciations of a request, or None."""
        own, shared = request.pronunciations or (), self.dictionary.entries
        if not own and not shared:
            return None
        first = None if request.given_references else next(iter(model.voices), None)
        return Lexicon.of(own, shared, request.language, voice.name or first)

    def sentence_gap(self, request: SpeechRequest, model: Model) -> float | None:
        """Return the silence between the sentences of a request, in seconds. The server's own is for texts of
        one request, and for models that cut texts."""
        if request.sentence_gap_s is not None or model.piece_s is None or request.conversation is not None:
            return request.sentence_gap_s
        return self.sentence_gap_s

    def word_times(self, request: SpeechRequest, model: Model) -> WordTimes | None:
        """Return the word times of an answer; None if the request does not ask for them."""
        if self.aligner is None or "word" not in (request.timestamp_granularities or ()):
            return None
        return WordTimes(self.aligner, self.memory, model.sample_rate_hz, request.speed)

    def chosen_voice(self, request: SpeechRequest, model: Model) -> VoiceChoice:
        """Return the voice of a request for its model. Raises the refusal."""
        speaking = [info.id for info in self.engine.models if can(info, "speak")]
        return self.voice_chooser.choose(request, model, is_only_model=speaking == [model.id])


def can(model: Model | ModelInfo, work: Work) -> bool:
    match work:
        case "speak":
            return not model.answers or model.performs
        case "answer":
            return model.answers
    return "transcript" in model.outputs


def _only_speaks(model: Model) -> HTTPException:
    message = f"model {model.id!r} speaks texts, it does not answer: use POST {SPEECH}"
    return refusal(400, message, "model", "wrong_route")


def takes_recordings(info: ModelInfo) -> bool:
    return bool(info.reference_s) or info.answers or bool({"transcript", "continuation"} & set(info.outputs))


def use_openais_rate(request: SpeechRequest, model: Model) -> list[str]:
    """Set OpenAI's rate for pcm if the request sets none. Return a warning if the model's rate differs."""
    if request.response_format != "pcm" or request.sample_rate is not None:
        return []
    if model.sample_rate_hz == OPENAI_PCM_HZ:
        return []
    request.sample_rate = OPENAI_PCM_HZ
    return [f"pcm is at {OPENAI_PCM_HZ} Hz, as from OpenAI; set sample_rate for another rate"]


def drop_instructions(request: SpeechRequest, model: Model) -> list[str]:
    """Drop the instructions if the model, which stands in for OpenAI's, takes none. Return a warning."""
    if request.instructions is None or {"instruct", "design"}.intersection(model.modes):
        return []
    request.instructions = None
    return [f"model {model.id!a} takes no instructions; the field is ignored"]


async def check_key(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Check the API key, as a Litestar guard. Raises the refusal."""
    check_api_key(connection.app.state.server, given_key(connection.headers))


def given_key(headers: Mapping[str, str]) -> str | None:
    """Return the API key in the headers: "Authorization: Bearer KEY", "api-key: KEY" as Azure's clients send it,
    or "xi-api-key: KEY" as ElevenLabs' do."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("api-key", headers.get("xi-api-key"))


def check_api_key(server: Server, given: str | None) -> None:
    """Check an API key, and remember whose request the current task serves. Raises the refusal."""
    if not server.keys:
        return
    key = server.keys.find(given or "")
    if key is None:
        message = "the Authorization header must be: Bearer, a space, and the API key of this server"
        raise refusal(401, message, code="invalid_api_key")
    current.set(key)
