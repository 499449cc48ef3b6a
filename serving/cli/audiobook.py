"""The command `zoo audiobook`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from serving.cli.batch import EngineFlags, defaults_of, made, summary
from serving.cli.common import SpeechModel, app, plural
from serving.cli.flags import with_groups
from serving.cli.request_flags import Loudness, ModelOptions, Pronunciations, RequestFlags
from zoo import SMALL_VOICE
from zoo.text.pronunciations import read_file


@app.command()
@with_groups
def audiobook(
    *,
    book: Annotated[
        Path, Argument(metavar="BOOK", help="The book is an .epub, .md, .markdown or .txt file.")
    ],
    out: Annotated[
        Path | None,
        Option(
            "-o",
            "--output",
            help="The audiobook goes into this file: .m4b, .m4a or .mka. Default: the book's name with .m4b.",
        ),
    ] = None,
    model: SpeechModel = str(SMALL_VOICE),
    pronunciations: Pronunciations = None,
    asked: RequestFlags,
    loudness: Loudness = None,
    options: ModelOptions = [],  # noqa: B006
    running: EngineFlags,
) -> int:
    """Speak a book into one file with chapter marks.

    The chapters of an EPUB are those of its table of contents. In Markdown they begin with a heading, and in
    plain text with a line such as "Chapter 2".

    Parts of the book are kept in a directory next to the output until it is complete. To continue an
    interrupted run, start it again.
    """
    from serving.books import join
    from serving.books.read import read_book
    from serving.tools.audiobook import items_of
    from serving.tools.batch import Results

    asked.check()
    read = read_book(book)
    out = out or book.with_suffix(".m4b")
    if out.suffix.lower() not in join.CODECS:
        raise ValueError(f"{out} must end in one of: {', '.join(join.CODECS)}")
    if out.is_dir():
        raise ValueError(f"{out} is a directory, and the audiobook would be a file")
    items = items_of(read, defaults_of(asked, loudness))
    words = [] if pronunciations is None else read_file(pronunciations)
    parts = Results(out.with_name(f"{out.name}.parts"))
    with parts.held():
        every = [item for chapter in items for item in chapter]
        tally = made(every, parts, "flac", model, running, options, Path.cwd(), words, {}, are_alike=True)
        if tally.is_interrupted or tally.failed:
            print(
                f"{out} is not complete: {summary(tally)}; its parts are in {parts.directory}",
                file=sys.stderr,
            )
            return 130 if tally.is_interrupted else 1
        files = [[parts.directory / f"{item.id}.flac" for item in chapter] for chapter in items]
        long_s = join.join(read, files, out)
        shutil.rmtree(parts.directory)
    print(f"{out}: {plural(len(items), 'chapter')}, {long_s / 60:.1f} min of audio; {summary(tally)}")
    return 0
