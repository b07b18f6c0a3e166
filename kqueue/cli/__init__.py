"""The command `kqueue`: the table of its commands, and their exit statuses.

Start with :data:`_COMMANDS`, which names the function of each command. Its parameters are the options, of which
:mod:`~kqueue.cli.options` has the shared ones. It builds a view, which :func:`~kqueue.cli.render.emit` prints as text
or JSON. An error is a :class:`KqueueError`, which :func:`main` prints. Other packages are imported in the functions
that need them, so that a command starts fast.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable
from functools import cached_property
from pkgutil import resolve_name
from typing import IO, Annotated, Any, Final, NoReturn, cast

import typer
import typer.core

from kqueue import errors, registry
from kqueue.cli.absent import stand_in
from kqueue.cli.options import with_groups
from kqueue.cli.render import drop_output, say
from kqueue.signals import raise_interrupts

#: Exit statuses of commands that failed. Status 1 is reserved for a negative answer.
STATUSES: dict[type[errors.KqueueError], int] = {
    errors.InvalidRequest: 2, errors.ServiceError: 3, errors.AccessRefused: 3, errors.ConfigError: 3,
    errors.EvaluationFailed: 3, errors.JudgeUnavailable: 3, errors.WaitTimeout: 4, errors.UnknownEvaluation: 5,
}  # fmt: skip

#: Commands whose exit status is an answer. If their output is not read to its end, they exit as for a broken pipe.
_ANSWERING: Final = {"judge", "submit", "wait", "watch", "sanitize", "compare", "doctor"}
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
_SECTIONS: Final = {"judge": "Judge kernels", "status": "Look at results", "up": "Run a fleet"}


class _Group(typer.core.TyperGroup):
    """A group of commands whose help shows each command's whole first sentence, in sections.

    A command of `kqueue` is imported when it is called, and all are for the help.
    """

    @cached_property
    def _places(self) -> dict[str, str]:
        """The functions of all commands, in the order of the help."""
        places, added = dict[str, str](), registry.each_of("commands")
        for name, place in _COMMANDS.items():
            places[name] = f"kqueue.cli.{place}"
            places |= {one.name: one.function for one in added if one.after == name}
        return {one.name: one.function for one in added if one.name not in places} | places

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self._places) if self.name == app.info.name else super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self.name == app.info.name and cmd_name not in self.commands:
            place = _COMMANDS.get(cmd_name)
            found = {cmd_name: f"kqueue.cli.{place}"} if place else self._places
            # An unknown name loads all commands, because the error suggests similar names.
            for name in [cmd_name] if cmd_name in found else found:
                function, made = resolve_name(found[name]), typer.Typer(rich_markup_mode=None)
                if isinstance(function, typer.Typer):
                    made.add_typer(function, name=name, cls=_Group)
                else:  # a module of one command can have a `CONTEXT` for it
                    context = vars(sys.modules[function.__module__]).get("CONTEXT")
                    made.command(name, context_settings=context)(with_groups(function))
                self.commands[name] = typer.main.get_group(made).commands[name]
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        title, sections = "Commands", dict[str, list[tuple[str, str]]]()
        titles = _SECTIONS if ctx.parent is None else {}
        for name in self.list_commands(ctx):
            if command := self.get_command(ctx, name):
                title = "Groups" if isinstance(command, _Group) else titles.get(name, title)
                sections.setdefault(title, []).append((name, command.get_short_help_str(1000)))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


app = typer.Typer(
    name="kqueue", cls=_Group, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
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


#: The function of each command, in the order of the help. A group of commands has its own object.
_COMMANDS: Final[dict[str, str]] = {
    "judge": "judge:judge", "submit": "submit:submit", "wait": "submit:wait", "watch": "judge:watch",
    "sanitize": "examine:sanitize", "profile": "examine:profile", "status": "status:status", "show": "show:show",
    "results": "results:results", "compare": "results:compare", "cancel": "results:cancel", "cost": "results:cost",
    "logs": "show:logs", "plot": "plot:plot", "diff": "show:diff", "up": "fleet:up", "down": "fleet:down",
    "worker": "fleet:worker", "top": "status:top", "pytest": "pytest:pytest", "serve": "operate:serve",
    "open": "operate:open_", "mcp": "operate:mcp", "sweep": "operate:sweep", "audit": "audit:audit",
    "categories": "categories:categories", "evidence": "categories:evidence", "doctor": "operate:doctor",
    "gpu": "devices:gpus", "token": "token:group", "owner": "owners:group", "db": "operate:db",
}  # fmt: skip


def exit_status(error: errors.KqueueError) -> int:
    """Return the exit status for ``error``."""
    return next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 1)


def main() -> NoReturn:
    """Run this process's command line and exit.

    A :class:`KqueueError` becomes one line on stderr and an exit status from :data:`STATUSES`. SIGTERM and SIGHUP
    interrupt a command like SIGINT, so that it prints its results so far and cancels its work. Commands in
    :data:`_SERVING` handle signals themselves.
    """
    command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    stand_in()
    gc.set_threshold(_GC_THRESHOLD_SERVING if command in _SERVING else _GC_THRESHOLD)
    # Without this, Python traverses all imported objects twice at exit.
    atexit.register(gc.freeze)
    if command not in _SERVING:
        raise_interrupts()
        answers = command in _ANSWERING or (
            command not in _COMMANDS and any(one.answers for one in registry.each_of("commands") if one.name == command)
        )
        sys.stdout = cast("IO[str]", _Output(sys.stdout, _BROKEN_PIPE if answers else 0))
        sys.stderr = cast("IO[str]", _Output(sys.stderr, None))
    try:
        if wrong := [one for one in sys.argv if any("\ud800" <= char <= "\udfff" for char in one)]:
            raise errors.InvalidRequest(f"{wrong[0]}: an argument must be UTF-8 text")
        app(prog_name="kqueue")
    except errors.KqueueError as error:
        say(error)
        sys.exit(exit_status(error))
    except ModuleNotFoundError as error:
        if (error.name or "kqueue").startswith("kqueue"):
            raise
        say(f"this needs {error.name}, which is not installed: `pip install 'kqueue[fleet]'`")
        sys.exit(exit_status(errors.ConfigError()))
    except OSError as error:
        if error.filename is None:
            raise
        say(f"{error.filename}: {error.strerror}")
        sys.exit(2)
    sys.exit(0)


class _Output:
    """An output stream that handles write errors, for example after `| head -1` or on a full disk.

    Standard output ends the process. Standard error discards its further words, because they end no command.
    """

    def __init__(self, stream: Any, unread: int | None) -> None:
        """Wrap a stream of text or bytes, or None if it is closed.

        ``unread`` is the exit status if its reader is gone, or None for standard error.
        """
        self._stream = stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
        self._unread = unread

    @property
    def buffer(self) -> _Output:
        return _Output(self._stream.buffer, self._unread)

    def write(self, content: str | bytes) -> int:
        return self._try(self._stream.write, content)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[..., Any], *content: str | bytes) -> Any:
        try:
            return act(*content)
        except OSError as error:
            drop_output(self._stream)
            if self._unread is None:
                return act(*content)
            if isinstance(error, BrokenPipeError):
                sys.exit(self._unread)
            say(f"the output cannot be written: {error.strerror}")
            sys.exit(_UNWRITTEN)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
