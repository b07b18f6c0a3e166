"""The plugin ``kqueue`` of pytest: ``pytest --kqueue`` runs each module in a separate process.

pytest loads this module in every run, so it imports no other package than pytest until ``--kqueue`` is given.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from contextlib import suppress
from importlib import import_module
from typing import Final

import pytest

#: The ``sys.path`` before a conftest or a test module adds its own folder. A child begins with it.
_SEARCHED: Final = list(sys.path)
#: The marker of tests that run without the lock of their device.
UNLOCKED: Final = "kqueue_unlocked"
#: Options for debugging and for showing fixtures, which need the tests in pytest's own process.
_ONE_PROCESS: Final = {
    "usepdb": "--pdb",
    "trace": "--trace",
    "setupshow": "--setup-show",
    "setuponly": "--setup-only",
    "setupplan": "--setup-plan",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, all of which begin with ``--kqueue``."""
    group = parser.getgroup("kqueue", "a fresh process and CUDA context for each module (kqueue)")
    group.addoption("--kqueue", action="store_true", help="run each module in a separate process, several at once")
    group.addoption(
        "--kqueue-isolate",
        choices=("module", "class", "test"),
        default="module",
        help="run each module (the default), class or test in a separate process",
    )
    group.addoption(
        "--kqueue-slots",
        type=_slots,
        metavar="N",
        help="limit on concurrent processes, in turn on the GPUs (default: one for each GPU, else half of the CPUs)",
    )
    group.addoption(
        "--kqueue-timeout",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="limit on one test in seconds, 0 for no limit (default: 600). The time before the first test and after"
        " the last has the same limit, but at least 600",
    )
    group.addoption("--kqueue-fleet", action="store_true", help="run them on the hosts of a fleet")
    group.addoption(
        "--kqueue-lane",
        default="auto",
        metavar="LANE",
        help="with --kqueue-fleet: cpu, gpu, gpu.<model>, or auto, which is gpu where a GPU worker is alive (default)",
    )
    group.addoption(
        "--kqueue-url",
        metavar="URL",
        help="with --kqueue-fleet: `kqueue serve`, with KQUEUE_TOKEN as token (default: the environment's fleet)",
    )
    group.addoption(
        "--kqueue-sanitize",
        action="store_true",
        help="run failed tests once more under compute-sanitizer, and show its findings",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Take over the running of tests if ``--kqueue`` is given. Raise UsageError if another option is incompatible."""
    config.addinivalue_line("markers", f"{UNLOCKED}: with --kqueue, a fleet on this host can time during this test")
    if not config.getoption("--kqueue") or config.option.collectonly:
        return
    for option, flag in _ONE_PROCESS.items():
        if config.getoption(option, False):
            raise pytest.UsageError(f"{flag} needs the tests in pytest's own process: leave out --kqueue")
    if config.getoption("dist", "no") != "no" or config.getoption("tx", None):
        raise pytest.UsageError(
            "--kqueue runs tests concurrently itself: leave out pytest-xdist's options (add -n 0 if the project's"
            " settings have them), and set their number with --kqueue-slots"
        )
    if config.getoption("cov_source", None) and not config.getoption("no_cov", False):
        raise pytest.UsageError(
            "pytest-cov does not measure the processes of --kqueue: add --no-cov, and measure with `coverage run -m"
            " pytest` and coverage's setting `patch = subprocess`"
        )
    if not config.getoption("kqueue_fleet") and (config.option.kqueue_url or config.option.kqueue_lane != "auto"):
        raise pytest.UsageError("--kqueue-url and --kqueue-lane select a fleet for the tests: add --kqueue-fleet")
    if sys.platform != "linux":
        raise pytest.UsageError("--kqueue needs Linux")
    from kqueue import program
    from kqueue.errors import KqueueError

    try:
        program.load("workers", program.folder("workers"))
        Controller = import_module("workers.testing.controller").Controller  # noqa: N806
        config.pluginmanager.register(Controller(config, _SEARCHED), "kqueue-controller")
    except (ImportError, KqueueError) as error:
        raise pytest.UsageError(f"--kqueue: {error}") from None


def _slots(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 1024:
        raise ArgumentTypeError(f"{text!r} is not a number of processes from 1 to 1024")
    return int(text)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (value := float(text)) < 1e9:
            return value
    raise ArgumentTypeError(f"{text!r} is not a number of seconds")
