"""`kqueue pytest`: run a repository's tests with a fresh process for each module."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Annotated, Any, Final

import typer

#: Settings of the command's parser, which pass unknown options to pytest.
CONTEXT: Final[dict[str, Any]] = {"ignore_unknown_options": True, "allow_extra_args": True}


def pytest(
    context: typer.Context,
    isolate: Annotated[str, typer.Option(help="Unit that runs in its own process: module, class or test.")] = "module",
    slots: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum number of concurrent processes.", show_default="one a GPU, else half of the CPUs"
        ),
    ] = None,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="Run failed tests again under compute-sanitizer.")
    ] = False,
    fleet: Annotated[bool, typer.Option("--fleet", help="Run the modules on the hosts of a fleet.")] = False,
    lane: Annotated[str | None, typer.Option(help="With --fleet: auto, cpu, gpu, or gpu.<model>.")] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="With --fleet: the address of its `kqueue serve`, with the token in KQUEUE_TOKEN."
        ),
    ] = None,
) -> None:
    """Run a repository's tests with pytest, each module in a fresh process and CUDA context.

    PATHs and all options of pytest can be added: see `pytest --help`. Exits like pytest.
    """
    from kqueue.errors import ConfigError

    if importlib.util.find_spec("pytest") is None:
        raise ConfigError("running tests needs pytest: `pip install 'kqueue[pytest]'`")
    options = [f"--kqueue-isolate={isolate}"]
    if slots is not None:
        options.append(f"--kqueue-slots={slots}")
    if sanitize:
        options.append("--kqueue-sanitize")
    if fleet:
        options.append("--kqueue-fleet")
    if lane is not None:
        options.append(f"--kqueue-lane={lane}")
    if url is not None:
        options.append(f"--kqueue-url={url}")
    # With -P, the current folder is not searched for modules, as with the command `pytest`.
    program = [sys.executable, "-P", "-m", "pytest", "-p", "kqueue", "--kqueue", *options, *context.args]
    os.execv(sys.executable, program)  # noqa: S606 -- pytest's exit status and signals are this command's
