"""Full text search in the sources of problems and kernels, and in logs.

All words must be there, in any order and anywhere. Postgres finds them by the indexes on words
(:func:`kqueue.store.models.words`), which hold a text's first 100,000 characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from psycopg.errors import QueryCanceled
from sqlalchemy import Engine, Select, Text, TextClause, cast, func, select, text, true

from kqueue.errors import DatabaseUnavailable, InvalidRequest
from kqueue.store.engine import transaction
from kqueue.store.models import Evaluation, Kernel, Problem, Verdict, words
from kqueue.store.sql import read

#: The longest text that is looked for, and the most words of it.
MOST_CHARACTERS: Final = 200
_MOST_WORDS: Final = 10
#: The fewest letters before a star: the words that begin with them are added up.
_SHORTEST_BEGINNING: Final = 3
#: The characters of each text that are returned, to show where the words are.
_SHOWN: Final = 100_000
#: Longer queries are broken off: a page must not keep others from the database.
_TIMEOUT_MS: Final = 3000


class Where(StrEnum):
    """What is searched."""

    KERNELS = "kernels"
    PROBLEMS = "problems"
    LOGS = "logs"


@dataclass(frozen=True, slots=True)
class Hit:
    """A text in which all words are.

    Attributes:
        name: the hash of a kernel or problem; the id of an evaluation whose log it is.
        label: what the last evaluation of the kernel or problem called it; None where it did not.
        evaluation_id: an evaluation to look at: the last one of the kernel or problem; None if none is left.
        at: when the source was submitted for the first time, or the evaluation ended, UTC.
        text: the beginning of the source or log.
    """

    name: str
    label: str | None
    evaluation_id: UUID | None
    at: datetime
    text: str


def words_of(asked: str) -> list[tuple[str, bool]]:
    """Return the words that somebody looks for, each with True if it stands for all that begin so."""
    return [(word, star == "*") for word, star in re.findall(r"([^\W_]+)(\*?)", asked[:MOST_CHARACTERS])]


def parse(asked: str) -> str:
    """Return what somebody looks for as a query of Postgres; a word with a star stands for all that begin so.

    Raises:
        InvalidRequest: it has no word, too many, or too short a beginning.
    """
    found = words_of(asked)
    if not found or len(found) > _MOST_WORDS:
        raise InvalidRequest(f"search: give 1 to {_MOST_WORDS} words of letters and digits, such as tl.load or mask")
    for word, is_beginning in found:
        if is_beginning and len(word) < _SHORTEST_BEGINNING:
            raise InvalidRequest(f"search: {word}*: give {_SHORTEST_BEGINNING} characters or more before a star")
    return " & ".join(f"'{word}'" + (":*" if is_beginning else "") for word, is_beginning in found)


def search(engine: Engine, asked: str, where: Where, *, limit: int = 20) -> list[Hit]:
    """Return texts in which all words are, the latest first.

    Args:
        engine: the database.
        asked: words; what stands between them does not count.
        where: what is searched.
        limit: at most so many.

    Raises:
        InvalidRequest: as :func:`parse`, or it took too long.
    """
    wanted = {"wanted": parse(asked)}
    query = _logs(limit) if where is Where.LOGS else _sources(Kernel if where is Where.KERNELS else Problem, limit)
    try:
        with transaction(engine) as connection:
            connection.execute(text(f"SET LOCAL statement_timeout = {_TIMEOUT_MS}"))
            return read(Hit, connection.execute(query, wanted))
    except DatabaseUnavailable as error:
        if isinstance(getattr(error.__cause__, "orig", None), QueryCanceled):
            raise InvalidRequest(f"search: it took more than {_TIMEOUT_MS / 1000:g} s: give rarer words") from None
        raise


def _fits(of: str) -> TextClause:
    # A colon would name a parameter.
    has = words(of).replace(":", r"\:")
    return text(f"{has} @@ to_tsquery('simple', :wanted)")


def _sources(kind: type[Kernel | Problem], limit: int) -> Select[*tuple[Any, ...]]:
    few = (
        select(kind.hash, kind.created_at, func.left(kind.source, _SHOWN).label("text"))
        .where(_fits(f"{kind.__tablename__}.source"))
        .order_by(kind.created_at.desc(), kind.hash.desc())
        .limit(limit)
        .subquery()
    )
    of, label = (
        (Evaluation.kernel_hash, Evaluation.kernel_label)
        if kind is Kernel
        else (Evaluation.problem_hash, Evaluation.problem_label)
    )
    last = (
        select(Evaluation.id, label.label("label"))
        .where(of == few.c.hash)
        .order_by(Evaluation.submitted_at.desc())
        .limit(1)
        .lateral()
    )
    return (
        select(
            few.c.hash.label("name"),
            last.c.label,
            last.c.id.label("evaluation_id"),
            few.c.created_at.label("at"),
            few.c.text,
        )
        .outerjoin(last, true())
        .order_by(few.c.created_at.desc(), few.c.hash.desc())
    )


def _logs(limit: int) -> Select[*tuple[Any, ...]]:
    few = (
        select(Verdict.evaluation_id, Verdict.finished_at, func.left(Verdict.log, _SHOWN).label("text"))
        .where(text("verdicts.log <> ''"), _fits("verdicts.log"))
        .order_by(Verdict.finished_at.desc())
        .limit(limit)
        .subquery()
    )
    return (
        select(
            cast(few.c.evaluation_id, Text).label("name"),
            Evaluation.kernel_label.label("label"),
            few.c.evaluation_id,
            few.c.finished_at.label("at"),
            few.c.text,
        )
        .join(Evaluation, Evaluation.id == few.c.evaluation_id)
        .order_by(few.c.finished_at.desc())
    )
