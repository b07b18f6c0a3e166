"""`kqueue receipt`, `verify` and `replay`: signed records of evaluations, their checks, and their comparison."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue import files
from kqueue.cli import options, sources
from kqueue.cli.connection import asking, detail_of
from kqueue.cli.judge import where
from kqueue.cli.render import STDOUT, Columns, emit, say, table
from kqueue.errors import ConfigError, InvalidRequest
from kqueue.text import one_line

if TYPE_CHECKING:
    from kqueue.features.receipts.checks import Check

_File = Annotated[Path, typer.Argument(metavar="FILE", help="A receipt, or - for standard input.")]
_Key = Annotated[
    str | None, typer.Option(metavar="KEY|FILE|URL", help="The fleet's public key, its saved /v1/keys, or its address.")
]
_CHECK: Final[Columns[Check]] = {
    "statement": lambda check: check.name,
    "result": lambda check: {True: "holds", False: "fails", None: "unknown"}[check.holds],
    "detail": lambda check: check.detail,
}


def receipt(
    evaluation: options.Evaluation,
    *,
    with_sources: Annotated[bool, typer.Option("--sources", help="Include the sources and the log.")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write, or - for stdout.")] = Path(STDOUT),
) -> None:
    """Write a signed record of a finished evaluation, which the fleet's server signs."""
    # The server knows only whole ids, of 36 characters.
    identity = evaluation if len(evaluation) == 36 else detail_of("receipt", evaluation).evaluation_id
    with asking() as (run, server):
        content = run(server.read(f"/v1/evaluations/{identity}/receipt?sources={str(with_sources).lower()}"))
    if str(output) == STDOUT:
        typer.echo(content, nl=False)
        return
    try:
        output.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror or error}") from None


def verify(file: _File, *, key: _Key = None, as_json: options.Json = False) -> None:
    """Check a receipt, and print which statements hold. Exit with 1 if one is wrong.

    Without a key it asks the fleet at KQUEUE_URL.
    """
    from kqueue.config import load
    from kqueue.features.receipts import checks

    if (key := key or load().url) is None:
        raise InvalidRequest(
            "any key can sign a receipt: give the fleet's public key, its saved /v1/keys or its "
            "address with --key, or set KQUEUE_URL"
        )
    _show(checks.verify(_read(file), _keys(key))[0], as_json=as_json)


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE|FOLDER", help="A receipt, or a folder of them.")],
    *,
    problem: Annotated[Path | None, typer.Option(help="The problem's file, if the receipt has no sources.")] = None,
    kernel: Annotated[Path | None, typer.Option(help="The kernel's file, if the receipt has no sources.")] = None,
    key: _Key = None,
    fleet: options.Fleet = False,
    as_json: options.Json = False,
) -> None:
    """Judge the kernel of a receipt again, and compare the results. Exit with 1 if they differ.

    Of a folder it judges nothing: it compares the receipts on each kernel. Without a key it does not matter who signed.
    """
    from kqueue.client import connect
    from kqueue.contract import parse_request
    from kqueue.features.receipts import checks
    from kqueue.judging import LocalJudge

    known = None if key is None else _keys(key)
    if file.is_dir():
        if problem or kernel or fleet:
            raise InvalidRequest("--problem, --kernel and --fleet are for one receipt, and this is a folder")
        _compare(file, known, as_json=as_json)
        return
    held, given = checks.verify(_read(file), known)
    _show(held, as_json=as_json)
    assert given is not None, "an unreadable receipt fails a check"
    fields: dict[str, Any] = {
        "problem": given.problem if problem is None else sources.read_source(problem),
        "kernel": given.kernel if kernel is None else sources.read_source(kernel),
    }
    if None in fields.values():
        raise InvalidRequest("the receipt has no sources: give them with --problem and --kernel")
    fields |= {"backend": given.verdict.backend, "settings": given.settings, "lane": given.verdict.lane}
    request = parse_request({**fields, "reuse": False})
    if wrong := checks.differing(given, request.problem, request.kernel):
        raise InvalidRequest(f"not the judged {' and '.join(wrong)}: the hash differs from the receipt's")
    if fleet:
        with connect() as client:
            now = client.evaluate(request)
        environment = now.environment
    else:
        with LocalJudge("cpu" if given.verdict.lane == "cpu" else None) as local:
            say(where(local.machine))
            now, environment = local(request), local.machine.environment
    held = list(checks.compare(given.verdict, now, environment, whole=request.problem_hash == given.problem_hash))
    _show(held, as_json=as_json, status=3 if now.blame == "fleet" else 1)


def _compare(folder: Path, known: Sequence[str] | None, *, as_json: bool) -> None:
    """Print what a folder's receipts show of each kernel. Exit with 1 if they disagree, or a file shows nothing."""
    from kqueue.features.receipts import countersigned

    found, faults = countersigned.read(folder, known)

    def show(kernels: Sequence[countersigned.Kernel]) -> None:
        for one in kernels:
            typer.echo("\n  ".join(map(one_line, (f"{one.label}: {one}", *one.differs))))

    emit(found, show, as_json=as_json)
    for name, fault in faults.items():
        say(f"{name} does not count: {fault}")
    if known is None and found:
        say("any key can sign a receipt: give the fleets' public keys with --key")
    if not found and not faults:
        raise InvalidRequest(f"{folder} has no receipts")
    if faults or not all(one.agrees for one in found):
        raise typer.Exit(1)


def _show(checks: Sequence[Check], *, as_json: bool, status: int = 1) -> None:
    """Print checks. If one fails, exit with ``status``."""
    emit(checks, table(_CHECK), as_json=as_json)
    if wrong := [check.name for check in checks if check.holds is False]:
        say(f"failed: {', '.join(wrong)}")
        raise typer.Exit(status)


def _read(file: Path) -> bytes:
    """Return a receipt, or more than its maximum size."""
    from kqueue.features.receipts.checks import MAX_BYTES

    return sys.stdin.buffer.read(MAX_BYTES + 1) if str(file) == "-" else files.read_bytes(file, MAX_BYTES, "a receipt")


def _keys(key: str) -> list[str]:
    """Return the given public key, or those in a file or in a server's list."""
    if re.fullmatch("[0-9a-f]{64}", key):
        return [key]
    try:
        if key.startswith(("http://", "https://", "unix://")):
            with asking(key.removesuffix("/v1/keys")) as (run, server):
                content = run(server.read("/v1/keys"))
        else:
            content = files.read_bytes(Path(key), 1 << 20, "keys").decode()
        return [str(one["public_key"]) for one in json.loads(content)["keys"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidRequest(f"--key {key}: no list of keys like the answer of GET /v1/keys: {error}") from None
