"""Full text search in the sources of problems and kernels, and in logs.

All words must be there, in any order and anywhere. In problems and logs Postgres finds them by the indexes on words
(:func:`kqueue.store.models.words`), which hold a text's first 100,000 characters. Kernels have none, as it would cost
every submission a millisecond: the latest ones are read.
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
from kqueue.store.evaluations import REAL, REAL_KERNEL, REAL_PROBLEM
from kqueue.store.models import Evaluation, Kernel, Problem, Verdict, words
from kqueue.store.sql import any_text, any_uuid, read

#: The longest text that is looked for, and the most words of it.
MOST_CHARACTERS: Final = 200
_MOST_WORDS: Final = 10
#: The fewest letters before a star: the words that begin with them are added up.
_SHORTEST_BEGINNING: Final = 3
#: The characters of each text that are returned, to show where the words are.
_SHOWN: Final = 100_000
#: The most texts with all words among which the latest are chosen.
_LOOKED_AT: Final = 2000
#: The latest texts that are looked at if more have them.
_RECENT: Final = 100
#: The latest kernels, which are all that are looked at.
_KERNELS: Final = 5000
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

    Words that are in very many texts are looked for in :data:`_LOOKED_AT` of them and in the :data:`_RECENT` latest
    texts, so the latest hits of words that most texts have are found too. Of kernels the latest :data:`_KERNELS` are
    looked at.

    Args:
        engine: the database.
        asked: words; what stands between them does not count.
        where: what is searched.
        limit: at most so many.

    Raises:
        InvalidRequest: as :func:`parse`, or it took too long.
    """
    wanted = parse(asked)
    found: set[tuple[Any, datetime]] = set()
    try:
        if where is Where.KERNELS:
            found |= _keys(engine, _latest_kernels(asked, limit))
        else:
            found |= _keys(engine, _by_index(where), wanted)
            if len(found) == _LOOKED_AT:
                found |= _keys(engine, _latest(where), wanted)
    except DatabaseUnavailable as error:
        if not isinstance(getattr(error.__cause__, "orig", None), QueryCanceled):
            raise
        if not found:
            raise InvalidRequest(f"search: it took more than {_TIMEOUT_MS / 1000:g} s: give rarer words") from None
    latest_of = [name for name, _ in sorted(found, key=lambda one: (one[1], one[0]), reverse=True)[:limit]]
    with transaction(engine) as connection:
        return read(Hit, connection.execute(_shown(where, latest_of)))


def _by_index(where: Where) -> Select[*tuple[Any, ...]]:
    key, at, _ = _TEXTS[where]
    return select(key, at).where(*_conditions(where)).limit(_LOOKED_AT)


def _latest(where: Where) -> Select[*tuple[Any, ...]]:
    key, at, _ = _TEXTS[where]
    latest = select(key).order_by(at.desc()).limit(_RECENT)
    if where is Where.LOGS:
        latest = latest.where(_HAS_LOG)
    recent = latest.cte("recent").prefix_with("MATERIALIZED", dialect="postgresql")
    return select(key, at).join(recent, recent.c[0] == key).where(*_conditions(where))


def _latest_kernels(asked: str, limit: int) -> Select[*tuple[Any, ...]]:
    """Return the query for the latest kernels that have all words; it reads no further than to the last of these."""
    text_of = func.left(Kernel.source, _SHOWN).label("text")
    latest = select(Kernel.hash, Kernel.created_at, text_of).order_by(Kernel.created_at.desc(), Kernel.hash.desc())
    recent = latest.limit(_KERNELS).subquery("recent")
    fits = [
        # A word is nothing but letters and digits: no sign of it means something in a pattern.
        recent.c.text.op("~*")(rf"(^|[^[:alnum:]]){word}" + ("" if is_beginning else "($|[^[:alnum:]])"))
        for word, is_beginning in words_of(asked)
    ]
    return (
        select(recent.c.hash, recent.c.created_at)
        .where(*fits)
        .order_by(recent.c.created_at.desc(), recent.c.hash.desc())
        .limit(limit)
    )


def _conditions(where: Where) -> list[TextClause]:
    fits = _fits(_TEXTS[where][2])
    return [_HAS_LOG, fits] if where is Where.LOGS else [fits]


def _keys(engine: Engine, query: Select[*tuple[Any, ...]], wanted: str = "") -> set[tuple[Any, datetime]]:
    """Return the keys and times of what a query finds."""
    with transaction(engine) as connection:
        connection.execute(text(f"SET LOCAL statement_timeout = {_TIMEOUT_MS}"))
        # How frequent words are is guessed too badly: it would rather read every source.
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        return {(row[0], row[1]) for row in connection.execute(query, {"wanted": wanted} if wanted else {})}


def _fits(of: str) -> TextClause:
    # A colon would name a parameter.
    has = words(of).replace(":", r"\:")
    return text(f"{has} @@ to_tsquery('simple', :wanted)")


def _shown(where: Where, keys: list[Any]) -> Select[*tuple[Any, ...]]:
    """Return the query for what is shown of texts."""
    if where is Where.LOGS:
        return (
            select(
                cast(Verdict.evaluation_id, Text).label("name"),
                Evaluation.kernel_label.label("label"),
                Verdict.evaluation_id,
                Verdict.finished_at.label("at"),
                func.left(Verdict.log, _SHOWN).label("text"),
            )
            .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
            .where(Verdict.evaluation_id == any_uuid(keys), REAL)
            .order_by(Verdict.finished_at.desc(), Verdict.evaluation_id.desc())
        )
    kind = Kernel if where is Where.KERNELS else Problem
    of, label = (
        (Evaluation.kernel_hash, Evaluation.kernel_label)
        if kind is Kernel
        else (Evaluation.problem_hash, Evaluation.problem_label)
    )
    last = (
        select(Evaluation.id, label.label("label"))
        .where(of == kind.hash)
        .order_by(Evaluation.submitted_at.desc())
        .limit(1)
        .lateral()
    )
    return (
        select(
            kind.hash.label("name"),
            last.c.label,
            last.c.id.label("evaluation_id"),
            kind.created_at.label("at"),
            func.left(kind.source, _SHOWN).label("text"),
        )
        .select_from(kind)
        .outerjoin(last, true())
        .where(kind.hash == any_text(keys), REAL_KERNEL if kind is Kernel else REAL_PROBLEM)
        .order_by(kind.created_at.desc(), kind.hash.desc())
    )


#: As the index on logs has it.
_HAS_LOG: Final = text("verdicts.log <> ''")
#: The key of each kind of text that has an index, its time, and the column in which it is.
_TEXTS: Final[dict[Where, tuple[Any, Any, str]]] = {
    Where.PROBLEMS: (Problem.hash, Problem.created_at, "problems.source"),
    Where.LOGS: (Verdict.evaluation_id, Verdict.finished_at, "verdicts.log"),
}
