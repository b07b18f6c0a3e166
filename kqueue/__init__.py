"""kqueue judges GPU kernels, locally or on a fleet of workers, and attributes each failure to its cause.

::

    import kqueue

    outcome = kqueue.judge(problem=REFERENCE, kernel=SOURCE, backend="triton")  # on this machine
    print(outcome.category, outcome.runtime_ms, outcome.speedup)

    with kqueue.Client() as kq:  # on a fleet
        verdict = kq.evaluate(problem=REFERENCE, kernel=SOURCE, backend="triton")

The names below are the public interface. All except the exceptions are imported on first use, so that
``import kqueue`` is fast.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from kqueue.errors import AccessRefused as AccessRefused
from kqueue.errors import BrokerUnavailable as BrokerUnavailable
from kqueue.errors import BudgetSpent as BudgetSpent
from kqueue.errors import ConfigError as ConfigError
from kqueue.errors import DatabaseUnavailable as DatabaseUnavailable
from kqueue.errors import EvaluationFailed as EvaluationFailed
from kqueue.errors import IdempotencyConflict as IdempotencyConflict
from kqueue.errors import InvalidRequest as InvalidRequest
from kqueue.errors import JudgeUnavailable as JudgeUnavailable
from kqueue.errors import KqueueError as KqueueError
from kqueue.errors import LaneUnavailable as LaneUnavailable
from kqueue.errors import LocalFleetError as LocalFleetError
from kqueue.errors import SchemaMismatch as SchemaMismatch
from kqueue.errors import ServerUnavailable as ServerUnavailable
from kqueue.errors import ServiceError as ServiceError
from kqueue.errors import UnknownEvaluation as UnknownEvaluation
from kqueue.errors import UnknownLane as UnknownLane
from kqueue.errors import UnknownProblem as UnknownProblem
from kqueue.errors import WaitTimeout as WaitTimeout

if TYPE_CHECKING:
    from kqueue.categories import Blame as Blame
    from kqueue.categories import Category as Category
    from kqueue.client import AsyncClient as AsyncClient
    from kqueue.client import AsyncTicket as AsyncTicket
    from kqueue.client import Client as Client
    from kqueue.client import Ticket as Ticket
    from kqueue.client.remote import AsyncRemoteClient as AsyncRemoteClient
    from kqueue.client.remote import RemoteClient as RemoteClient
    from kqueue.config import Config as Config
    from kqueue.contract import Deadlines as Deadlines
    from kqueue.contract import Limits as Limits
    from kqueue.contract import Outcome as Outcome
    from kqueue.contract import Phase as Phase
    from kqueue.contract import Precision as Precision
    from kqueue.contract import Request as Request
    from kqueue.contract import Settings as Settings
    from kqueue.contract import Timing as Timing
    from kqueue.contract import Tolerance as Tolerance
    from kqueue.contract import Verdict as Verdict
    from kqueue.evidence import Evidence as Evidence
    from kqueue.evidence import Facts as Facts
    from kqueue.evidence import Measurement as Measurement
    from kqueue.features.duel.client import duel as duel
    from kqueue.features.duel.duels import Duel as Duel
    from kqueue.judging import LocalJudge as LocalJudge
    from kqueue.judging import judge as judge
    from kqueue.states import Priority as Priority

_HOMES: Final = {
    "kqueue.categories": ["Blame", "Category"],
    "kqueue.client": ["AsyncClient", "AsyncTicket", "Client", "Ticket"],
    "kqueue.config": ["Config"],
    "kqueue.contract": [
        "Deadlines", "Limits", "Outcome", "Phase", "Precision", "Request", "Settings", "Timing", "Tolerance", "Verdict",
    ],
    "kqueue.client.remote": ["AsyncRemoteClient", "RemoteClient"],
    "kqueue.evidence": ["Evidence", "Facts", "Measurement"],
    "kqueue.judging": ["LocalJudge", "judge"],
    "kqueue.states": ["Priority"],
}  # fmt: skip
_HOME: Final = {name: home for home, names in _HOMES.items() for name in names}


def _homes() -> dict[str, str]:
    """Return the modules of all public names, with the ones of features."""
    from kqueue.registry import features

    return _HOME | {name: home for feature in features().values() for name, home in feature.names.items()}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    # An import of a module asks for its name too, and must not read the features.
    if home is None and not name.startswith("_") and find_spec(f"{__name__}.{name}") is None:
        home = _homes().get(name)
    if home is None:
        raise AttributeError(f"module 'kqueue' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_homes()])
