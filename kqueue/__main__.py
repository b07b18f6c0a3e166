"""``python -m kqueue``: the same as the command ``kqueue``."""

import sys
from typing import NoReturn

if sys.version_info < (3, 11):  # noqa: UP036 -- a checkout runs under any Python
    sys.exit(f"kqueue needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}")


def main() -> NoReturn:
    """Run this process's command line and exit. Without its packages, name them and exit with 3."""
    try:
        from kqueue.cli import main as run
    except ModuleNotFoundError as missing:
        if (missing.name or "kqueue").startswith("kqueue"):
            raise
        sys.stderr.write(f"kqueue: commands need {missing.name} and more packages: `pip install 'kqueue[cli]'`\n")
        sys.exit(3)
    run()


if __name__ == "__main__":
    main()
