from tests.http.conftest import *  # noqa: F403
