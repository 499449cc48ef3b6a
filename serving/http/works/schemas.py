"""The bodies of the routes of works."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from litestar.datastructures import UploadFile
from msgspec import Meta

from serving.http.objects import Error
from serving.http.schemas import Name, fields_of

WORKS = "/v1/audio/works"
State = Literal["waiting", "speaking", "joining", "complete", "failed"]


class WorkUpload(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The multipart form of POST /v1/audio/works."""

    document: Annotated[
        UploadFile,
        Meta(
            description="a file with the text: .epub, .md, .markdown or .txt; a server without the extra `books` "
            "takes no .epub"
        ),
    ]
    model: Annotated[
        Name | None,
        Meta(description="the ID of a served model (GET /v1/models); required if several speak texts"),
    ] = None
    voice: Annotated[
        Name | None,
        Meta(description="the name of a voice (GET /v1/audio/voices); default: the model's first voice"),
    ] = None
    options: Annotated[
        str | None,
        Meta(
            description="a JSON object with other fields of POST /v1/audio/speech and options of the model, such as "
            '{"seed": 7, "speed": 1.1}'
        ),
    ] = None


class ChapterObject(msgspec.Struct):
    """A chapter of a work."""

    number: int  # from 1
    title: str
    num_chars: int
    progress: float  # 0 to 1
    audio_s: float | None  # null until the chapter can be heard


class WorkObject(msgspec.Struct, kw_only=True):
    """A work. waiting: earlier works are spoken first; joining: all is spoken, and the book is being written."""

    id: str
    title: str
    author: str | None
    document: str  # the name of the file
    model: str
    voice: str | None
    seed: int
    created_at: int  # seconds since 1970
    state: State
    progress: float  # 0 to 1, by characters
    audio_s: float | None  # of the complete book
    num_bytes: int  # of its files on the server
    error: Error | None  # why it failed; POST {id}/resume tries again
    num_chapters: int
    chapters: list[ChapterObject] | None = None  # null in the list of works
    object: Literal["audio.work"] = "audio.work"


class WorkList(msgspec.Struct):
    """All works, the oldest first. accepts: the endings of documents that this server takes; empty: none, because its
    operator has chosen no directory for works."""

    data: list[WorkObject]
    accepts: list[str]
    object: Literal["list"] = "list"


class WorkDeleted(msgspec.Struct):
    id: str
    deleted: Literal[True] = True
    object: Literal["audio.work.deleted"] = "audio.work.deleted"


FIELDS = {WORKS: fields_of(WorkUpload)}
BODIES = (WorkUpload, WorkObject, WorkList, WorkDeleted)
