"""Search for words in the sources of kernels and problems, and in logs."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final
from uuid import UUID

from fastapi import Request, Response
from sqlalchemy import Engine

from kqueue.errors import InvalidRequest
from kqueue.store.reports import texts
from kqueue.store.reports.texts import Hit, Where
from kqueue.web.export import Format, FormatQuery, as_file, one_page
from kqueue.web.parameters import CurrentGateway, TextFilter
from kqueue.web.route import Viewer, page, pages

router: Final = pages()

_FOUND: Final = 20
#: Maximum number of results of each kind of text in a file.
_FILE_FOUND: Final = 100
#: Number of lines shown of each text.
_LINES: Final = 3
#: Patterns of the beginning and the end of a word.
_BEGIN: Final = r"(?<![^\W_])"
_END: Final = r"(?![^\W_])"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a text that contains some of the words."""

    number: int
    text: str


#: Results by kind of text.
_Found = dict[Where, list[tuple[Hit, list[Line]]]]


@dataclass(frozen=True, slots=True)
class Result:
    """A text that contains all words, in the form of a list's row."""

    where: Where
    name: str
    label: str | None
    evaluation_id: UUID | None
    at: datetime
    line: int | None
    text: str


@router.get("/search")
async def search(
    request: Request, _: Viewer, gateway: CurrentGateway, q: TextFilter = None, form: FormatQuery = Format.HTML
) -> Response:
    """Show the texts that contain all words."""
    found: _Found = {}
    refused = None
    if q is not None:
        limit = _FOUND if form is Format.HTML else _FILE_FOUND
        try:
            results = await asyncio.gather(*(gateway.read(_read, q, where, limit) for where in Where))
            found = dict(zip(Where, results, strict=True))
        except InvalidRequest as error:
            refused = str(error)
    if form is not Format.HTML and refused is None:
        listed = [_result(where, hit, lines) for where, hits in found.items() for hit, lines in hits]
        return await as_file(form, "search", Result, one_page(listed))
    status = 200 if refused is None else 422
    return page(request, "search.html", status=status, q=q or "", found=found, refused=refused, most=_FOUND)


def _read(engine: Engine, q: str, where: Where, limit: int) -> list[tuple[Hit, list[Line]]]:
    """Return hits with the lines to show, without the whole texts."""
    return [(replace(hit, text=""), _lines(hit.text, q)) for hit in texts.search(engine, q, where, limit=limit)]


def _result(where: Where, hit: Hit, lines: list[Line]) -> Result:
    first = next(iter(lines), None)
    number, text = (None, "") if first is None else (first.number, first.text)
    return Result(where, hit.name, hit.label, hit.evaluation_id, hit.at, number, text)


def _lines(text: str, q: str) -> list[Line]:
    """Return the lines that contain the most words, in the order of the text."""
    words = [
        re.compile(f"{_BEGIN}{re.escape(word)}{'' if is_beginning else _END}", re.IGNORECASE)
        for word, is_beginning in texts.words_of(q)
    ]
    scored = [
        (sum(bool(word.search(line)) for word in words), -number, line)
        for number, line in enumerate(text.splitlines(), 1)
    ]
    best = sorted((one for one in scored if one[0]), reverse=True)[:_LINES]
    return [Line(-number, line.strip()) for _, number, line in sorted(best, key=lambda one: -one[1])]
