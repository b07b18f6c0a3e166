"""Turn a model's answer into a kernel and a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kqueue.contract import Request
from kqueue.errors import InvalidRequest
from kqueue.integrations.extraction import Taken, take
from kqueue.kernelbench import request_of

#: A text, or the messages of a chat, whose content is text or parts with text.
Answer = str | Sequence[Mapping[str, Any]]

_VALID: Final = "class ModelNew: ..."


def take_from(answer: Answer) -> Taken:
    """Return the kernel in an answer, or in the assistant's last message of a chat."""
    if isinstance(answer, str):
        return take(answer)
    replies = [message for message in answer if message.get("role", "assistant") == "assistant"] or answer[-1:]
    content: object = replies[-1].get("content") if replies else None
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_text_of(part) for part in content)
    return take(str(content or ""))


def _text_of(part: object) -> str:
    """Return the text of a part of a message. Empty for reasoning, a picture or a tool call."""
    if isinstance(part, Mapping):
        return str(part.get("text") or "") if part.get("type", "text") in ("text", "output_text") else ""
    return str(part)


def request_for(problem: str, kernel: str, **arguments: Any) -> Request | InvalidRequest:
    """Build the request for a kernel that a model wrote.

    Args:
        arguments: see :func:`~kqueue.kernelbench.request_of`.

    Returns:
        The request, or the :class:`InvalidRequest` if the kernel is invalid, which is the model's failure and not the
        caller's.

    Raises:
        InvalidRequest: the problem or the arguments are invalid for any kernel.
    """
    try:
        return request_of(problem, kernel, **arguments)
    except InvalidRequest as error:
        request_of(problem, _VALID, **arguments)
        return error
