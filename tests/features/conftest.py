"""The command of a fleet. Modules that test the API, the page or the tools import the fixtures of these."""

from tests.cli.fixtures import *  # noqa: F403
