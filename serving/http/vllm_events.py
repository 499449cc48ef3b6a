"""The events of a session as vLLM-Omni's clients read them.

They are sent if session.config has `task_type`, which only these clients send. Our events keep all their fields,
and vLLM-Omni's stand next to them:

    audio.start     sentence_index, sentence_text    an utterance is one sentence of theirs
    audio.done      sentence_index, error
    error           message
    session.done    total_sentences                  when all utterances so far have ended
"""

from __future__ import annotations

from typing import Any

import msgspec

from serving.http.events import AudioDone, AudioStart, Failure, ServerEvent


class SessionDone(msgspec.Struct, tag_field="type", tag="session.done"):
    total_sentences: int


def with_their_fields(event: ServerEvent, text: str) -> dict[str, Any]:
    """Return an event with vLLM-Omni's fields. text: of the utterance that speaks."""
    fields: dict[str, Any] = msgspec.to_builtins(event)
    match event:
        case AudioStart(utterance=number):
            fields |= {"sentence_index": number - 1, "sentence_text": text}
        case AudioDone(utterance=number):
            fields |= {"sentence_index": number - 1, "error": False}
        case Failure(error=error):
            fields |= {"message": error.message}
    return fields
