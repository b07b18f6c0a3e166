"""`kqueue receipt`, `verify` and `replay`: signed records of evaluations, their checks, and a new judgement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.request import urlopen

import typer

from kqueue.cli import options, sources
from kqueue.cli.connection import asking, detail_of
from kqueue.cli.judge import where
from kqueue.cli.render import Columns, emit, say, table
from kqueue.errors import InvalidRequest

if TYPE_CHECKING:
    from kqueue.receipts import Check

_File = Annotated[typer.FileBinaryRead, typer.Argument(metavar="FILE", help="A receipt.")]
_CHECK: Final[Columns[Check]] = {
    "statement": lambda check: check.name,
    "result": lambda check: {True: "holds", False: "fails", None: "unknown"}[check.holds],
    "detail": lambda check: check.detail,
}


def receipt(
    evaluation: options.Evaluation,
    *,
    with_sources: Annotated[bool, typer.Option("--sources", help="Include the sources and the log.")] = False,
    output: Annotated[typer.FileTextWrite | None, typer.Option("--output", "-o", help="File to write.")] = None,
) -> None:
    """Write a signed record of a finished evaluation, which the fleet's server signs."""
    # The server knows only whole ids, of 36 characters.
    identity = evaluation if len(evaluation) == 36 else detail_of("receipt", evaluation).evaluation_id
    with asking() as (run, server):
        content = run(server.read(f"/v1/evaluations/{identity}/receipt?sources={str(with_sources).lower()}"))
    typer.echo(content, file=output, nl=False)


def verify(
    file: _File,
    *,
    key: Annotated[
        str | None, typer.Option(metavar="FILE|URL", help="A server's address, or its saved /v1/keys.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check a receipt without a network, and print which statements hold. Exit with 1 if one is wrong."""
    from kqueue import receipts

    checks, _ = receipts.verify(file.read(), None if key is None else _keys(key))
    _show(checks, as_json=as_json)


def replay(
    file: _File,
    *,
    problem: Annotated[Path | None, typer.Option(help="The problem's file, if the receipt has no sources.")] = None,
    kernel: Annotated[Path | None, typer.Option(help="The kernel's file, if the receipt has no sources.")] = None,
    fleet: options.Fleet = False,
    as_json: options.Json = False,
) -> None:
    """Judge the kernel of a receipt again, and compare the results. Exit with 1 if they differ."""
    from kqueue import receipts
    from kqueue.client import connect
    from kqueue.contract import parse_request
    from kqueue.judging import LocalJudge

    checks, given = receipts.verify(file.read())
    _show(checks, as_json=as_json)
    assert given is not None, "an unreadable receipt fails a check"
    fields: dict[str, Any] = {
        "problem": given.problem if problem is None else sources.read_source(problem),
        "kernel": given.kernel if kernel is None else sources.read_source(kernel),
    }
    if None in fields.values():
        raise InvalidRequest("the receipt has no sources: give them with --problem and --kernel")
    fields |= {"backend": given.verdict.backend, "settings": given.settings, "lane": given.verdict.lane}
    request = parse_request({**fields, "reuse": False})
    if wrong := receipts.differing(given, request.problem, request.kernel):
        raise InvalidRequest(f"not the judged {' and '.join(wrong)}: the hash differs from the receipt's")
    if fleet:
        with connect() as client:
            now = client.evaluate(request)
        environment = now.environment
    else:
        with LocalJudge("cpu" if given.verdict.lane == "cpu" else None) as local:
            say(where(local.machine))
            now, environment = local(request), local.machine.environment
    checks = list(receipts.compare(given.verdict, now, environment, whole=request.problem_hash == given.problem_hash))
    _show(checks, as_json=as_json, status=3 if now.blame == "fleet" else 1)


def _show(checks: Sequence[Check], *, as_json: bool, status: int = 1) -> None:
    """Print checks. If one fails, exit with ``status``."""
    emit(checks, table(_CHECK), as_json=as_json)
    if wrong := [check.name for check in checks if check.holds is False]:
        say(f"failed: {', '.join(wrong)}")
        raise typer.Exit(status)


def _keys(key: str) -> list[str]:
    """Return the public keys in a file, or in a server's list."""
    try:
        if key.startswith(("http://", "https://")):
            with urlopen(key.removesuffix("/v1/keys").rstrip("/") + "/v1/keys", timeout=20.0) as answer:  # noqa: S310
                content = answer.read()
        else:
            content = Path(key).read_bytes()
        return [str(one["public_key"]) for one in json.loads(content)["keys"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(f"--key {key}: no list of keys like the answer of GET /v1/keys: {error}") from None
