"""The command `kqueue`: the table of its commands, and their exit statuses.

Start with :data:`COMMANDS`, which names the function of each command. Its parameters are the options, of which
:mod:`~kqueue.cli.options` has the shared ones. It builds a view, which :func:`~kqueue.cli.render.emit` prints as text
or JSON. An error is a :class:`KqueueError`, which :func:`main` prints. Other packages are imported in the functions
that need them, so that a command starts fast.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Callable, Generator
from pkgutil import resolve_name
from typing import IO, Annotated, Any, Final, NoReturn, cast

import typer
import typer.core

from kqueue import registry
from kqueue.cli import (
    audit,
    categories,
    devices,
    examine,
    export,
    fleet,
    judge,
    kernelbench,
    operate,
    owners,
    plot,
    pytest,
    receipts,
    rejudge,
    results,
    search,
    show,
    status,
    submit,
    token,
    tune,
)
from kqueue.cli.options import with_groups
from kqueue.cli.render import drop_output, say
from kqueue.errors import (
    AccessRefused,
    ConfigError,
    EvaluationFailed,
    InvalidRequest,
    JudgeUnavailable,
    KqueueError,
    ServiceError,
    UnknownEvaluation,
    WaitTimeout,
)
from kqueue.signals import raise_interrupts

#: Exit statuses of commands that failed. Status 1 is reserved for a negative answer.
STATUSES: dict[type[KqueueError], int] = {
    InvalidRequest: 2,
    ServiceError: 3,
    AccessRefused: 3,
    ConfigError: 3,
    EvaluationFailed: 3,
    JudgeUnavailable: 3,
    WaitTimeout: 4,
    UnknownEvaluation: 5,
}

#: Commands whose exit status is an answer. If their output is not read to its end, they exit as for a broken pipe.
_ANSWERING: Final = {
    "judge", "submit", "wait", "watch", "kernelbench", "autopsy", "sanitize", "compare", "doctor", "verify",
    "replay",
}  # fmt: skip
#: Commands that continue if their output is not read.
_SERVING: Final = frozenset({"up", "worker", "serve", "mcp"})
#: Exit status if the output cannot be written.
_UNWRITTEN: Final = 3
#: Exit status that a shell reports for a process that wrote to a pipe without a reader.
_BROKEN_PIPE: Final = 141
#: Number of new objects between two runs of garbage collection. Python's 700 cost a sixth of a command's time, because
#: imports create many objects and no garbage. Most commands create fewer objects than this in total.
_GC_THRESHOLD: Final = 300_000
#: The same number for servers, where a collection delays requests and must be short.
_GC_THRESHOLD_SERVING: Final = 50_000


#: Sections of the help by the first command of each.
_SECTIONS: Final = {"judge": "Judge kernels", "status": "Look at results", "up": "Run a fleet", "search": "Groups"}


class _Group(typer.core.TyperGroup):
    """A group of commands whose help shows each command's whole first sentence, in sections.

    The commands of features are imported for the help, and when the house has no command of the name.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        self._attach()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._attach()
        return super().get_command(ctx, cmd_name)

    def _attach(self) -> None:
        """Add the commands of features, each after the one that it names."""
        for command in registry.commands() if self.name == app.info.name else ():
            if command.name not in self.commands:
                made, names = typer.Typer(rich_markup_mode=None), list(self.commands)
                function = resolve_name(command.function)
                made.command(command.name)(with_groups(function))
                self.commands[command.name] = typer.main.get_group(made).commands[command.name]
                names.insert(names.index(command.after) + 1, command.name)
                self.commands = {name: self.commands[name] for name in names}

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        title, sections = "Commands", dict[str, list[tuple[str, str]]]()
        for name in self.list_commands(ctx):
            title = _SECTIONS.get(name, title) if ctx.parent is None else title
            if command := self.get_command(ctx, name):
                sections.setdefault(title, []).append((name, command.get_short_help_str(1000)))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


app = typer.Typer(
    name="kqueue",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"kqueue {metadata.version('kqueue')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A worker fleet that judges GPU kernels."""


#: The functions of the commands, in the order of the help. A group of commands has its own function that registers it.
COMMANDS: Final[dict[str, Callable[..., Any]]] = {
    "judge": judge.judge,
    "submit": submit.submit,
    "wait": submit.wait,
    "watch": judge.watch,
    "kernelbench": kernelbench.kernelbench,
    "rejudge": rejudge.rejudge,
    "tune": tune.tune,
    "tournament": tune.tournament,
    "autopsy": examine.autopsy,
    "sanitize": examine.sanitize,
    "profile": examine.profile,
    "status": status.status,
    "show": show.show,
    "results": results.results,
    "compare": results.compare,
    "cancel": results.cancel,
    "cost": results.cost,
    "export": export.export,
    "logs": show.logs,
    "plot": plot.plot,
    "diff": show.diff,
    "receipt": receipts.receipt,
    "verify": receipts.verify,
    "replay": receipts.replay,
    "up": fleet.up,
    "down": fleet.down,
    "worker": fleet.worker,
    "top": status.top,
    "pytest": pytest.pytest,
    "serve": operate.serve,
    "open": operate.open_,
    "mcp": operate.mcp,
    "sweep": operate.sweep,
    "audit": audit.audit,
    "categories": categories.categories,
    "evidence": categories.evidence,
    "doctor": operate.doctor,
}
for _name, _function in COMMANDS.items():
    app.command(_name, context_settings=pytest.CONTEXT if _name == "pytest" else None)(with_groups(_function))
for _register in (
    search.register,
    kernelbench.register,
    devices.register_gpu,
    devices.register_probe,
    token.register,
    owners.register,
    operate.register,
):
    _register(app)


def exit_status(error: KqueueError) -> int:
    """Return the exit status for ``error``."""
    return next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 1)


def main() -> NoReturn:
    """Run this process's command line and exit.

    A :class:`KqueueError` becomes one line on stderr and an exit status from :data:`STATUSES`. SIGTERM and SIGHUP
    interrupt a command like SIGINT, so that it prints its results so far and cancels its work. Commands in
    :data:`_SERVING` handle signals themselves.
    """
    command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    gc.set_threshold(_GC_THRESHOLD_SERVING if command in _SERVING else _GC_THRESHOLD)
    # Without this, Python traverses all imported objects twice at exit.
    atexit.register(gc.freeze)
    if command not in _SERVING:
        raise_interrupts()
        answers = command in _ANSWERING or (
            command not in COMMANDS and any(one.answers for one in registry.commands() if one.name == command)
        )
        sys.stdout = cast("IO[str]", _Output(sys.stdout, _BROKEN_PIPE if answers else 0))
    try:
        if wrong := [one for one in sys.argv if any("\ud800" <= char <= "\udfff" for char in one)]:
            raise InvalidRequest(f"{wrong[0]}: an argument must be UTF-8 text")
        app(prog_name="kqueue")
    except KqueueError as error:
        say(error)
        sys.exit(exit_status(error))
    except OSError as error:
        if error.filename is None:
            raise
        say(f"{error.filename}: {error.strerror}")
        sys.exit(2)
    sys.exit(0)


class _Output:
    """Standard output that ends the process on a write error, for example after `| head -1` or on a full disk."""

    def __init__(self, stream: IO[str], unread: int) -> None:
        """Wrap a stream. ``unread`` is the exit status if its reader is gone."""
        self._stream = stream
        self._unread = unread

    def write(self, text: str) -> int:
        with self._or_end():
            return self._stream.write(text)
        raise AssertionError("the block returns or raises")

    def flush(self) -> None:
        with self._or_end():
            self._stream.flush()

    @contextlib.contextmanager
    def _or_end(self) -> Generator[None]:
        try:
            yield
        except BrokenPipeError:
            drop_output()
            sys.exit(self._unread)
        except OSError as error:
            drop_output()
            say(f"the output cannot be written: {error.strerror}")
            sys.exit(_UNWRITTEN)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
