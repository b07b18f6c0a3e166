"""Turn a model's answer into a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kqueue.contract import Request
from kqueue.errors import InvalidRequest
from kqueue.feedback import kernel_in
from kqueue.kernelbench import request_of

#: Text, or the messages of a chat.
Answer = str | Sequence[Mapping[str, Any]]

_SOUND: Final = "class ModelNew: ..."


def kernel_of(answer: Answer) -> str:
    """Return the kernel in an answer or in a chat's last message; see :func:`~kqueue.feedback.kernel_in`."""
    return kernel_in(answer if isinstance(answer, str) else str(answer[-1].get("content") or "") if answer else "")


def request_for(problem: str, kernel: str, **arguments: Any) -> Request | InvalidRequest:
    """Build the request for a kernel that a model wrote.

    Args:
        problem: source of the reference.
        kernel: source of the kernel.
        arguments: see :func:`~kqueue.kernelbench.request_of`.

    Returns:
        the request, or the :class:`InvalidRequest` if the kernel is at fault: that is the model's failure, not the
        caller's.

    Raises:
        InvalidRequest: the problem or the arguments are wrong, whatever the kernel.
    """
    try:
        return request_of(problem, kernel, **arguments)
    except InvalidRequest as error:
        request_of(problem, _SOUND, **arguments)
        return error
