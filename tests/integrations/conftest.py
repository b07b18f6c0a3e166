from tests.integrations.fixtures import *  # noqa: F403
