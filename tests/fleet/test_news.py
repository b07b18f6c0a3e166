"""Notifications to a supervisor about submissions and ended evaluations."""

from __future__ import annotations

import selectors
from collections.abc import Callable

from sqlalchemy import Engine, text

from kqueue.contract import Request
from kqueue.store import evaluations
from kqueue.store.listener import Listener
from workers.bookkeeping import _Notifications


def heard(news: _Notifications, selector: selectors.BaseSelector) -> bool:
    for key, _ in selector.select(10):
        key.data.hear()
    was, news.fresh = news.fresh, False
    return was


def test_a_broken_connection_is_opened_again(server, database_url: str, engine: Engine, fields) -> None:
    """Notifications arrive before and after, although another file can have the old descriptor's number by then."""
    with selectors.DefaultSelector() as selector:
        news = _Notifications(database_url, selector)
        for _ in range(2):
            news._again_at = 0.0
            news.listen()
            assert news.fresh, "something may have been missed"
            news.fresh = False
            [submitted] = evaluations.submit(engine, [Request(**fields())])
            assert heard(news, selector)
            evaluations.cancel(engine, submitted.evaluation_id)
            assert heard(news, selector)
            server.cut(database_url)
            while selector.get_map():
                assert not heard(news, selector)
            engine.dispose()
        news.close()


def test_a_verdict_without_a_notification_is_found(
    database_url: str, engine: Engine, fields: Callable[..., dict[str, object]]
) -> None:
    """The version before notifies in its own transaction. Without a notification a waiting client reads."""
    listener = Listener(database_url, engine, application="tests")
    with selectors.DefaultSelector() as selector:
        news = _Notifications(database_url, selector)
        news.listen()
        for number, setting in enumerate(("after", "")):
            [submitted] = evaluations.submit(engine, [Request(**fields(number))], slots={"cpu": 9})
            waiting = listener.watch(submitted.evaluation_id)
            news.fresh = False
            with engine.begin() as connection:
                connection.execute(text("SELECT set_config('kqueue.notifies', :how, true)"), {"how": setting})
                connection.execute(text("SELECT kqueue_cancel(:id)"), {"id": submitted.evaluation_id})
            for key, _ in selector.select(0.5):
                key.data.hear()
            assert news.fresh is (setting == "")
            assert waiting.result(30).category == "cancelled"
        news.close()
    listener.close()
