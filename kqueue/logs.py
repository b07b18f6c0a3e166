"""Structured logs on stderr, for kqueue, Celery and all other libraries of a fleet's processes.

Code that works on one evaluation binds its id and the attempt's number (``structlog.contextvars``), so that each of its
lines has the fields ``evaluation`` and ``attempt``, by which `kqueue logs` finds them. Texts can be untrusted, so they
are escaped and cut.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final

import structlog

from kqueue.text import clean, one_line

if TYPE_CHECKING:
    from kqueue.config import Config

#: Maximum number of characters of a field.
_FIELD_CHARACTERS: Final = 2000
#: Maximum number of characters of a traceback, whose end is kept.
_TRACEBACK_CHARACTERS: Final = 16_000
#: Fields with several lines.
_TRACEBACKS: Final = frozenset({"exception", "traceback"})
#: Maximum number of entries of a list or a mapping in a field.
_ENTRIES: Final = 50
#: Maximum number of characters of an entry.
_ENTRY_CHARACTERS: Final = 200
#: Variables that give the two log settings to a process without settings. Neither is a secret.
_LEVEL, _JSON = "KQUEUE_LOG_LEVEL", "KQUEUE_LOG_JSON"


def configure(config: Config, **context: str) -> None:
    """Send all logs to stderr: one JSON object per line with ``config.log_json``, or else readable lines.

    ``context`` has fields to add to every line of this process and its children.
    """
    _configure(config.log_level, as_json=config.log_json, context=context)


def environment(config: Config) -> dict[str, str]:
    """Return the variables for :func:`configure_early`."""
    return {_LEVEL: config.log_level, _JSON: str(config.log_json).lower()}


def configure_early(**context: str) -> None:
    """Configure logs in a process that never reads the settings. Without a fleet, log only warnings."""
    _configure(os.environ.get(_LEVEL, "WARNING"), as_json=os.environ.get(_JSON) == "true", context=context)


def forget() -> None:
    """Undo :func:`configure` in a process that runs untrusted code, which can configure its own logging."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def _configure(level: str, *, as_json: bool, context: Mapping[str, str]) -> None:
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    final: list[Any] = [structlog.processors.format_exc_info, _clean_fields]
    if as_json:
        final.append(structlog.processors.JSONRenderer())
    else:
        plain = structlog.dev.plain_traceback
        final.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final]
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    structlog.contextvars.bind_contextvars(**context)


def _clean_fields(_logger: Any, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape and cut every text, because some come from kernels, callers and libraries."""
    return {
        name: clean(value)[-_TRACEBACK_CHARACTERS:] if name in _TRACEBACKS else _cleaned(value)
        for name, value in fields.items()
    }


def _cleaned(value: Any, most: int = _FIELD_CHARACTERS) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_cleaned(one, _ENTRY_CHARACTERS) for one in list(value)[:_ENTRIES]]
    if isinstance(value, Mapping):
        return {
            one_line(str(name)[:_ENTRY_CHARACTERS]): _cleaned(one, _ENTRY_CHARACTERS)
            for name, one in list(value.items())[:_ENTRIES]
        }
    text = str(value)
    shown = one_line(text[:most])[:most]
    return shown if len(text) <= most else f"{shown}..."
