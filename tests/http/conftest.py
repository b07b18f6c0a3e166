from tests.http.fixtures import *  # noqa: F403
