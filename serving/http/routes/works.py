"""The routes of works: /v1/audio/works."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from litestar import Request, Response, delete, get, post
from litestar.enums import RequestEncodingType
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import Body

from serving.books.manuscript import BOOK, chapter_file
from serving.http import ranges
from serving.http.disconnect import run_while_connected
from serving.http.errors import refusal
from serving.http.foreign_fields import translated
from serving.http.objects import ErrorBody
from serving.http.options import options_of
from serving.http.server import REFUSALS, TOO_LARGE, WRONG, Server
from serving.http.works.schemas import WORKS, WorkDeleted, WorkList, WorkObject, WorkUpload
from serving.http.works.works import Works, options_in

UNKNOWN = ResponseSpec(ErrorBody, description="there is no such work, or this server keeps none")
NO_ROOM = ResponseSpec(ErrorBody, description="the disk is full, or the works have reached their limit")
EARLY = ResponseSpec(ErrorBody, description="it is not complete yet (code not_complete)")
MEDIA_TYPE = "audio/mp4"
AUDIO = ResponseSpec(bytes, description="the file", media_type=MEDIA_TYPE, generate_examples=False)
PART = ResponseSpec(
    bytes, description="the part in the header Range", media_type=MEDIA_TYPE, generate_examples=False
)
BEHIND = ResponseSpec(ErrorBody, description="the range begins behind the end of the file")
FILES = {200: AUDIO, 206: PART, 404: UNKNOWN, 409: EARLY, 416: BEHIND, **REFUSALS}


@get(WORKS, responses=REFUSALS)
async def list_works(works: Works) -> WorkList:
    """List the works of the client's API key, without their chapters."""
    return WorkList([work.described(has_chapters=False) for work in works.of_client()], works.accepts)


@post(
    WORKS,
    status_code=200,
    responses={400: WRONG, 404: UNKNOWN, 413: TOO_LARGE, 507: NO_ROOM, **REFUSALS},
)
async def add_work(
    data: Annotated[WorkUpload, Body(media_type=RequestEncodingType.MULTI_PART)],
    request: Request[Any, Any, Any],
    server: Server,
    works: Works,
) -> Response[WorkObject]:
    """Take a document, and speak it in the background into an audiobook with chapter marks."""
    works.check_is_on()
    named = {"model": data.model, "voice": data.voice}
    fields = options_in(data.options) | {name: value for name, value in named.items() if value is not None}
    fields = translated(fields, is_strict=server.names.is_strict)
    fields.setdefault("seed", secrets.randbits(32))
    asked = works.checked(fields)
    warnings = [*asked.warnings, *asked.voice.warnings]
    with works.reading.take():
        await run_while_connected(works.voice(asked), request.receive)
        document = await data.document.read()
        adding = works.add(data.document.filename, document, fields | {"model": asked.model.id}, asked)
        work = await run_while_connected(adding, request.receive)
    return Response(work, headers={"x-warning": "; ".join(warnings)} if warnings else None)


@get(f"{WORKS}/{{work_id:str}}", responses={404: UNKNOWN, **REFUSALS})
async def one_work(work_id: str, works: Works) -> WorkObject:
    """Return a work with its chapters and its progress."""
    return works.find(work_id).described(has_chapters=True)


@post(f"{WORKS}/{{work_id:str}}/resume", status_code=200, responses={404: UNKNOWN, **REFUSALS})
async def resume_work(work_id: str, works: Works) -> WorkObject:
    """Continue a work that failed. Another one stays as it is."""
    work = works.find(work_id)
    works.resume(work)
    return work.described(has_chapters=True)


@delete(f"{WORKS}/{{work_id:str}}", status_code=200, responses={404: UNKNOWN, **REFUSALS})
async def remove_work(work_id: str, works: Works) -> WorkDeleted:
    """Delete a work and its files, also while it is spoken."""
    await works.remove(works.find(work_id))
    return WorkDeleted(work_id)


@get(f"{WORKS}/{{work_id:str}}/book.m4b", responses=FILES)
async def book_of_work(work_id: str, works: Works, request: Request[Any, Any, Any]) -> Response[Any]:
    """Return the finished book, with chapter marks, or a part of the file."""
    work = works.find(work_id)
    if work.facts.audio_s is None:
        progress = work.described(has_chapters=False).progress
        raise refusal(409, f"the book is not complete: {progress:.0%} of it is spoken", code="not_complete")
    return ranges.answer(work.directory / BOOK, f"{work.facts.title}.m4b", MEDIA_TYPE, request)


@get(f"{WORKS}/{{work_id:str}}/chapters/{{number:int}}", responses={400: WRONG, **FILES})
async def chapter_of_work(
    work_id: str, number: int, works: Works, request: Request[Any, Any, Any]
) -> Response[Any]:
    """Return a finished chapter, as AAC in MP4, or a part of the file."""
    work = works.find(work_id)
    chapters = work.facts.chapters
    if not 1 <= number <= len(chapters):
        raise refusal(404, f"the work has chapters 1 to {len(chapters)}", code="chapter_not_found")
    if chapters[number - 1].audio_s is None:
        raise refusal(409, f"chapter {number} is not complete yet", code="not_complete")
    name = f"{work.facts.title} {number}.m4a"
    return ranges.answer(work.directory / chapter_file(number), name, MEDIA_TYPE, request)


ROUTES = [
    options_of(list_works, add_work),
    list_works,
    add_work,
    options_of(one_work, remove_work),
    one_work,
    resume_work,
    remove_work,
    book_of_work,
    chapter_of_work,
]
