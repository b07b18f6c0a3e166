"""``python -m kqueue``: the same as the command ``kqueue``."""

from kqueue.cli import main

main()
