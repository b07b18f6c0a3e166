from tests.cli.fixtures import *  # noqa: F403
