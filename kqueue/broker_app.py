"""The Celery application under a name, for programs that load one by name: ``celery -A kqueue.broker_app``.

Flower must be given it: whoever reads from Redis with another visibility timeout has messages delivered
twice.
"""

from __future__ import annotations

from kqueue.broker import CONSUMER_PATIENCE_S, make_app
from kqueue.config import load

app = make_app(load(), patience_s=CONSUMER_PATIENCE_S)
# What it takes, answers and events, is its own: an observer never hands out again what workers have taken.
app.conf.broker_transport_options |= {
    "unacked_key": "flower.unacked",
    "unacked_index_key": "flower.unacked_index",
    "unacked_mutex_key": "flower.unacked_mutex",
}
