"""Logins to the page, and the duration and rights of sessions."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote
from uuid import UUID, uuid4

import httpx
import pytest
import structlog
from pydantic import SecretStr
from sqlalchemy import Engine, text
from structlog.testing import capture_logs

from kqueue.config import Config
from kqueue.http import access
from kqueue.store import sessions, tokens
from tests.http.serving import command
from tests.http.standin import Served
from tests.store.steps import change, count
from tests.waiting import until
from tests.web.visiting import OWN_FORM, enter, stranger, visitor

#: Addresses of pages, each of which needs a login.
SCRIPT = "javascript:alert(1)"
PAGES = ("/", "/evaluations", "/evaluations/{id}", "/evaluations/{id}/files/kernel.py", "/live/now")


def _cookie(client: httpx.Client) -> str:
    [cookie] = client.cookies.jar
    assert cookie.value is not None
    return cookie.value


def test_a_stranger_is_sent_to_log_in(served: Served, queued: UUID) -> None:
    with stranger(served) as client:
        for address in PAGES:
            wanted = address.format(id=queued)
            answer = client.get(wanted)
            assert (answer.status_code, answer.headers["location"]) == (303, f"/login?next={quote(wanted, safe='')}")
            assert str(queued) not in answer.text
        assert client.get("/login").status_code == 200


def test_a_token_lets_in_until_it_is_revoked(served: Served, token: Callable[[str], str], engine: Engine) -> None:
    secret = token("read")
    with stranger(served) as client:
        answer = enter(client, secret, next="/evaluations?state=queued")
        assert answer.status_code == 200
        assert 'href="/evaluations?state=queued"' in answer.text
        [kept] = answer.headers.get_list("set-cookie")
        assert {"httponly", "samesite=strict", "path=/"} <= {part.strip().lower() for part in kept.split(";")}
        assert "secure" not in kept.lower()
        assert secret not in kept
        assert client.get("/evaluations").status_code == 200
        [known] = tokens.listing(engine)[-1:]
        tokens.revoke(engine, str(known.id))
        assert client.get("/evaluations").status_code == 303
    assert count(engine, "sessions") == 0


def test_requests_for_pages_have_a_name_in_the_log(
    served: Served, token: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has the name and id of the session's token, and neither for a visitor without a session."""
    # The used one keeps the processors that an earlier test configured.
    monkeypatch.setattr(access, "_log", structlog.get_logger())
    with capture_logs() as told, visitor(served, token("read")) as client, stranger(served) as guest:
        for one in (client, guest):
            one.get("/evaluations")
        lines = until(
            lambda: (
                (found := {line["status"]: line for line in told if line.get("route") == "/evaluations"}).keys()
                >= {200, 303}
                and found
            ),
            what="both lines",
        )
    caller, nobody = lines[200], lines[303]
    assert (caller["caller"], nobody["caller"], nobody["token"]) == ("a read one", None, None)
    assert UUID(caller["token"])


def test_over_https_the_cookie_says_so(served: Served, token: Callable[[str], str]) -> None:
    with stranger(served) as client:
        client.headers["X-Forwarded-Proto"] = "https"
        assert "secure" in enter(client, token("read")).headers["set-cookie"].lower()


def test_what_is_no_token_does_not_let_in(served: Served) -> None:
    """A wrong token is refused, and so is a large body before a login."""
    with stranger(served) as client:
        for given in ("", "kq_wrong", "kq_\x00", "<script>", "x" * 5000):
            answer = enter(client, given)
            assert answer.status_code == 403
            assert "set-cookie" not in answer.headers
            assert "<script>" not in answer.text
        assert enter(client, "x" * 100_000).status_code == 413
        assert client.post("/logout", content=b"x" * 10).status_code == 401


def test_a_login_leads_nowhere_else(served: Served, token: Callable[[str], str]) -> None:
    secret = token("read")
    for there in (*(f"{begin}evil.example" for begin in ("https://", "//", "/\\", "/\t/")), SCRIPT, "/login"):
        with stranger(served) as client:
            assert 'name="next" value="/"' in client.get("/login", params={"next": there}).text
            assert '<a href="/">' in enter(client, secret, next=there).text


def test_a_session_that_was_set_before_is_not_taken_over(served: Served, token: Callable[[str], str]) -> None:
    """A planted cookie, even from the attacker's own session, does not identify the session after a login."""
    secret = token("submit")
    with visitor(served, secret) as attacker, stranger(served) as client:
        planted = _cookie(attacker)
        name = next(iter(attacker.cookies.keys()))
        answer = client.post("/login", data={"token": secret}, headers={**OWN_FORM, "Cookie": f"{name}={planted}"})
        assert answer.status_code == 200
        assert _cookie(client) != planted
        assert attacker.get("/evaluations").status_code == 303


def test_a_session_ends(served: Served, browser: httpx.Client, engine: Engine, token: Callable[[str], str]) -> None:
    change(engine, "UPDATE sessions SET ends_at = now()")
    assert browser.get("/evaluations").status_code == 303
    with visitor(served, token("read")), engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM sessions")) == 1, "those that ended are removed"


def test_whoever_logs_out_is_out(served: Served, browser: httpx.Client) -> None:
    kept = {"Cookie": f"{next(iter(browser.cookies.keys()))}={_cookie(browser)}"}
    assert browser.post("/logout", headers=OWN_FORM).headers["location"] == "/login"
    assert not browser.cookies
    with stranger(served) as client:
        assert client.get("/evaluations", headers=kept).status_code == 303


def test_forms_of_other_sites_are_refused(browser: httpx.Client, queued: UUID) -> None:
    foreign: list[dict[str, str]] = [
        {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {},
    ]
    for headers in foreign:
        for address in (f"/evaluations/{queued}/cancel", f"/evaluations/{queued}/rerun", "/logout"):
            assert browser.post(address, headers=headers).status_code == 403
        assert browser.post("/login", data={"token": "x"}, headers=headers).status_code == 403
    assert "queued" in browser.get(f"/evaluations/{queued}").text


def test_an_own_form_by_plain_http(served: Served, browser: httpx.Client, queued: UUID) -> None:
    """Browsers send only the origin over an insecure connection."""
    answer = browser.post(f"/evaluations/{queued}/cancel", headers={"Origin": served.url})
    assert answer.headers["location"] == f"/evaluations/{queued}"
    assert "cancelled" in browser.get(f"/evaluations/{queued}").text


def test_who_may_look_may_not_cancel(served: Served, token: Callable[[str], str], queued: UUID) -> None:
    with visitor(served, token("read")) as client:
        assert "Cancel</button>" not in client.get(f"/evaluations/{queued}").text
        assert client.post(f"/evaluations/{queued}/cancel", headers=OWN_FORM).status_code == 403


def test_a_link_is_good_once(served: Served, engine: Engine) -> None:
    secret = sessions.invite(engine, "somebody")
    with stranger(served) as first, stranger(served) as second:
        assert first.get("/login", params={"link": secret}).status_code == 200
        assert first.get("/evaluations").status_code == 200
        assert second.get("/login", params={"link": secret}).status_code == 403
        assert second.get("/evaluations").status_code == 303
        [known] = [known for known in tokens.listing(engine) if known.name == "somebody"]
        assert known.scopes == (tokens.Scope.PROBLEMS, *tokens.WIDE)
        tokens.revoke(engine, "somebody")
        assert first.get("/evaluations").status_code == 303


def test_a_link_grows_old_and_is_no_session(served: Served, engine: Engine) -> None:
    secret = sessions.invite(engine, "somebody")
    with stranger(served) as client:
        name = f"kqueue_{httpx.URL(served.url).port}"
        assert client.get("/evaluations", headers={"Cookie": f"{name}={secret}"}).status_code == 303
        change(engine, "UPDATE sessions SET ends_at = now()")
        assert client.get("/login", params={"link": secret}).status_code == 403


def test_a_session_is_no_link_and_no_credential_of_the_api(browser, served, queued, engine) -> None:
    """It is refused as both, and its table holds no secret."""
    with stranger(served) as client:
        assert client.get("/login", params={"link": _cookie(browser)}).status_code == 403
    assert browser.get(f"/evaluations/{queued}").status_code == 200
    for address in ("/v1/evaluations", f"/v1/evaluations/{queued}", "/v1/fleet", "/metrics"):
        assert browser.get(address).status_code == 401
    assert browser.post(f"/v1/evaluations/{queued}/cancel").status_code == 401
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT sessions::text FROM sessions")).scalars().all()
    assert rows
    assert not any(_cookie(browser) in row for row in rows)


def test_local_users_who_are_trusted_need_no_login(serve: Callable[[Config], Served], config: Config) -> None:
    with stranger(serve(config.model_copy(update={"http_tokens": "trust-local-users"}))) as client:
        assert client.get("/evaluations").status_code == 200
        assert client.get("/evaluations", headers={"Host": "evil.example"}).status_code == 403
        assert client.get("/evaluations", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403


def test_the_server_s_own_role_is_enough(serve, config: Config, login: str, token, engine: Engine, queued) -> None:
    served = serve(config.model_copy(update={"database_url": SecretStr(login)}))
    link = sessions.invite(engine, "somebody")
    with visitor(served, token("submit")) as client, stranger(served) as guest:
        assert client.get("/").status_code == 200
        assert client.get(f"/evaluations/{queued}").status_code == 200
        assert client.post(f"/evaluations/{queued}/cancel", headers=OWN_FORM).status_code == 303
        again = client.post(f"/evaluations/{queued}/rerun", headers=OWN_FORM).headers["location"]
        assert client.get(again).status_code == 200
        assert guest.get("/login", params={"link": link}).status_code == 200
        assert client.post("/logout", headers=OWN_FORM).status_code == 303


def test_the_command_prints_a_link_that_lets_in(served: Served, config: Config) -> None:
    status, printed, _ = command(config, "open", "--no-browser", "--url", served.url)
    assert status == 0
    with stranger(served) as client:
        assert client.get(printed.strip()).status_code == 200
        assert client.get("/evaluations").status_code == 200


@pytest.mark.parametrize(("owner", "status"), [((), 200), (("--owner", "eve"), 404)], ids=["all", "owner"])
def test_a_shared_link_lets_many_look(
    served: Served, config: Config, engine: Engine, queued: UUID, owner: tuple[str, ...], status: int
) -> None:
    """It shows its page, lets nobody change anything, and is revoked like a token."""
    page = f"/evaluations/{queued}"
    link = command(config, "open", "--share", "7", "--to", page, "--url", served.url, *owner)[1].strip()
    for _ in range(2):
        with stranger(served) as client:
            assert f'href="{page}"' in client.get(link).text
            assert client.get(page).status_code == status
            assert client.post(f"{page}/cancel", headers=OWN_FORM).status_code in (403, 404)
    [known] = [known for known in tokens.listing(engine) if "shared until" in known.name]
    tokens.revoke(engine, known.name)
    with stranger(served) as client:
        assert client.get(link).status_code == 403


def test_browsers_that_came_by_a_former_secret_are_out(served: Served, engine: Engine) -> None:
    identity = uuid4()
    with visitor(served, tokens.renew(engine, identity, "it", [tokens.Scope.READ])) as client:
        assert client.get("/evaluations").status_code == 200
        tokens.renew(engine, identity, "it", [tokens.Scope.READ])
        assert client.get("/evaluations").status_code == 303
