from tests.mcp.fixtures import *  # noqa: F403
