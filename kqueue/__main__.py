"""``python -m kqueue``: the same as the command ``kqueue``."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 -- a checkout runs under any Python
    sys.exit(f"kqueue needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}")

from kqueue.cli import main

main()
