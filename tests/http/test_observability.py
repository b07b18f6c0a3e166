"""The dashboard, the alerts and their page use existing metrics, and a real Prometheus accepts them."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kqueue.config import Config
from tests.http.standin import Served, submit
from tests.services import free_port
from tests.waiting import until

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "docker" / "observability"
DASHBOARD = json.loads((PLACE / "grafana" / "kqueue.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_what_is_asked_for_is_there(served: Served, token: Callable[..., str]) -> None:
    """Dashboard and alerts use existing names only, and the page lists exactly all of them."""
    with served.client(token("read:all")) as http:
        text = http.get("/metrics").raise_for_status().text
    # The names under which Prometheus finds the metrics, including metrics without a value yet.
    ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    names = {family.name + end for family in text_string_to_metric_families(text) for end in ends[family.type]}
    asked = set(re.findall(r"kqueue_[a-z0-9_]+", " ".join([*EXPRESSIONS, (PLACE / "alerts.yml").read_text()])))
    assert asked <= names
    page = (ROOT / "docs" / "observe.md").read_text()
    told = set(re.findall(r"`(kqueue_[a-z0-9_]+)`", page))
    assert told == {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"kqueue_[a-z0-9_]+", str(EXPRESSIONS))}
    owners = {name for name in told if name.startswith("kqueue_owner_")}
    assert (len(owners), told - owners) == (2, shown), "the dashboard shows all other metrics"


def written_by_grafana(dashboard: dict[str, Any]) -> Any:
    """Return a dashboard after a round trip through Grafana's published types, with their defaults."""
    pytest.importorskip("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.cog.runtime import panelcfg_config
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    assert all(panelcfg_config(panel["type"]) for panel in dashboard["panels"]), "a kind of panel that Grafana lacks"
    return json.loads(JSONEncoder().encode(Dashboard.from_json(copy.deepcopy(dashboard))))


def lost(given: Any, kept: Any, at: str = "") -> list[str]:
    """Return the paths of values that the round trip lost or changed."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [place for key in given for place in lost(given[key], kept.get(key, KeyError), f"{at}/{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [place for i, one in enumerate(given) for place in lost(one, kept[i], f"{at}/{i}")]
    return [] if given == kept else [at]


def test_grafana_s_own_types_take_the_dashboard() -> None:
    """Each field at each depth belongs to the types, and a misspelt field is reported."""
    assert lost(DASHBOARD, written_by_grafana(DASHBOARD)) == []
    wrong = copy.deepcopy(DASHBOARD)
    wrong["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"
    assert lost(wrong, written_by_grafana(wrong)) == ["/panels/1/fieldConfig/defaults/units"]


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on the PATH")
    return found


def test_alerts_rise_when_they_should() -> None:
    """They fire for lanes without workers, and at the first failure of the fleet."""
    words = [program("promtool"), "test", "rules", str(PLACE / "alerts_test.yml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def prometheus(serve: Callable[[Config], Served], config: Config, token: Any, tmp_path: Path) -> Iterator[Any]:
    """Run a real Prometheus that scrapes a fleet by the project's configuration. Return clients of both."""
    binary, served = program("prometheus"), serve(config)
    (tmp_path / "token").write_text(token("read:all"))
    text = (PLACE / "prometheus.yml").read_text()
    for given, here in {
        "/etc/prometheus/alerts.yml": str(PLACE / "alerts.yml"),
        "/run/secrets/metrics_token": str(tmp_path / "token"),
        "http:18188": served.url.removeprefix("http://"),
        "15s": "1s",
    }.items():
        assert given in text
        text = text.replace(given, here)
    (tmp_path / "prometheus.yml").write_text(text)
    subprocess.run(
        [program("promtool"), "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True
    )
    address = f"127.0.0.1:{free_port()}"
    words = [binary, f"--config.file={tmp_path / 'prometheus.yml'}", f"--web.listen-address={address}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*words, f"--storage.tsdb.path={tmp_path / 'data'}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}/api/v1") as asked, served.client() as fleet:
            yield asked, fleet
    finally:
        process.terminate()
        process.wait()


def test_a_real_prometheus_reads_all_of_it(prometheus, worker_id: Any, judge) -> None:
    """It finds the fleet up, evaluates every panel and every rule, and counts new verdicts."""
    asked, fleet = prometheus

    def value(expression: str) -> float | None:
        try:
            answer = asked.get("/query", params={"query": expression.replace("$__rate_interval", "1m")})
        except httpx.TransportError:
            return None  # Prometheus starts
        if answer.status_code == 503:
            return None  # Prometheus opens its storage
        assert answer.status_code == 200, (expression, answer.text)
        result = answer.json()["data"]["result"]
        return float(result[0]["value"][1]) if result else None

    until(lambda: value('up{job="kqueue"}') == 1, what="the first scrape")
    judge(submit(fleet, 0))
    submit(fleet, 1)
    until(lambda: value('kqueue_evaluations_total{category="passed"}') == 1, what="the verdict")
    until(lambda: value("sum(kqueue_queued)") == 1, what="what waits")
    for expression in EXPRESSIONS:
        value(expression)

    def evaluated() -> bool:
        rules = [rule for group in asked.get("/rules").json()["data"]["groups"] for rule in group["rules"]]
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}, rules
        return len(rules) >= 7 and all(rule["health"] == "ok" for rule in rules)

    until(evaluated, what="the rules")
