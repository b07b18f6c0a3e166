"""`kqueue sweep`: run a fleet's sweeper once, now."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.cli import options
from kqueue.cli.render import console, emit, text

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kqueue.config import Config
    from kqueue.store.retention import Pruned
    from kqueue.sweeper import SweepReport

#: Maximum seconds of the wait for another sweeper.
_LOCK_WAIT_S: Final = 10.0


def sweep(
    prune: Annotated[bool, typer.Option("--prune", help="Also remove everything past its retention.")] = False,
    as_json: options.Json = False,
) -> None:
    """End lost and expired evaluations, and send the messages that are missing in Redis.

    Every fleet sweeps every few seconds by itself. Exits with 3 if Redis cannot be reached.
    """
    from kqueue.config import load
    from kqueue.errors import ConfigError
    from kqueue.store import schema

    config = load()
    if prune and config.retention_days is None and config.log_retention_days is None:
        raise ConfigError(
            "--prune: no retention is set: set KQUEUE_RETENTION_DAYS or KQUEUE_LOG_RETENTION_DAYS, in days"
        )
    with schema.checked(config.require_database(), application="kqueue sweep", pool_size=2) as engine:
        report = _sweep(engine, config)
        if prune:
            report = replace(report, pruned=report.pruned + _prune(engine, config))
    emit(report, _print, as_json=as_json, record=_record)
    if report.broker_error is not None:
        raise typer.Exit(3)


def _record(report: SweepReport) -> dict[str, Any]:
    lost = [{"evaluation_id": identity, "recorded": became.value} for identity, became in report.lost]
    record = asdict(report) | {"lost": lost}
    del record["probes"], record["idle"]
    return record


def _sweep(engine: Engine, config: Config) -> SweepReport:
    """Sweep once, after waiting for another sweeper if necessary."""
    from kqueue import broker, sweeper

    deadline = time.monotonic() + _LOCK_WAIT_S
    with broker.make_app(config) as app:
        while True:
            report = sweeper.sweep(engine, app, retry_delay_s=config.retry_delay_s)
            if report.swept or time.monotonic() >= deadline:
                return report
            time.sleep(0.1)


def _prune(engine: Engine, config: Config) -> Pruned:
    from kqueue.store import retention

    pruned = retention.Pruned()
    while bite := retention.prune(
        engine, retention_days=config.retention_days, log_retention_days=config.log_retention_days
    ):
        pruned += bite
    return pruned


def _print(report: SweepReport) -> None:
    if not report.swept:
        typer.echo("another sweeper held the lock all the time")
    counts = {
        "attempts lost with silent workers": len(report.lost),
        "evaluations expired": report.expired,
        "workers marked as stopped": report.stopped_workers,
        "messages missing from Redis": report.missing,
        "messages sent": report.published,
        **{f"{kind} {'emptied' if kind == 'logs' else 'removed'}": n for kind, n in asdict(report.pruned).items()},
    }
    if lines := [f"{name}: {number}" for name, number in counts.items() if number]:
        typer.echo("\n".join(lines))
    elif report.swept and report.broker_error is None:
        typer.echo("nothing to do")
    if report.broker_error is not None:
        console().print(text(f"redis: {report.broker_error}", "bold red"))
