"""Evaluations of a command that can be interrupted and run again, which `kqueue kernelbench` and `rejudge` share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Final

from kqueue.cli.render import say
from kqueue.errors import InvalidRequest

if TYPE_CHECKING:
    from kqueue.client import Client, Ticket
    from kqueue.contract import Request, Verdict

#: Number of evaluations submitted in one transaction.
_CHUNK: Final = 100
#: Exit status if some kernels have no result, so that the command must be run again.
INCOMPLETE: Final = 3


def judge(
    client: Client, token: str, requests: Mapping[str, Request]
) -> Iterator[tuple[str, Verdict | InvalidRequest]]:
    """Submit requests. Yield the name of each with its verdict as it arrives, or with the error if it is refused.

    Evaluations that an earlier run submitted are found by their keys, which begin with ``token``. Kernels without a
    result are judged again. No two requests are the same.
    """
    fruitless, todo = 0, list(requests)  # each has had this number of evaluations that gave no result
    try:
        while todo:
            tickets: dict[Ticket, str] = {}
            source, todo = iter(todo), []
            while chunk := list(islice(source, _CHUNK)):
                keyed: list[Request] = []
                for request in map(requests.__getitem__, chunk):
                    digest = sha256(request.model_dump_json().encode()).hexdigest()
                    keyed.append(request.model_copy(update={"idempotency_key": f"{token}/{digest}/{fruitless}"}))
                for name, ticket in zip(chunk, client.submit_each(keyed), strict=True):
                    if isinstance(ticket, InvalidRequest):
                        yield name, ticket
                    else:
                        tickets[ticket] = name
            for ticket, verdict in client.as_completed(tickets):
                if verdict.judged or ticket.created:
                    yield tickets[ticket], verdict
                else:
                    todo.append(tickets[ticket])
            fruitless += 1
    except KeyboardInterrupt:
        say("the evaluations continue. Run the same command again to collect them")
        raise
