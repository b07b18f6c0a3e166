"""Logins by OpenID Connect at a real provider in a thread, hostile answers, the ends of sessions, and the audit log."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import flask
import httpx
import pytest
from pydantic import SecretStr
from sqlalchemy import Engine

from kqueue.config import Config
from kqueue.errors import ConfigError
from kqueue.store import audit, tokens
from kqueue.web.app import create_app
from tests.http.serving import command
from tests.http.standin import Served, submit
from tests.services import free_port
from tests.store.steps import change
from tests.web.browsing import NEEDS_CHROMIUM, violations
from tests.web.visiting import HTML, OWN_FORM, stranger, visitor

mock = pytest.importorskip("oidc_provider_mock", reason="oidc-provider-mock is not installed")
jose, jwk = pytest.importorskip("joserfc.jwt"), pytest.importorskip("joserfc.jwk")
create_s256_code_challenge = pytest.importorskip("authlib.oauth2.rfc7636").create_s256_code_challenge

GROUPS = {"kernels": ["submit"], "leads": ["problems", "read:all", "cancel:all"]}
PEOPLE = {"ann": ["kernels"], "bob": ["kernels", "leads"], "eve": ["sales"]}


class Provider:
    """The provider: its address, people, and a change of its next answers."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer
        self.person: Callable[[dict[str, Any]], Any] = lambda claims: claims
        self.asked: list[dict[str, str]] = []
        app = mock.app()

        @app.before_request
        def remember() -> None:
            if flask.request.path == "/oauth2/token":
                self.asked.append(flask.request.form.to_dict())

        @app.after_request
        def change(response: flask.Response) -> flask.Response:
            if flask.request.path == "/oauth2/token" and response.status_code == 200:
                self.key = flask.g.oidc_provider_mock_storage.jwk
                response.set_data(json.dumps(self.answer(response.get_json())))
            if flask.request.path == "/userinfo":
                response.set_data(json.dumps(self.person(response.get_json())))
            return response

        self._running = mock._server._threaded_server(app, host="127.0.0.1")

    def __enter__(self) -> Provider:
        self.url = f"http://127.0.0.1:{self._running.__enter__().server_port}"
        for name, groups in PEOPLE.items():
            self.put(name, groups)
        return self

    def __exit__(self, *_: Any) -> None:
        self._running.__exit__(*_)

    def put(self, name: str, groups: list[str], **claims: Any) -> None:
        """Set the claims of a person."""
        claims = {"email": f"{name}@example.com", "email_verified": True, "groups": groups} | claims
        httpx.put(f"{self.url}/users/{name}", json=claims).raise_for_status()

    def forge(self, header: dict[str, Any], key: Any = None, **claims: Any) -> None:
        """Sign the next ID tokens again, with another header, key or other claims."""

        def forged(answer: dict[str, Any]) -> dict[str, Any]:
            own: Any = key or jwk.RSAKey.import_key(self.key.as_dict(is_private=True))
            head, body, _ = answer["id_token"].split(".")
            known = json.loads(decoded(head)) | header
            payload = json.loads(decoded(body)) | claims
            if header.get("alg") == "none":
                return answer | {"id_token": f"{encoded(known)}.{encoded(payload)}."}
            return answer | {"id_token": jose.encode(known, payload, own, algorithms=["RS256", "HS256"])}

        self.answer = forged


def decoded(part: str) -> bytes:
    from authlib.common.encoding import urlsafe_b64decode

    return urlsafe_b64decode(part.encode())


def encoded(part: Any) -> str:
    from authlib.common.encoding import urlsafe_b64encode

    return urlsafe_b64encode(json.dumps(part).encode()).decode()


@pytest.fixture
def provider() -> Iterator[Provider]:
    with Provider() as running:
        yield running


@pytest.fixture
def team(serve: Callable[..., Served], config: Config, provider: Provider, worker_id: UUID, login: str) -> Served:
    """A server with the gateway's rights, whose people log in at the provider."""
    return serve(with_provider(config, provider, database_url=SecretStr(login)))


def with_provider(config: Config, provider: Provider, **more: Any) -> Config:
    """Return the settings with a provider, which returns the browser to the address of a proxy."""
    given = {"oidc_issuer": provider.url, "oidc_client_id": "fleet", "oidc_client_secret": SecretStr("quiet")}
    given |= {"oidc_redirect_url": "https://kqueue.example/login/callback", "oidc_groups": json.dumps(GROUPS)}
    return config.model_copy(update=given | more)


def begin(client: httpx.Client, to: str = "/") -> str:
    """Begin a login, and return the provider's address."""
    answer = client.get("/login/start", params={"next": to})
    assert answer.status_code == 302, answer.text
    return answer.headers["location"]


def agree(address: str, name: str) -> str:
    """Log in at the provider, and return the path with which it returns the browser."""
    back = urlsplit(httpx.post(address, data={"sub": name}).headers["location"])
    assert (back.netloc, back.path) == ("kqueue.example", "/login/callback")
    return f"{back.path}?{back.query}"


def log_in(client: httpx.Client, name: str, to: str = "/") -> httpx.Response:
    return client.get(agree(begin(client, to), name))


def actions(engine: Engine) -> list[tuple[str, str, str]]:
    """Return actor, action and subject of all entries, the oldest first."""
    entries = audit.listing(engine, since=datetime.now(UTC) - timedelta(days=1), actor=None, limit=1000)
    return [(one.actor, one.action, re.sub("[0-9a-f-]{36}", "ID", one.subject)) for one in entries][::-1]


def test_a_person_logs_in_behind_a_proxy(team: Served, provider: Provider, engine: Engine) -> None:
    """State, nonce, PKCE and the client's secret are sent, and the cookies have all attributes."""
    with stranger(team) as client:
        client.headers.update({"X-Forwarded-Proto": "https", "Host": "kqueue.example"})
        assert "Log in with your team" in client.get("/login").text
        asked = {name: value for name, [value] in parse_qs(urlsplit(begin(client)).query).items()}
        assert asked["redirect_uri"] == "https://kqueue.example/login/callback"
        assert asked["code_challenge_method"] == "S256"
        assert min(len(asked[name]) for name in ("state", "nonce", "code_challenge")) >= 20
        kept = client.get("/login/start").headers["set-cookie"].lower()
        assert {"httponly", "secure", "samesite=lax", "path=/login"} <= {part.strip() for part in kept.split(";")}
    # httpx sends no Secure cookies over HTTP, so the rest goes without the proxy's header.
    with stranger(team) as client:
        address = begin(client, "/evaluations?state=queued")
        assert 'href="/evaluations?state=queued"' in client.get(agree(address, "ann")).text
        assert create_s256_code_challenge(provider.asked[-1]["code_verifier"]) in address
        assert "ann@example.com" in client.get("/evaluations").text
        [known] = [one for one in tokens.listing(engine) if one.name == "ann@example.com"]
        assert known.scopes == (tokens.Scope.SUBMIT,)
        assert re.fullmatch("ann-[0-9a-f]{20}", known.owner)
        assert client.post("/logout", headers=OWN_FORM).status_code == 303
        assert client.get("/evaluations").status_code == 303
    assert ("ann@example.com", "login", "OpenID Connect, from 127.0.0.1") in actions(engine)
    assert ("ann@example.com", "logout", "from 127.0.0.1") in actions(engine)


def test_people_see_their_own_work(team: Served, engine: Engine, token: Callable[..., str]) -> None:
    """Each person is a separate owner, and a group with a wide scope sees the work of others."""
    with team.client(token("problems", owner="ann")) as api:
        foreign = submit(api, 1)
    with stranger(team) as ann, stranger(team) as bob:
        log_in(ann, "ann")
        log_in(bob, "bob")
        assert ann.get(f"/evaluations/{foreign}").status_code == 404
        assert ann.post(f"/evaluations/{foreign}/cancel", headers=OWN_FORM).status_code == 404
        assert bob.get(f"/evaluations/{foreign}").status_code == 200
        assert bob.post(f"/evaluations/{foreign}/cancel", headers=OWN_FORM).status_code == 303
        # A foreign site's form changes nothing, with a person's cookie too.
        assert bob.post(f"/evaluations/{foreign}/rerun", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    found = actions(engine)
    assert ("bob@example.com", "cancel", "ID") in found
    assert ("bob@example.com", "scope", "cancel:all: ID") in found
    assert found.count(("bob@example.com", "scope", "read:all: GET /evaluations/ID")) == 1


def test_who_has_no_group_stays_out(team: Served, provider: Provider, engine: Engine) -> None:
    """A group that is gone ends the person's other sessions at the next login, and all at the end of a session."""
    with stranger(team) as client:
        answer = log_in(client, "eve")
        assert (answer.status_code, "none of the groups" in answer.text) == (403, True)
        assert client.get("/evaluations").status_code == 303
    assert actions(engine)[-1][1] == "login denied"
    with stranger(team) as one, stranger(team) as other:
        log_in(one, "bob")
        provider.put("bob", ["kernels"])
        log_in(other, "bob")
        assert (one.get("/evaluations").status_code, other.get("/evaluations").status_code) == (303, 200)
        provider.put("bob", [])
        change(engine, "UPDATE sessions SET ends_at = now()")
        again = other.get("/evaluations")
        assert again.status_code == 303
        # The browser renews the login by itself, and the provider no longer names the group.
        assert other.get(again.headers["location"]).headers["location"].startswith("/login/start?next=")
        assert log_in(other, "bob").status_code == 403
        assert other.get("/login").status_code == 200


def test_sessions_end(team: Served, engine: Engine) -> None:
    """They end after a fixed time, when idle, and when the person's token is revoked. A page that waits is idle."""
    with stranger(team) as client:
        for end in ("ends_at = now()", "seen_at = now() - interval '5 hours'"):
            log_in(client, "ann")
            assert client.get("/evaluations").status_code == 200
            change(engine, f"UPDATE sessions SET {end}")
            assert client.get("/evaluations").status_code == 303
        log_in(client, "ann")
        change(engine, "UPDATE sessions SET seen_at = now() - interval '3 hours'")
        with client.stream("GET", "/live/now", headers={"Accept": "text/event-stream"}) as stream:
            assert stream.status_code == 200
        assert change_count(engine) == 0
        assert client.get("/evaluations").status_code == 200
        assert change_count(engine) == 1
        tokens.revoke(engine, "ann@example.com")
        assert client.get("/evaluations").status_code == 303
        assert log_in(client, "ann").status_code == 200


def change_count(engine: Engine) -> int:
    """Return the number of sessions that were used within the last hour."""
    with engine.connect() as connection:
        return connection.exec_driver_sql(
            "SELECT count(*) FROM sessions WHERE seen_at > now() - interval '1 hour'"
        ).scalar_one()


def test_forged_logins(team: Served, provider: Provider, engine: Engine) -> None:
    """State, cookie and code belong to one login in one browser."""
    with stranger(team) as victim, stranger(team) as attacker:
        stolen = agree(begin(attacker), "eve")
        begin(victim)
        forged = [stolen, "/login/callback", "/login/callback?code=x", re.sub("state=[^&]*", "state=x", stolen)]
        forged += [re.sub("code=[^&]*", "error=access_denied", stolen)]
        for path in forged:
            assert victim.get(path).status_code == 403, path
        assert provider.asked == []
        back = agree(begin(victim), "ann")
        assert victim.get(f"{back}&iss=https://evil.example").status_code == 403
        back = agree(begin(victim), "ann")
        jar = {"Cookie": "; ".join(f"{one.name}={one.value}" for one in victim.cookies.jar)}
        assert victim.get(back).status_code == 200
        # The code and the cookie of the login, sent again.
        assert attacker.get(back, headers=jar).status_code == 403
        for there in ("https://evil.example", "//evil.example", "/\\evil.example", "/login"):
            assert '<a href="/">' in log_in(victim, "ann", there).text
        planted = {"Cookie": f"{next(iter(attacker.cookies.keys()), 'kqueue')}=not-json"}
        assert attacker.get("/login/callback?code=a&state=b", headers=planted).status_code == 403


def test_forged_tokens(team: Served, provider: Provider) -> None:
    with stranger(team) as client:
        for header, key, claims in (
            ({}, None, {"aud": "another"}),
            ({}, None, {"aud": ["another"], "azp": "fleet"}),
            ({}, None, {"iss": "https://evil.example"}),
            ({}, None, {"exp": 1, "iat": 0}),
            ({}, None, {"nonce": "another"}),
            ({}, None, {"sub": None}),
            ({"alg": "none"}, None, {}),
            ({"alg": "HS256"}, jwk.OctKey.import_key("public"), {}),
            ({"kid": "another"}, jwk.RSAKey.generate_key(), {}),
        ):
            provider.forge(header, key, **claims)
            answer = log_in(client, "ann")
            assert (answer.status_code, "not valid" in answer.text) == (403, True), (header, claims)
            assert client.get("/evaluations").status_code == 303
        provider.answer = lambda answer: {name: value for name, value in answer.items() if name != "id_token"}
        assert log_in(client, "ann").status_code == 403
        provider.answer = lambda answer: answer
        assert log_in(client, "ann").status_code == 200


#: Values of a claim with groups, and whether the person is let in.
VALUES: dict[str, tuple[Any, bool]] = {
    "a list": (["kernels"], True),
    "a text": ("kernels", True),
    "with others": ([None, 7, {"kernels": 1}, ["leads"], "kernels"], True),
    "many": (["x" * 100] * 100_000 + ["kernels"], True),
    "a number": (7, False),
    "zero": (0, False),
    "true": (True, False),
    "null": (None, False),
    "nested": ([["kernels"]], False),
    "an object": ({"kernels": True}, False),
    "a long text": ("kernels" * 1_500_000, False),
}


def test_groups_of_any_form(serve, config: Config, provider: Provider, worker_id: UUID) -> None:
    """Whatever the provider answers about a person, and however short its tokens live, the answer is no error."""
    served = serve(with_provider(config, provider, oidc_groups_claim="roles"))
    provider.answer = lambda answer: answer | {"expires_in": 30}
    for name, (value, admitted) in VALUES.items():
        provider.person = lambda claims, value=value: claims | {"roles": value}
        with stranger(served) as client:
            answer = log_in(client, "ann")
            assert (answer.status_code == 200) is admitted, name
            assert admitted or (answer.status_code, "none of the groups" in answer.text) == (403, True), name


def test_answers_that_cannot_be_used(serve, config: Config, provider: Provider, worker_id: UUID) -> None:
    """Without the person who logged in, or with an expired token, an answer is refused as the provider's fault."""
    served = serve(with_provider(config, provider, oidc_groups_claim="roles"))
    rightly = provider.person
    with stranger(served) as client:
        for person in ([], 7, None, "ann", {}, {"sub": None}, {"sub": 7}, {"sub": "eve", "roles": ["kernels"]}):
            provider.person = lambda _, person=person: person
            assert log_in(client, "ann").status_code in (403, 503), person
        provider.person = rightly
        for lifetime_s in (0, -1, "soon", [], 10**400):
            provider.answer = lambda answer, s=lifetime_s: answer | {"expires_in": s, "expires_at": None}
            assert log_in(client, "ann").status_code in (403, 503), lifetime_s


def test_a_planted_session_is_not_taken_over(team: Served, token: Callable[..., str]) -> None:
    with visitor(team, token("submit")) as attacker, stranger(team) as victim:
        [planted] = attacker.cookies.jar
        victim.cookies.set(planted.name, str(planted.value))
        log_in(victim, "ann")
        assert planted.value not in [one.value for one in victim.cookies.jar if one.domain == "127.0.0.1"]
        assert attacker.get("/evaluations").status_code == 303


def test_the_owner_by_address_must_be_verified(serve, config: Config, provider: Provider, worker_id) -> None:
    served = serve(with_provider(config, provider, oidc_owner_claim="email"))
    provider.put("mia", ["kernels"], email="ann@example.com", email_verified=False)
    with stranger(served) as client:
        assert "no verified email" in log_in(client, "mia").text
        assert log_in(client, "ann").status_code == 200


def test_a_provider_that_is_away(serve, config: Config, provider: Provider, worker_id) -> None:
    served = serve(with_provider(config, provider, oidc_issuer="http://127.0.0.1:9"))
    with stranger(served) as client:
        assert client.get("/login/start", headers=HTML).status_code == 503
    served = serve(with_provider(config, provider, oidc_issuer=f"{provider.url}/"))
    with stranger(served) as client:
        assert client.get("/login/start").status_code == 503


def test_wrong_settings(config: Config, provider: Provider, database_url: str) -> None:
    for name, value in {
        "oidc_client_id": None,
        "oidc_redirect_url": "https://kqueue.example/",
        "oidc_issuer": "http://provider.example",
        "oidc_groups": '{"kernels": ["everything"]}',
    }.items():
        with pytest.raises(ConfigError, match=f"KQUEUE_{name.upper()}"):
            create_app(with_provider(config, provider, **{name: value}))


def test_hostile_addresses_in_the_audit_log(served: Served, engine: Engine, token: Callable[..., str]) -> None:
    with served.client(token("read:all")) as api:
        for address in ("/status/a%00b", "/status/%ff", "/status/" + "x" * 5000):
            assert api.get(address).status_code == 404
    found = [subject for _, _, subject in actions(engine)]
    assert found[0] == "read:all: GET /status/a\\x00b"
    assert max(map(len, found)) < 300


def test_the_audit_log(served: Served, config: Config, engine: Engine, token, queued: UUID) -> None:
    """Commands, the API and the page write it, `kqueue audit` reads it, and no role of the database does."""
    assert command(config, "token", "create", "--name", "ci", "--scope", "submit", "--owner", "ci")[0] == 0
    assert command(config, "token", "edit", "ci", "--budget", "10h/7d")[0] == 0
    assert command(config, "token", "revoke", "ci")[0] == 0
    with visitor(served, token("submit")) as client, served.client(token("submit")) as api:
        assert client.post(f"/evaluations/{queued}/rerun", headers=OWN_FORM).status_code == 303
        assert client.post("/login", data={"token": "kq_wrong"}, headers=OWN_FORM).status_code == 403
        assert api.post(f"/v1/evaluations/{queued}/cancel").json()["cancelled"] is True
        assert api.post(f"/v1/evaluations/{queued}/cancel").json()["cancelled"] is False
    with served.client() as admin:
        assert admin.post("/cleanup", params={"wait_s": 0}).status_code == 200
    found = actions(engine)
    assert [action for _, action, _ in found] == [
        *("token create", "token edit", "token revoke", "login", "submit", "login denied", "cancel", "scope")
    ]
    assert found[0][2] == "ID ci for ci: submit"
    assert found[-1][2] == "admin: POST /cleanup"
    status, printed, _ = command(config, "audit", "--json", "--actor", "a submit one", "--limit", "2")
    assert status == 0
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [one["action"] for one in lines] == ["cancel", "submit"]
    assert lines[0]["subject"] == str(queued)
    assert "kq_" not in json.dumps(found)
    assert command(config, "audit", "--remove-before", "1h")[1] == "removed 0\n"
    change(engine, "UPDATE audit SET at = now() - interval '2 hours'")
    assert command(config, "audit", "--remove-before", "1h")[1] == "removed 8\n"
    assert "no entries" in command(config, "audit")[1]


@NEEDS_CHROMIUM
@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.nightly)])
def test_in_a_browser(visit: Callable[..., Any], serve, config: Config, provider: Provider, worker_id, width) -> None:
    """The provider is another site, so cookies and policies of the page must allow the way there and back."""
    port = free_port()
    page = f"http://127.0.0.1:{port}"
    given = {"oidc_issuer": provider.url.replace("127.0.0.1", "localhost")}
    serve(with_provider(config, provider, oidc_redirect_url=f"{page}/login/callback", **given), port=port)
    tab = visit(viewport={"width": width, "height": 800})
    wrong: list[str] = []
    # The provider's own page loads a style sheet from a foreign host.
    own = re.compile(re.escape(page)).match
    tab.on("console", lambda said: wrong.append(said.text) if said.type == "error" and own(said.location["url"]) else 0)
    tab.goto(f"{page}/evaluations?state=queued")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert violations(tab) == []
    tab.get_by_role("link", name="Log in with your team’s account").click()
    tab.fill("[name=sub]", "ann")
    tab.get_by_role("button", name="Authorize").click()
    tab.wait_for_url("**/evaluations?state=queued")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.get_by_text("ann@example.com").count() == 1
    # The session has ended, and the next page leads to the provider without a question.
    tab.context.clear_cookies(name=f"kqueue_{port}")
    tab.goto(f"{page}/problems")
    tab.get_by_role("button", name="ann", exact=True).click()
    tab.wait_for_url("**/problems")
    tab.get_by_role("button", name="Log out").click()
    tab.wait_for_url("**/login")
    tab.goto(f"{page}/problems")
    tab.get_by_role("link", name="Log in with your team’s account").wait_for()
    assert wrong == []
