"""A real fleet from tests/fleet to attack, and services with the users and roles of the compose stack."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from sqlalchemy.engine import make_url

from kqueue.local.servers import Postgres
from kqueue.store import roles
from tests.fleet.told import Services
from tests.security.house import Guarded, House
from tests.services import starts_services, with_schema
from tests.store.steps import change


@pytest.fixture(scope="module")
@starts_services
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Return services for this module alone, which require a login for every connection."""
    directory = tmp_path_factory.mktemp("house")
    directory.chmod(0o755)
    postgres = Postgres(with_schema(directory / "pg"), durable=False)
    with postgres, Guarded(directory / "valkey") as guarded:
        owned = Services(postgres, SimpleNamespace(url=guarded.url_of("operator")), directory)  # type: ignore[arg-type]
        house = House(owned, guarded)
        for role in ("producer", "worker", "reader"):
            password = f"marked{secrets.token_hex(16)}"
            roles.login(owned.engine, role, f"kqueue_{role}", password)
            url = make_url(postgres.url).set(username=role, password=password)
            house.logins[role] = url.render_as_string(hide_password=False)
        # From here on every login except the owner's needs a password.
        rules = "local all postgres trust\nlocal all all scram-sha-256\n"
        (directory / "pg" / "data" / "pg_hba.conf").write_text(rules)
        change(owned.engine, "SELECT pg_reload_conf()")
        yield house
        owned.engine.dispose()
        owned.app.close()
