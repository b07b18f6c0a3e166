"""Full text search in the sources of problems and kernels, and in logs.

A text must contain all words, in any order. In problems and logs Postgres finds them with the indexes on words
(:func:`kqueue.store.models.words`), which cover a text's first 100,000 characters. Kernels have no such index, because
it would cost every submission a millisecond: the latest ones are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from psycopg.errors import QueryCanceled
from sqlalchemy import ColumnElement, Engine, Select, Text, TextClause, cast, func, select, text, true

from kqueue.errors import DatabaseUnavailable, InvalidRequest
from kqueue.shapes import public
from kqueue.store.engine import FLEET, acting, transaction, viewer
from kqueue.store.evaluations import ITS_KERNEL, ITS_PROBLEM, REAL, REAL_KERNEL, REAL_PROBLEM, no_trial
from kqueue.store.models import Evaluation, Kernel, Problem, Verdict, words
from kqueue.store.sql import any_text, any_uuid, read

#: Maximum length of a query.
MOST_CHARACTERS: Final = 200
#: Maximum number of words of a query.
_MOST_WORDS: Final = 10
#: Minimum number of letters before a star, because all words with that prefix are searched.
_SHORTEST_BEGINNING: Final = 3
#: Number of characters of each text that are returned.
_SHOWN: Final = 100_000
#: Maximum number of matching texts from which the latest are chosen.
_LOOKED_AT: Final = 2000
#: Number of the latest texts that are also searched if the matches exceed that number.
_RECENT: Final = 100
#: Number of the latest kernels, to which their search is limited.
_KERNELS: Final = 5000
#: Milliseconds after which a query is aborted, so that a page does not occupy the database.
_TIMEOUT_MS: Final = 3000


class Where(StrEnum):
    """The kind of texts to search."""

    KERNELS = "kernels"
    PROBLEMS = "problems"
    LOGS = "logs"


@dataclass(frozen=True, slots=True)
class Hit:
    """A text that contains all words.

    Attributes:
        name: the hash of a kernel or problem, or the id of an evaluation for its log.
        label: the label from the last evaluation of the kernel or problem, or None.
        evaluation_id: the last evaluation of the kernel or problem, or the log's evaluation. None if none is left.
        at: the first submission of the source, or the end of the evaluation, UTC.
        text: the beginning of the source or log.
    """

    name: str
    label: str | None
    evaluation_id: UUID | None
    at: datetime
    text: str


def words_of(asked: str) -> list[tuple[str, bool]]:
    """Return the words of a search, each with True if it is a prefix."""
    return [(word, star == "*") for word, star in re.findall(r"([^\W_]+)(\*?)", asked[:MOST_CHARACTERS])]


def parse(asked: str) -> str:
    """Return a search as a query of Postgres. A word with a star matches all words with that prefix.

    Raise InvalidRequest if it has no word, too many words, or too short a prefix.
    """
    parsed = words_of(asked)
    if not parsed or len(parsed) > _MOST_WORDS:
        raise InvalidRequest(f"search: give 1 to {_MOST_WORDS} words of letters and digits, such as tl.load or mask")
    for word, is_beginning in parsed:
        if is_beginning and len(word) < _SHORTEST_BEGINNING:
            raise InvalidRequest(f"search: {word}*: give {_SHORTEST_BEGINNING} characters or more before a star")
    return " & ".join(f"'{word}'" + (":*" if is_beginning else "") for word, is_beginning in parsed)


def search(engine: Engine, asked: str, where: Where, *, limit: int = 20) -> list[Hit]:
    """Return texts of a kind that contain all words, the latest first. Characters between words are ignored.

    If very many texts match, :data:`_LOOKED_AT` of them and the :data:`_RECENT` latest texts are searched, so that the
    latest hits are found too. For kernels only the latest :data:`_KERNELS` are searched. Raise InvalidRequest if the
    search is invalid (:func:`parse`), or took too long.
    """
    wanted = parse(asked)
    keys: set[tuple[Any, datetime]] = set()
    try:
        if where is Where.KERNELS:
            keys |= _keys(engine, _latest_kernels(asked, limit))
        else:
            key, at, _ = _TEXTS[where]
            keys |= _keys(engine, select(key, at).where(*_conditions(where)).limit(_LOOKED_AT), wanted)
            if len(keys) == _LOOKED_AT:
                keys |= _keys(engine, _latest(where), wanted)
    except DatabaseUnavailable as error:
        if not isinstance(getattr(error.__cause__, "orig", None), QueryCanceled):
            raise
        if not keys:
            raise InvalidRequest(f"search: it took more than {_TIMEOUT_MS / 1000:g} s: give rarer words") from None
    latest_of = [name for name, _ in sorted(keys, key=lambda one: (one[1], one[0]), reverse=True)[:limit]]
    with transaction(engine) as connection:
        hits = read(Hit, connection.execute(_shown(where, latest_of)))
    return (
        hits if where is not Where.PROBLEMS else [shown for hit in hits if (shown := _public(hit, asked)) is not None]
    )


def _public(hit: Hit, asked: str) -> Hit | None:
    """Return a problem without shapes that are held out, or None if only those contain a word."""
    text = public(hit.text)
    if text == hit.text:
        return hit
    patterns = (
        rf"(?<![^\W_]){word}" + ("" if is_beginning else r"(?![^\W_])") for word, is_beginning in words_of(asked)
    )
    return replace(hit, text=text) if all(re.search(one, text, re.IGNORECASE) for one in patterns) else None


def _latest(where: Where) -> Select[*tuple[Any, ...]]:
    key, at, _ = _TEXTS[where]
    latest = select(key).where(*_own(key.class_)).order_by(at.desc()).limit(_RECENT)
    if where is Where.LOGS:
        latest = latest.where(_HAS_LOG)
    recent = latest.cte("recent").prefix_with("MATERIALIZED", dialect="postgresql")
    return select(key, at).join(recent, recent.c[0] == key).where(*_conditions(where))


def _latest_kernels(asked: str, limit: int) -> Select[*tuple[Any, ...]]:
    """Return the query for the latest kernels with all words. It stops reading at the last one that is needed."""
    text_of = func.left(Kernel.source, _SHOWN).label("text")
    latest = (
        select(Kernel.hash, Kernel.created_at, text_of)
        .where(*_own(Kernel))
        .order_by(Kernel.created_at.desc(), Kernel.hash.desc())
    )
    recent = latest.limit(_KERNELS).subquery("recent")
    fits = [
        # A word consists of letters and digits only, so no character of it is special in a pattern.
        recent.c.text.op("~*")(rf"(^|[^[:alnum:]]){word}" + ("" if is_beginning else "($|[^[:alnum:]])"))
        for word, is_beginning in words_of(asked)
    ]
    return (
        select(recent.c.hash, recent.c.created_at)
        .where(*fits)
        .order_by(recent.c.created_at.desc(), recent.c.hash.desc())
        .limit(limit)
    )


def _conditions(where: Where) -> list[TextClause | ColumnElement[bool]]:
    key, _, column = _TEXTS[where]
    return [*([_HAS_LOG] if where is Where.LOGS else []), _fits(column), *_own(key.class_)]


def _own(kind: type[Problem | Kernel | Verdict]) -> list[ColumnElement[bool]]:
    """Return the condition for the rows that the caller sees."""
    return [kind.owner == viewer().owner] if viewer().held else []


def _keys(engine: Engine, query: Select[*tuple[Any, ...]], wanted: str = "") -> set[tuple[Any, datetime]]:
    """Return the keys and times of a query's results."""
    # Postgres cannot use an index of words below row-level security. The texts themselves are read below it.
    with acting(FLEET), transaction(engine) as connection:
        connection.execute(text(f"SET LOCAL statement_timeout = {_TIMEOUT_MS}"))
        # Postgres estimates the frequency of words so badly that it would otherwise read every source.
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        return {(row[0], row[1]) for row in connection.execute(query, {"wanted": wanted} if wanted else {})}


def _fits(of: str) -> TextClause:
    # The colon is escaped because SQLAlchemy would read it as the start of a parameter.
    has = words(of).replace(":", r"\:")
    return text(f"{has} @@ to_tsquery('simple', :wanted)")


def _shown(where: Where, keys: list[Any]) -> Select[*tuple[Any, ...]]:
    """Return the query for the fields of :class:`Hit`."""
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
            .where(Verdict.evaluation_id == any_uuid(keys), REAL, no_trial(Evaluation.batch))
            .order_by(Verdict.finished_at.desc(), Verdict.evaluation_id.desc())
        )
    kind = Kernel if where is Where.KERNELS else Problem
    its, label = (ITS_KERNEL, Evaluation.kernel_label) if kind is Kernel else (ITS_PROBLEM, Evaluation.problem_label)
    last = (
        select(Evaluation.id, label.label("label"))
        .where(its)
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


#: The condition of the index on logs.
_HAS_LOG: Final = text("verdicts.log <> ''")
#: Key, time and column of each kind of text with an index.
_TEXTS: Final[dict[Where, tuple[Any, Any, str]]] = {
    Where.PROBLEMS: (Problem.hash, Problem.created_at, "problems.source"),
    Where.LOGS: (Verdict.evaluation_id, Verdict.finished_at, "verdicts.log"),
}
