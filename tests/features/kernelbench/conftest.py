from tests.integrations.conftest import *  # noqa: F403
