"""Structured logs on stderr, for kqueue, Celery and all other libraries of a fleet's processes."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from kqueue.config import Config


def configure(config: Config, **context: str) -> None:
    """Send all logs to stderr: one JSON object per line with ``config.log_json``, else readable lines.

    Args:
        config: the settings, of which ``log_level`` and ``log_json`` apply.
        context: fields to add to every line of this process and its children.
    """
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
    if config.log_json:
        final: list[Any] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback
        final = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    logging.basicConfig(handlers=[handler], level=config.log_level.upper(), force=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    structlog.contextvars.bind_contextvars(**context)
