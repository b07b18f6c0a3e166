"""The compose stack for real, on the CPU: `make compose-test`. Needs a Docker engine and minutes."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kqueue import RemoteClient
from kqueue.categories import Category
from tests.compose.program import CPU, ROOT, SECRETS, Compose
from tests.gallery import gallery
from tests.services import free_port
from tests.waiting import until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]


ENTRIES = gallery.entries("cpu")
#: Kernels whose compilation keeps them running when the worker stops.
SLOW = [entry for entry in ENTRIES if entry.name.startswith("good/cpp/")]


@dataclass(frozen=True)
class Stack:
    """A running stack: Compose with and without its files and project, and the URLs of Flower and HTTP."""

    run: Compose
    settings: dict[str, str | None]  #: values of .env, used from the next run on
    flower: str
    http: str
    compose: Compose

    @property
    def auth(self) -> str:
        """Return Flower's ``user:password``."""
        return str(self.settings["FLOWER_AUTH"])

    def do(self, *arguments: str, given: str | None = None) -> str:
        """Run Compose, which must succeed, and return its output."""
        done = self.run(*arguments, given=given, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def beside(self, files: tuple[str, ...], settings: dict[str, str | None]) -> Stack:
        """Return a stopped stack with more files and settings, like one on another host."""
        project, environment = f"kqueue-test-{secrets.token_hex(4)}", self.settings | settings

        def run(*arguments: str, **options: Any) -> Any:
            return self.compose(
                (*CPU, *files), "--project-name", project, *arguments, environment=environment, **options
            )

        return Stack(run, environment, "", "", self.compose)

    def client(self, *arguments: str, given: str | None = None) -> list[dict[str, Any]]:
        """Return the JSON lines that a `kqueue` command prints in a separate container of the stack."""
        done = self.run("run", "--rm", "-T", "client", *arguments, "--json", given=given, timeout=1800)
        assert done.stdout, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def running(self) -> int:
        """Return the number of running evaluations."""
        return sum(lane["running"] for lane in self.client("status")[0]["lanes"].values())

    def hosts(self) -> list[str]:
        """Return the host of each live slot."""
        alive = "stopped_at IS NULL AND heartbeat_at > now() - interval '10 seconds'"
        return self.psql(f"SELECT host FROM workers WHERE {alive} ORDER BY 1").split()

    def psql(self, statement: str) -> str:
        """Return the plain output of a statement of the owner."""
        return self.do("exec", "-T", "postgres", "psql", "-U", "kqueue", "-Atc", statement).strip()

    def submit(self, entries: list[Any], *options: str, **fields: str) -> list[dict[str, Any]]:
        """Submit entries of the gallery, all of which must be accepted, and return the output."""
        requests = [entry.request("cpu").model_dump(mode="json", exclude_none=True) | fields for entry in entries]
        for entry, request in zip(entries, requests, strict=True):
            if entry.expected is Category.PASSED:  # also on a busy machine
                request["settings"]["deadlines"] |= {"check_s": 300, "time_s": 300}
        records = self.client("submit", "--jsonl", "-", *options, given="\n".join(map(json.dumps, requests)))
        assert [record["error"] for record in records] == [None] * len(entries)
        return records

    def judge(self, entries: list[Any], **fields: str) -> dict[str, dict[str, Any]]:
        """Return the verdicts of entries of the gallery by name, all of which must be judged."""
        return {record["kernel_label"]: record["verdict"] for record in self.submit(entries, "--wait", **fields)}

    def token(self, scope: str) -> str:
        """Return a new token's secret."""
        named = ("--name", f"test-{scope}", "--owner", "local")
        return self.do("run", "--rm", "-T", "tokens", "create", *named, "--scope", scope).strip()

    def python(self, service: str, program: str) -> list[str]:
        """Return the lines that a program prints in a service's container."""
        return self.do("exec", "-T", service, "python3", "-P", "-c", program).splitlines()

    def get(self, path: str, auth: str | None = None) -> httpx.Response:
        """Return Flower's answer."""
        return httpx.get(self.flower + path, auth=httpx.BasicAuth(*auth.split(":", 1)) if auth else None, timeout=20)


@pytest.fixture(scope="module")
def stack(compose: Compose, secret_values: dict[str, str]) -> Iterator[Stack]:
    """Start the CPU's stack as a separate project, and delete it with all its data afterwards."""
    answer = compose(CPU, "ls")
    if answer.returncode != 0:
        pytest.skip(f"no Docker engine answers (DOCKER_HOST): {answer.stderr.strip()}")
    project, flower, http = f"kqueue-test-{secrets.token_hex(4)}", free_port(), free_port()
    settings: dict[str, str | None] = {
        **secret_values,
        "FLOWER_PORT": str(flower),
        "KQUEUE_HTTP_PORT": str(http),
        "KQUEUE_CPU_SLOTS": "2",
        "PROMETHEUS_PORT": str(free_port()),
        # Only the test of traces opens this port.
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://http:4318",
    }

    def run(*arguments: str, **options: Any) -> Any:
        return compose(CPU, "--project-name", project, *arguments, environment=settings, **options)

    try:
        up = run("up", "--build", "--detach", "--wait", "--wait-timeout", "600", timeout=3000)
        if up.returncode != 0:
            pytest.fail(f"{up.stderr[-4000:]}\n{run('logs', '--no-color', '--tail', '40').stdout}")
        yield Stack(run, settings, f"http://127.0.0.1:{flower}", f"http://127.0.0.1:{http}", compose)
    finally:
        # With its profiles, also after a failed test of Prometheus.
        run("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "10", timeout=300)


@pytest.fixture(scope="module")
def verdicts(stack: Stack) -> dict[str, dict[str, Any]]:
    """Return the gallery's verdicts by the kernel's name."""
    return stack.judge(ENTRIES)


def test_gallery_gets_its_categories(verdicts: dict[str, dict[str, Any]]) -> None:
    """Every kernel of the gallery has the same verdict in containers."""
    expected = {entry.name: str(entry.expected) for entry in ENTRIES}
    assert {name: verdict["category"] for name, verdict in verdicts.items()} == expected


def test_candidates_have_uids_of_their_own(stack: Stack, verdicts: dict[str, dict[str, Any]]) -> None:
    """The worker's few capabilities are enough to run candidates under separate uids."""
    [detail] = stack.client("show", verdicts["good/torch/gelu"]["evaluation_id"])
    isolation = detail["verdict"]["evidence"]["isolation"]
    assert isolation["own_uid"] is True
    assert isolation["no_new_privs"] is True


def test_candidates_leave_nothing_behind(stack: Stack, verdicts: dict[str, dict[str, Any]]) -> None:
    """No process or file of a candidate remains after a gallery of bad kernels."""

    def left() -> list[str]:
        found = [
            stack.run("exec", "-T", "worker", "find", *what, "!", "-user", "root")
            for what in (["/proc", "-maxdepth", "1", "-name", "[0-9]*"], ["/scratch", "/dev/shm", "/run/kqueue"])
        ]
        return [done.stdout or done.stderr for done in found if done.returncode or done.stdout]

    until(lambda: not left(), 180, "an end of all that candidates and references left")


def test_flower_lists_what_was_judged(stack: Stack, verdicts: dict[str, dict[str, Any]]) -> None:
    """Flower lists both slots and each evaluation with its label, as a success only if the kernel passed."""
    wanted = {name: "SUCCESS" if verdict["category"] == "passed" else "FAILURE" for name, verdict in verdicts.items()}

    def listed() -> dict[str, str]:
        tasks = stack.get("/api/tasks", stack.auth).json().values()
        return {task["kwargs"].partition("kernel=")[2].partition(" ")[0]: task["state"] for task in tasks}

    until(lambda: wanted.items() <= listed().items(), 60, "each verdict in Flower's list")
    assert sorted(stack.get("/api/workers?refresh=true", stack.auth).json()) == ["cpu-0@worker", "cpu-1@worker"]


#: Tries each of some statements and commands, and prints the refused ones with the service that refused.
_TRY = """
import os, redis, sqlalchemy
engine = sqlalchemy.create_engine(os.environ["KQUEUE_DATABASE_URL"])
broker = redis.from_url(os.environ["KQUEUE_REDIS_URL"])
for statement in {statements!r}:
    try:
        with engine.begin() as connection:
            connection.execute(sqlalchemy.text(statement))
        print("allowed:", statement)
    except sqlalchemy.exc.ProgrammingError as error:
        print("refused:" if error.orig.sqlstate == "42501" else error.orig, statement)
for command in {commands!r}:
    try:
        broker.execute_command(*command.split())
        print("allowed:", command)
    except redis.exceptions.NoPermissionError:
        print("refused:", command)
"""
_NOBODY_MAY = (
    "UPDATE verdicts SET category = 'passed'",
    "DELETE FROM evaluations",
    "UPDATE kernels SET source = ''",
    "CREATE TABLE mine ()",
)


@pytest.mark.parametrize(
    ("service", "may_not", "commands"),
    [
        (
            "http",
            ("INSERT INTO verdicts DEFAULT VALUES", "INSERT INTO tokens (digest) VALUES ('')"),
            ("RPOP kqueue.cpu",),
        ),
        ("worker", ("INSERT INTO evaluations DEFAULT VALUES", "SELECT * FROM tokens"), ("EVAL return 0",)),
    ],
)
def test_services_have_the_rights_of_their_roles(
    stack: Stack, service: str, may_not: tuple[str, ...], commands: tuple[str, ...]
) -> None:
    """Neither a producer over HTTP nor a worker can change records or empty Redis."""
    statements, commands = (*_NOBODY_MAY, *may_not), ("FLUSHALL", "KEYS *", "CONFIG GET dir", "ACL LIST", *commands)
    tried = stack.python(service, _TRY.format(statements=statements, commands=commands))
    assert tried == [f"refused: {what}" for what in (*statements, *commands)]
    allowed = ("SELECT count(*) FROM verdicts",), ("PING",)
    tried = stack.python(service, _TRY.format(statements=allowed[0], commands=allowed[1]))
    assert tried == [f"allowed: {what}" for what in (*allowed[0], *allowed[1])]


def test_the_client_has_a_producers_rights(stack: Stack) -> None:
    """The command line's container can submit, but has no right of a worker or the owner."""
    for command in (["sweep"], ["gpu", "drain", "0"], ["token", "create", "--name", "mine", "--scope", "read"]):
        done = stack.run("run", "--rm", "-T", "client", *command)
        assert done.returncode != 0, command
        assert "Traceback" not in done.stderr


def test_http_wants_a_token(stack: Stack) -> None:
    """A submission through the published port needs a token with that right."""
    entry = next(entry for entry in ENTRIES if entry.name == "good/torch/gelu").request("cpu")
    body = entry.model_dump(mode="json", exclude_none=True)
    eval_body = {"original_model_src": entry.problem, "custom_model_src": entry.kernel, "backend": "torch"}
    for token, status in ((None, 401), ("kq_" + "0" * 43, 401), (stack.token("read"), 403)):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        for path, request in (("/v1/evaluations", body), ("/eval", eval_body)):
            answer = httpx.post(stack.http + path, json=request, headers=headers, timeout=20)
            assert answer.status_code == status, answer.text


def test_kernels_are_judged_over_http(stack: Stack) -> None:
    """A program on the host with a token gets verdicts by the API and by a client of evaluation servers."""
    token = stack.token("problems")
    entries = [entry for entry in ENTRIES if entry.name in {"good/torch/gelu", "bad/segfault"}]
    with RemoteClient(stack.http, token=token) as client:
        judged = [ticket.wait() for ticket in client.submit_batch([entry.request("cpu") for entry in entries])]
    assert [verdict.category for verdict in judged] == [entry.expected for entry in entries]

    command = [sys.executable, str(ROOT / "examples" / "eval_client.py"), stack.http]
    done = subprocess.run(command, env=os.environ | {"KQUEUE_TOKEN": token}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("actions", "interrupted"),
    [((("restart", "worker"),), False), ((("kill", "worker"), ("up", "--detach", "worker")), True)],
    ids=["restart", "kill"],
)
def test_nothing_is_lost_with_the_worker(stack: Stack, actions: tuple[tuple[str, ...], ...], interrupted: bool) -> None:
    """A restart lets evaluations end, a SIGKILL has them judged again, and each gets one verdict."""
    entries = [*SLOW, *(entry for entry in ENTRIES if entry.name.startswith("good/torch/"))]
    with ThreadPoolExecutor(1) as background:
        judging = background.submit(stack.judge, entries, batch=secrets.token_hex(4))
        _wait(lambda: stack.running() == 2)
        for action in actions:
            stack.do(*action)
        verdicts = judging.result()
    assert {name: verdict["category"] for name, verdict in verdicts.items()} == dict.fromkeys(
        (entry.name for entry in entries), "passed"
    )
    assert (max(verdict["attempts"] for verdict in verdicts.values()) > 1) is interrupted


#: Starts all services and waits for them.
UP = ("up", "--detach", "--wait", "--wait-timeout", "300")
GELU = [entry for entry in ENTRIES if entry.name == "good/torch/gelu"]


def _goes_on(stack: Stack, identity: str) -> None:
    """Check that an earlier verdict is there and a new evaluation is judged."""
    [detail] = stack.client("show", identity)
    assert detail["verdict"]["category"] == "passed"
    assert stack.judge(GELU)["good/torch/gelu"]["category"] == "passed"


def test_data_outlast_the_services(stack: Stack) -> None:
    """Verdicts survive the replacement of all containers, and the fleet continues to judge."""
    identity = stack.judge(GELU)["good/torch/gelu"]["evaluation_id"]
    stack.do("down", "--timeout", "10")
    stack.do(*UP)
    _goes_on(stack, identity)


def test_every_secret_can_be_changed(stack: Stack) -> None:
    """Secrets can be changed under running evaluations: none is lost, old secrets fail, and a token stays valid."""
    old, token, batch = dict(stack.settings), stack.token("read"), secrets.token_hex(4)
    stack.submit([*SLOW, *GELU], batch=batch)
    _wait(lambda: stack.running() == 2)
    fresh = {name: secrets.token_hex(16) for name in SECRETS}
    statement = f"ALTER USER kqueue PASSWORD '{fresh['POSTGRES_PASSWORD']}'"
    stack.do("exec", "-T", "postgres", "psql", "-U", "kqueue", "-c", statement)
    stack.settings.update(fresh | {"FLOWER_AUTH": f"flower:{fresh['FLOWER_AUTH']}"})
    stack.do(*UP)
    verdicts = [record["verdict"]["category"] for record in stack.client("wait", "--batch", batch)]
    assert verdicts == ["passed"] * len([*SLOW, *GELU])
    assert [stack.get("/", auth).status_code for auth in (str(old["FLOWER_AUTH"]), stack.auth)] == [401, 200]
    assert httpx.get(stack.http + "/v1/fleet", headers={"Authorization": f"Bearer {token}"}).status_code == 200
    for user, name in (("kqueue", "POSTGRES_PASSWORD"), ("worker", "POSTGRES_WORKER_PASSWORD")):
        for settings, allowed in ((old, False), (stack.settings, True)):
            login = ("-e", f"PGPASSWORD={settings[name]}", "postgres", "psql", "-h", "postgres", "-U", user, "kqueue")
            assert (stack.run("exec", "-T", *login, "-c", "SELECT 1").returncode == 0) is allowed, (user, allowed)


def test_a_backup_is_restored(stack: Stack) -> None:
    """A dump of the running fleet restores its verdicts and its roles' rights in an empty stack."""
    identity = stack.judge(GELU)["good/torch/gelu"]["evaluation_id"]
    shell = ("exec", "-T", "postgres", "sh", "-euc")
    dump = stack.do(*shell, "pg_dump -U kqueue -Fc kqueue | base64")
    stack.do("down", "--volumes", "--timeout", "10")
    stack.do(*UP, "postgres", "redis")
    # Policies in the dump name the roles.
    stack.do("run", "--rm", "-T", "--no-deps", "migrate")
    restore = "base64 -d | pg_restore --exit-on-error --no-owner --no-privileges -U kqueue -d kqueue"
    stack.do(*shell, f"dropdb -U kqueue kqueue; createdb -U kqueue kqueue; {restore}", given=dump)
    stack.do(*UP)
    _goes_on(stack, identity)
    cancel = f"SELECT kqueue_cancel('{identity}')"
    assert stack.python("http", _TRY.format(statements=("DELETE FROM verdicts", cancel), commands=())) == [
        "refused: DELETE FROM verdicts",
        f"allowed: {cancel}",
    ]
    login = ("-e", f"PGPASSWORD={stack.settings['POSTGRES_READER_PASSWORD']}", "postgres", "psql", "-h", "postgres")
    refused = stack.run("exec", "-T", *login, "-U", "reader", "kqueue", "-c", cancel)
    assert "permission denied for function kqueue_cancel" in refused.stderr


#: A collector of traces that stores each request in a file.
_COLLECTOR = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        with open("/tmp/spans", "ab") as spans:
            spans.write(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
HTTPServer(("", 4318), Collector).serve_forever()
"""


def test_traces_reach_a_collector(stack: Stack) -> None:
    """The worker's image can send traces to a collector on its network."""
    stack.do("exec", "-d", "http", "python3", "-P", "-c", _COLLECTOR)
    # A trace without a producer's span has the evaluation's id.
    trace = bytes.fromhex(stack.judge(GELU)["good/torch/gelu"]["evaluation_id"].replace("-", ""))
    seen = f"import pathlib; p = pathlib.Path('/tmp/spans'); print(p.exists() and {trace!r} in p.read_bytes())"
    _wait(lambda: stack.python("http", seen) == ["True"])


def test_prometheus_reads_the_fleet(stack: Stack) -> None:
    """With the profile `observability` Prometheus reads metrics with a token, and each alert's rule is valid."""
    stack.settings["KQUEUE_METRICS_TOKEN"] = stack.token("read")
    stack.do("up", "--detach", "prometheus")
    with httpx.Client(base_url=f"http://127.0.0.1:{stack.settings['PROMETHEUS_PORT']}/api/v1", timeout=20) as api:

        def answer(path: str, **query: str) -> Any:
            try:
                return api.get(path, params=query).raise_for_status().json()["data"]
            except httpx.TransportError:
                return {}

        _wait(lambda: [target["health"] for target in answer("/targets").get("activeTargets", [])] == ["up"])
        # The counters start with the server, which can be new.
        stack.judge(GELU)
        query = "sum(kqueue_evaluations_total) > 0"
        _wait(lambda: bool(answer("/query", query=query).get("result")))
        rules = [rule for group in answer("/rules")["groups"] for rule in group["rules"]]
        written = re.findall(r"- alert: (\w+)", (ROOT / "docker" / "observability" / "alerts.yml").read_text())
        assert [rule["name"] for rule in rules] == written
        _wait(lambda: {rule["health"] for group in answer("/rules")["groups"] for rule in group["rules"]} == {"ok"})
    stack.do("rm", "--stop", "--force", "prometheus")


def test_slots_are_added_and_taken_away(stack: Stack) -> None:
    """Running evaluations end before their slots are removed, and none is judged twice."""
    entries, batch = [*SLOW, *GELU], secrets.token_hex(4)
    stack.submit(entries, batch=batch)
    _wait(lambda: stack.running() == 2)
    for slots in ("3", "1"):
        stack.settings["KQUEUE_CPU_SLOTS"] = slots
        stack.do(*UP)
        assert stack.hosts() == ["worker"] * int(slots)
    verdicts = [record["verdict"] for record in stack.client("wait", "--batch", batch)]
    assert [(verdict["category"], verdict["attempts"]) for verdict in verdicts] == [("passed", 1)] * len(entries)
    stack.settings["KQUEUE_CPU_SLOTS"] = "2"
    stack.do(*UP)


def test_another_host_takes_part(stack: Stack, tmp_path: Path) -> None:
    """A worker by the second file of docs/deploy.md joins another host's services and leaves them."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    [shown] = re.findall(r"`worker-host.yml`:\n\n```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "worker-host.yml").write_text(shown)
    # It reaches the first host's services by their names.
    first = json.loads(stack.do("config", "--format", "json"))
    network = first["networks"]["services"]["name"]
    (tmp_path / "route.yml").write_text(f"networks: {{ window: {{ external: true, name: {network} }} }}\n")
    files = tuple(str(tmp_path / name) for name in ("worker-host.yml", "route.yml"))
    environment = first["services"]["worker"]["environment"]
    urls = {name: environment[name] for name in ("KQUEUE_DATABASE_URL", "KQUEUE_REDIS_URL")}
    other = stack.beside(files, {**urls, "KQUEUE_HOSTNAME": "second", "KQUEUE_CANDIDATE_UID": "60000"})
    try:
        other.do(*UP, "worker")
        assert stack.hosts() == ["second", "second", "worker", "worker"]
        identities = [record["id"] for record in stack.submit([*SLOW, *GELU], batch=secrets.token_hex(4))]
        _wait(lambda: stack.running() == 4)
        other.do("stop", "worker")
        records = stack.client("wait", *identities)
        assert [record["verdict"]["category"] for record in records] == ["passed"] * len(identities)
        named = ", ".join(f"'{identity}'" for identity in identities)
        hosts = "SELECT DISTINCT w.host FROM attempts a JOIN workers w ON w.id = a.worker_id"
        assert stack.psql(f"{hosts} WHERE a.evaluation_id IN ({named}) ORDER BY 1").split() == ["second", "worker"]
        assert stack.hosts() == ["worker", "worker"]
    finally:
        other.run("down", "--timeout", "10")


@pytest.fixture
def before(stack: Stack, tmp_path: Path) -> Iterator[str]:
    """Yield the schema's revision before the newest migration, with a new stack of that code running."""
    versions = "migrations/versions"
    names = sorted(path.name for path in (ROOT / versions).glob("[0-9]*.py"))
    if len(names) < 2:
        pytest.skip("there is one migration, so no version before can be upgraded")
    previous = names[-2]
    git = ["git", "-C", str(ROOT)]

    def printed(*arguments: str) -> list[str]:
        return subprocess.run([*git, *arguments], capture_output=True, text=True).stdout.split()

    for commit in printed("log", "--format=%H", "--", versions):
        # A commit can have other migrations, which were merged later.
        if max(filter(re.compile(r"\d").match, printed("ls-tree", "--name-only", f"{commit}:{versions}"))) == previous:
            break
    else:
        pytest.skip(f"there is no history to take code with {previous} from")
    subprocess.run([*git, "archive", "-o", str(tmp_path / "before.tar"), commit], check=True)
    tree = tmp_path / "before"
    shutil.unpack_archive(tmp_path / "before.tar", tree)
    # It has today's requirements and build, so that only the code and the schema differ.
    shutil.copy(ROOT / "pyproject.toml", tree)
    shutil.copytree(ROOT / "docker", tree / "docker", dirs_exist_ok=True)
    # In some versions this file names a folder that a read-only container lacks, so that no worker starts.
    uids = Path("workers", "judge", "host", "uids.py")
    shutil.copy(ROOT / uids, tree / uids)
    if wheels := os.environ.get("WHEELHOUSE"):
        shutil.copytree(ROOT / wheels, tree / wheels)
    stack.settings["KQUEUE_TAG"] = "test-before"
    stack.do("--project-directory", str(tree), "build", "migrate", "worker")
    stack.do("down", "--volumes", "--timeout", "10")
    stack.do(*UP)
    yield previous[:4]
    stack.settings.pop("KQUEUE_TAG", None)


def test_an_upgrade_migrates(stack: Stack, before: str) -> None:
    """In an upgrade by docs/deploy.md the old worker finishes its evaluations under the new schema."""
    revision = "SELECT version_num FROM alembic_version"
    assert stack.psql(revision) == before
    identity = stack.judge(GELU)["good/torch/gelu"]["evaluation_id"]
    batch = secrets.token_hex(4)
    stack.submit([*SLOW, *GELU], batch=batch)
    _wait(lambda: stack.running() == 2)
    old = stack.settings.pop("KQUEUE_TAG")
    stack.do(*UP, "redis", "postgres")
    stack.do("run", "--rm", "-T", "--no-deps", "migrate")
    assert stack.psql(revision) > before
    assert stack.hosts() == ["worker", "worker"]
    stack.do(*UP, "--no-deps", "worker")
    stack.do(*UP)
    verdicts = [record["verdict"] for record in stack.client("wait", "--batch", batch)]
    assert [(verdict["category"], verdict["attempts"]) for verdict in verdicts] == [("passed", 1)] * len([*SLOW, *GELU])
    _goes_on(stack, identity)

    stack.settings["KQUEUE_TAG"] = old
    refused = stack.run("run", "--rm", "-T", "--no-deps", "client", "status")
    assert refused.returncode != 0
    assert "it was made by a newer version" in refused.stderr


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.2)
