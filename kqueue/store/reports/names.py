"""Resolution of a word on a command line to the object that it names."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sqlalchemy import Engine, Text, cast, select

from kqueue.errors import InvalidRequest
from kqueue.store.engine import transaction
from kqueue.store.evaluations import REAL
from kqueue.store.models import Evaluation, Problem, SearchRun
from kqueue.store.reports.detail import ids_beginning

#: Minimum numbers of hexadecimal digits that identify an object.
_SHORTEST: Final = {"problem": 6, "evaluation": 4, "run": 8}
_HASH_DIGITS: Final = 64
_ID_DIGITS: Final = 32


class Kind(StrEnum):
    """The kinds of objects with names."""

    PROBLEM = "problem"
    BATCH = "batch"
    RUN = "run"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True)
class Named:
    """An object that a word names. ``key`` is the whole hash, name or id."""

    kind: Kind
    key: str


def named(engine: Engine, word: str, *, among: Sequence[Kind] = tuple(Kind)) -> Named:
    """Return the problem, batch, run of a search or evaluation that a word names.

    Problems are named by their hash, with or without ``sha256:``, or else by their label, runs by their name or id, and
    evaluations by their id. The first digits of hashes and ids suffice. A run takes precedence over its batch, which
    has its name. ``among`` are the accepted kinds. Raise InvalidRequest if it names no object, or several.
    """
    matches = [one for one in _matches(engine, word) if one.kind in among]
    runs = {one.key for one in matches if one.kind is Kind.RUN}
    # The evaluations of a search are the batch of its name.
    matches = [one for one in matches if one.kind is not Kind.BATCH or one.key not in runs]
    # A complete name or id takes precedence over prefixes.
    whole = [one for one in matches if word.removeprefix("sha256:").lower() == one.key or word == one.key]
    if len(matches) == 1 or len(whole) == 1:
        return (whole or matches)[0]
    if not matches:
        kinds = " or ".join(filter(None, (", ".join(among[:-1]), *among[-1:]))) or "object"
        raise InvalidRequest(f"{word} is no {kinds}: `kqueue results` and `kqueue search list` list the existing ones")
    could_be = ", ".join(f"{one.kind} {one.key}" for one in matches[:_SHOWN])
    raise InvalidRequest(f"{word} could be {could_be}{', ...' if len(matches) > _SHOWN else ''}: give more of it")


#: Number of matches that an error message lists.
_SHOWN: Final = 4


def _matches(engine: Engine, word: str) -> list[Named]:
    """Return all objects that a word can name, at most two of each kind."""
    named: list[Named] = []
    digits = word.removeprefix("sha256:").lower()
    with transaction(engine) as connection:

        def add(kind: Kind, keys: Collection[object]) -> None:
            named.extend(Named(kind, str(key)) for key in keys)

        if re.fullmatch(rf"[0-9a-f]{{{_SHORTEST['problem']},{_HASH_DIGITS}}}", digits):
            last = digits.ljust(_HASH_DIGITS, "f")
            add(
                Kind.PROBLEM,
                connection.scalars(
                    select(Problem.hash).where(Problem.hash.between(digits, last)).distinct().limit(2)
                ).all(),
            )
        if not word.startswith("sha256:"):
            batch = select(Evaluation.batch).where(Evaluation.batch == word).limit(1)
            add(Kind.BATCH, connection.scalars(batch).all())
            runs = SearchRun.name == word
            if re.fullmatch(rf"[0-9a-f-]{{{_SHORTEST['run']},36}}", word):
                runs |= cast(SearchRun.id, Text).startswith(word)
            add(
                Kind.RUN,
                connection.scalars(select(SearchRun.name).where(runs).order_by(SearchRun.name != word).limit(2)).all(),
            )
            bare = digits.replace("-", "")
            if re.fullmatch(rf"[0-9a-f]{{{_SHORTEST['evaluation']},{_ID_DIGITS}}}", bare):
                add(Kind.EVALUATION, ids_beginning(connection, bare))
        if not named:
            labelled = select(Evaluation.problem_hash).where(Evaluation.problem_label == word, REAL)
            add(Kind.PROBLEM, connection.scalars(labelled.distinct().limit(2)).all())
    return named
