"""`kqueue up` runs a whole fleet on this machine. `kqueue worker` runs this machine's workers of a larger fleet."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from kqueue import program
from kqueue.cli.render import drop_output, say
from kqueue.signals import ending, raise_interrupts

if TYPE_CHECKING:
    from kqueue.local.fleet import LocalFleet

#: First line of the fleet's status, which is printed when the fleet is up.
_UP: Final = "kqueue is up"


@dataclass(frozen=True)
class Workers:
    """The options on services and slots."""

    database_url: Annotated[
        str | None,
        typer.Option(help="Use the Postgres at this URL (KQUEUE_DATABASE_URL keeps its password out of `ps`)."),
    ] = None
    redis_url: Annotated[
        str | None, typer.Option(help="Use the Redis at this URL (KQUEUE_REDIS_URL keeps its password out of `ps`).")
    ] = None
    gpus: Annotated[str | None, typer.Option(help="`all`, `none`, or indices and UUIDs separated by commas.")] = None
    slots_per_gpu: Annotated[int | None, typer.Option(help="Number of evaluations to prepare at once on each GPU.")] = (
        None
    )
    cpu_slots: Annotated[int | None, typer.Option(help="Number of slots on the `cpu` lane.")] = None


def up(
    *,
    home: Annotated[Path | None, typer.Option(help="Folder of the fleet's data (KQUEUE_HOME).")] = None,
    workers: Workers,
    no_flower: Annotated[bool, typer.Option("--no-flower", help="Do not start Flower.")] = False,
    flower_port: Annotated[int | None, typer.Option(help="Flower's port on loopback. 0 picks a free one.")] = None,
    no_http: Annotated[bool, typer.Option("--no-http", help="Do not serve HTTP.")] = False,
    http_port: Annotated[int | None, typer.Option(help="HTTP port on loopback. 0 picks a free one.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it is up. `kqueue down` stops it.")] = False,
) -> None:
    """Run a fleet on this machine until Ctrl-C: services, workers for every GPU (or CPU slots), Flower, HTTP.

    Postgres and Redis are embedded unless their URLs are given. Their data persist under the home.
    """
    from kqueue.config import load
    from kqueue.http import OPEN_WARNING, has_http, trusts_local_users
    from kqueue.local.fleet import LocalFleet
    from kqueue.local.parts import has_flower

    config = load(home=home, flower_port=flower_port, http_port=http_port, **vars(workers))
    if detach:
        _detach(config.home_path / "logs" / "up.log")
    # Until the fleet runs, a signal to stop raises KeyboardInterrupt, which stops everything that has started. SIGINT
    # is set explicitly because a shell starts background jobs with SIGINT ignored.
    asked = False

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    for signum in ending():
        signal.signal(signum, interrupt)
    runs = False
    _report(f"starting a fleet in {config.home_path}")
    with_flower, with_http = has_flower() and not no_flower, has_http() and not no_http
    try:
        with LocalFleet(config, flower=with_flower, http=with_http, fork=True, report=_report) as fleet:
            if asked:
                # The signal arrived where Python discards exceptions, for example in a fork's callbacks.
                raise KeyboardInterrupt
            runs = True
            _report(_status(fleet))
            if fleet.http_url is not None and trusts_local_users(config):
                _report(OPEN_WARNING)
            if not no_flower and not has_flower():
                _report("  (Flower is not installed: `pip install 'kqueue[server]'`)")
            if not no_http and not has_http():
                _report("  (HTTP is not served: `pip install 'kqueue[http]'`)")
            fleet.run_forever()
    except KeyboardInterrupt:
        raise typer.Exit(0 if runs else 130) from None


def _detach(log: Path) -> NoReturn:
    """Run this command in the background, with a log. Exit when the fleet is up, has failed, or is interrupted."""
    log.parent.mkdir(parents=True, exist_ok=True)
    raise_interrupts()
    fresh = log.with_name(f"{log.name}.{os.getpid()}")  # a fleet that runs already keeps its log
    with fresh.open("ab") as file:
        words = [*program.PYTHON, "kqueue", *(word for word in sys.argv[1:] if word != "--detach")]
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while process.poll() is None and _UP not in fresh.read_text():
            time.sleep(0.1)
        _report(fresh.read_text().rstrip())
    except KeyboardInterrupt:
        process.terminate()  # it can have inherited that SIGINT is ignored
        process.wait()
        raise typer.Exit(130) from None
    finally:
        fresh.replace(log) if process.poll() is None else fresh.unlink()
    raise typer.Exit(process.poll() or 0)


def down(home: Annotated[Path | None, typer.Option(help="Folder of the fleet's data (KQUEUE_HOME).")] = None) -> None:
    """Stop the fleet of `kqueue up`, and wait until it has ended."""
    from kqueue.config import load, running_fleet
    from kqueue.errors import InvalidRequest
    from kqueue.local.process import running

    place = load(home=home).home_path
    if (pid := (fleet := running_fleet(place)).get("pid")) is None:
        raise InvalidRequest(f"the fleet in {place} is {fleet['state']}" if fleet else f"no fleet is up in {place}")
    os.kill(int(pid), signal.SIGTERM)
    for tenths in count():
        if not running(int(pid)):
            return
        if tenths == 10:
            say("waiting until the fleet has ended. Running evaluations get up to a minute")
        time.sleep(0.1)


def worker(workers: Workers) -> None:
    """Run this machine's workers in the foreground, for a fleet whose services run elsewhere.

    SIGTERM lets running evaluations finish. SIGINT (Ctrl-C) or a second SIGTERM aborts them.
    """
    from kqueue.config import load
    from kqueue.local.parts import require_worker, worker_command
    from kqueue.store import schema

    config = load(**vars(workers))
    require_worker()
    config.require_redis()
    with schema.checked(config.require_database(), application="kqueue-worker"):
        command = worker_command()
    os.execve(command[0], command, dict(os.environ) | config.environment())  # noqa: S606 our own interpreter


def _report(line: str) -> None:
    """Print a line at once. Ignore a closed terminal or pipe and a full disk, which must not end a fleet."""
    try:
        typer.echo(line)
    except OSError:
        drop_output(sys.stdout)


def _status(fleet: LocalFleet) -> str:
    from kqueue.doctor import redact

    config = fleet.config
    lanes = Counter(lane for slot in fleet.slots() for lane in slot.lanes)
    slots = ", ".join(f"{lane} ({count} slot{'s' if count > 1 else ''})" for lane, count in sorted(lanes.items()))
    default: Path = type(config).model_fields["home"].get_default(call_default_factory=True)
    elsewhere = config.home_path != default.expanduser().absolute()
    prefix = f"KQUEUE_HOME={shlex.quote(str(config.home_path))} " if elsewhere else ""
    flower = f"{fleet.flower_url} (`{prefix}kqueue open --flower` logs a browser in)"
    rows = {
        "home": str(config.home_path),
        "database": redact(config.require_database()),
        "broker": redact(config.require_redis()),
        "lanes": slots,
        "flower": flower if fleet.flower_url else "off",
        "http": fleet.http_url or "off",
        **({"page": f"{fleet.http_url}/ (`{prefix}kqueue open` logs a browser in)"} if fleet.http_url else {}),
        **({"socket": f"unix://{fleet.http_socket}"} if fleet.http_socket else {}),
        "submit": f"{prefix}kqueue submit --problem P.py --kernel K.py --backend triton --wait",
        "stop": f"Ctrl-C, or {prefix}kqueue down",
    }
    return "\n".join([_UP, *(f"  {name:<9} {value}" for name, value in rows.items())])
