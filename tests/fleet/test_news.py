"""Notifications to a supervisor about submissions and ended evaluations."""

from __future__ import annotations

import selectors

from sqlalchemy import Engine

from kqueue.contract import Request
from kqueue.store import evaluations
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
