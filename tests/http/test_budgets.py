"""Budgets of tokens over HTTP, in Python and on the command line."""

from __future__ import annotations

import json
from uuid import UUID

import httpx
import pytest
from sqlalchemy import Engine, text

from kqueue import BudgetSpent, RemoteClient
from kqueue.config import Config
from tests.http.serving import command, problem_of
from tests.http.standin import Served, end
from tests.samples import request_fields


def test_a_spent_budget(served: Served, config: Config, engine: Engine, worker_id: UUID) -> None:
    """429 with the time to wait, a typed exception at once, and `token list` and `cost` tell what is used and left."""
    made = json.loads(
        command(config, "token", "create", "--name", "n", "--scope", "problems", "--budget", "1m/hour", "--json")[1]
    )
    assert made["budget"] == {"seconds": 60, "window_s": 3600, "then": "refuse", "used_s": 0, "left_s": 60}
    with served.client(made["token"]) as http:
        accepted = http.post("/v1/evaluations", json=request_fields(1)).raise_for_status().json()
        assert end(engine, worker_id, UUID(accepted["evaluation_id"]))
        with engine.begin() as connection:
            connection.execute(text("UPDATE attempts SET started_at = now() - interval '900 s'"))
        answer = http.post("/v1/evaluations", json=request_fields(2))
        body = problem_of(answer, 429, "budget_spent")
        assert 3500 < int(answer.headers["retry-after"]) <= 3600
        assert (body["budget_s"], body["window_s"]) == (60, 3600)
        assert http.get(f"/v1/evaluations/{accepted['evaluation_id']}").status_code == 200
        problem_of(http.post("/v1/evaluations/each", json={"entries": [request_fields(3)]}), 429, "budget_spent")
    with RemoteClient(url=served.url, token=made["token"]) as client, pytest.raises(BudgetSpent) as spent:
        client.submit(**request_fields(2))
    assert spent.value.retry_after_s > 3500
    [listed] = [json.loads(line) for line in command(config, "token", "list", "--json")[1].splitlines()][:1]
    assert 600 <= listed["budget"]["used_s"] <= 900
    assert listed["budget"]["left_s"] == 0
    [cost] = [json.loads(line) for line in command(config, "cost", "--json")[1].splitlines()]
    assert cost["budget"]["left_s"] == 0
    assert "then refuse" in " ".join(command(config, "cost")[1].split())
    command(config, "token", "edit", "n", "--budget", "3600s/7d", "--when-spent", "lower")[1]
    with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {made['token']}"}, timeout=60) as http:
        assert http.post("/v1/evaluations", json=request_fields(2)).status_code == 201
    command(config, "token", "edit", made["id"], "--no-budget")[1]
    listed = [json.loads(line) for line in command(config, "token", "list", "--json")[1].splitlines()]
    assert [one["budget"] for one in listed] == [None] * len(listed)
