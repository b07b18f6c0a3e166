"""The clients: refused requests, guarantees, and waiting."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, event, text

import kqueue
from kqueue import (
    AsyncClient,
    Category,
    Client,
    ConfigError,
    DatabaseUnavailable,
    IdempotencyConflict,
    InvalidRequest,
    KqueueError,
    LaneUnavailable,
    Request,
    SchemaMismatch,
    Settings,
    UnknownEvaluation,
    UnknownLane,
    Verdict,
    WaitTimeout,
    broker,
)
from kqueue.client.interfaces import Fields
from kqueue.config import Config
from kqueue.store import evaluations, gpus, schema, workers
from tests.samples import ended
from tests.store.steps import change
from tests.waiting import repeated

INF = float("inf")
TABLES = ("evaluations", "problems", "kernels")
#: Wrong fields of a request, the error, and its text.
WRONG: list[tuple[dict[str, object], type[KqueueError], str]] = [
    ({"backend": "rust"}, InvalidRequest, r"backend: .*'cuda'.*not 'rust'"),
    ({"kernel": ""}, InvalidRequest, r"kernel: the kernel's source is empty"),
    ({"kernel": "x" * 10_000_000}, InvalidRequest, r"kernel: .*10000000 bytes, but at most 1048576"),
    ({"problem": b"\xff\xfe"}, InvalidRequest, r"problem: .*unicode"),
    ({"problem": "\ud800"}, InvalidRequest, r"problem: .*not valid UTF-8"),
    ({"kernel": "a\0b"}, InvalidRequest, r"kernel: .*NUL"),
    ({"batch": "a\0b"}, InvalidRequest, r"batch: "),
    ({"settings": {"checks": 0}}, InvalidRequest, r"settings.checks: .*greater than or equal to 1, not 0"),
    ({"settings": {"chekcs": 1}}, InvalidRequest, r"settings.chekcs: there is no such field"),
    ({"settings": {"precision": "fp8"}}, InvalidRequest, r"settings.precision: .*'fp32'"),
    ({"settings": {"tolerance": {"atol": INF, "rtol": 0}}}, InvalidRequest, r"settings.tolerance.atol: .*finite"),
    ({"problem": None}, InvalidRequest, r"problem: is required"),
    ({"queue_wait_s": -1}, InvalidRequest, r"queue_wait_s: "),
    ({"lane": "GPU"}, UnknownLane, r"unknown lane 'GPU': use auto"),
    ({"lane": "gpu"}, LaneUnavailable, r"serves gpu \(served now: cpu \(1\)\).*kqueue worker"),
    ({"lane": "gpu.h200"}, LaneUnavailable, r"gpu.h200"),
    ({"backend": "cuda"}, InvalidRequest, r"backend: a cuda kernel cannot be judged on the lane cpu"),
    ({"backend": "cuda", "lane": "auto"}, LaneUnavailable, r"gpu, which cuda kernels need .*kqueue worker"),
    ({"settings": {"examine": {"profile": True}}, "lane": "auto"}, LaneUnavailable, "gpu, which examinations need"),
    (
        {"problem": "WORLD = 2", "settings": {"examine": {"profile": True}}, "lane": "gpu"},
        InvalidRequest,
        "several ranks",
    ),
    ({"problem": "WORLD = 2", "settings": {"backward": True}}, InvalidRequest, "gradients are not for .*several ranks"),
]


@pytest.fixture
def client(config: Config, worker_id: UUID) -> Iterator[Client]:
    """A client of a fleet with one live CPU worker that judges nothing."""
    with Client(config) as client:
        yield client


@pytest.fixture
def judge(engine: Engine, worker_id: UUID) -> Callable[..., None]:
    """Return a function that ends an evaluation like a worker."""

    def one(identity: UUID, category: Category = Category.PASSED) -> None:
        claimed = evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30)
        assert claimed is not None
        outcome = ended(category, log=claimed.request.kernel)
        evaluations.finish(engine, identity, claimed.number, outcome, written_by="judge", retry_delay_s=0)

    return one


@pytest.fixture
def judging(engine: Engine, judge) -> Iterator[None]:
    """Run a worker that passes every queued evaluation."""

    def work() -> None:
        for queued in evaluations.upcoming(engine, {}).get("cpu", ()):
            judge(queued.id)

    with repeated(work, 0.01):
        yield


def written(engine: Engine) -> int:
    """Return the number of rows that a submission can write."""
    with engine.connect() as connection:
        return sum(len(connection.execute(text(f"SELECT FROM {table}")).all()) for table in TABLES)


class TestSubmit:
    def test_accepted_and_sent(self, client: Client, config: Config, engine: Engine, fields) -> None:
        """The evaluation is in Postgres and its message in its queue and on record. A ticket is a value."""
        ticket = client.submit(**fields())
        assert ticket.created
        assert not ticket.done()
        assert client.get(ticket.evaluation_id) == ticket
        assert isinstance(hash(ticket), int)
        assert "_transport" not in repr(ticket)
        with broker.make_app(config) as app:
            assert broker.waiting(app, "cpu") == {ticket.evaluation_id}
        assert evaluations.published(engine) == {"cpu": {ticket.evaluation_id}}

    def test_the_message_holds_no_source(self, client: Client, config: Config, fields) -> None:
        """The message is the id as JSON, with a label for Flower."""
        ticket = client.submit(**fields(kernel="class ModelNew: secret = 1", kernel_label="mine"))
        with broker.make_app(config) as app, app.connection_for_read() as connection:
            raw = connection.default_channel.client.lrange("kqueue.cpu", 0, -1)[0].decode()
        message = json.loads(raw)
        assert message["content-type"] == "application/json"
        assert message["headers"]["id"] == str(ticket.evaluation_id)
        assert "kernel=mine" in message["headers"]["kwargsrepr"]
        assert "secret" not in raw

    def test_a_request_or_its_fields(self, client: Client, fields) -> None:
        """Both forms work, but not together. Settings can be a mapping. A key names one evaluation."""
        whole = client.submit(Request(**fields(settings=Settings(checks=2), idempotency_key="k")))
        again = client.submit(**fields(settings={"checks": 2}, idempotency_key="k"))
        assert (whole.created, again.created) == (True, False)
        assert whole.evaluation_id == again.evaluation_id
        with pytest.raises(IdempotencyConflict, match="idempotency_key: 'k'"):
            client.submit(**fields(2, idempotency_key="k"))
        with pytest.raises(InvalidRequest, match="not both"):
            client.submit(Request(**fields()), kernel="x")
        assert Fields.__optional_keys__ == Request.model_fields.keys()
        with pytest.raises(TypeError, match="idempotency"):
            client.evaluate(**fields(idempotency="k"))

    def test_auto_takes_the_gpu_where_there_is_one(self, client: Client, config, engine, fields) -> None:
        """`auto` is cpu with CPU workers only, and gpu as soon as a GPU worker lives."""
        first = client.submit(**fields(lane="auto"))
        workers.register(engine, id=uuid4(), name="g", host="h", pid=1, lanes=["gpu"], device="GPU-1")
        second = client.submit(**fields(lane="auto"))
        with broker.make_app(config) as app:
            assert broker.waiting(app, "cpu") == {first.evaluation_id}
            assert broker.waiting(app, "gpu") == {second.evaluation_id}

    def test_a_group_needs_a_host_with_a_gpu_for_each_rank(self, client: Client, engine: Engine, fields) -> None:
        """The error names the number of the largest host, and why a GPU is absent. A CPU slot takes all ranks."""
        for number, host in enumerate(("a", "a", "a", "b")):
            device, lanes = f"GPU-{number}", ["gpu", f"gpu.{host}"]
            workers.register(engine, id=uuid4(), name=device, host=host, pid=1, lanes=lanes, device=device)
            gpus.register(engine, host=host, index=number, uuid=device, name="NVIDIA H200")
        group = fields(problem="WORLD = 3")

        def refused(lane: str) -> str:
            with pytest.raises(LaneUnavailable, match=r"runs on 3 GPUs of one host \(WORLD = 3\)") as caught:
                client.submit(**group | {"lane": lane})
            return str(caught.value)

        assert client.submit(**group | {"lane": "gpu"}).created
        assert refused("gpu.b").endswith("the largest host on gpu.b has 1")
        assert client.submit(**group | {"lane": "gpu.b"}, allow_idle_lane=True).created
        gpus.drain(engine, "GPU-1", reason="a fan")
        assert refused("auto").endswith("the largest host on gpu has 2 in service (GPU 1 is drained: a fan)")
        assert client.submit(**group).created

    def test_a_batch_is_all_or_nothing(self, client: Client, engine: Engine, fields) -> None:
        """The error names the number of the wrong entry, and no row is written."""
        with pytest.raises(InvalidRequest, match=r"entry 1: kernel: .*empty"):
            client.submit_batch([fields(0), fields(1, kernel=" "), fields(2)])
        with pytest.raises(LaneUnavailable, match=r"entry 2: lane"):
            client.submit_batch([fields(0), fields(1), fields(2, lane="gpu")])
        assert written(engine) == 0
        assert len({ticket.evaluation_id for ticket in client.submit_batch(fields(n) for n in range(3))}) == 3

    def test_a_crashed_producer_finds_its_batch(self, client: Client, config: Config, fields) -> None:
        """The batch's name returns its evaluations in the order of submission, and an unknown name returns none."""
        tickets = client.submit_batch([fields(n, batch="night") for n in range(20)])
        tickets.append(client.submit(**fields(20, batch="night")))
        client.submit(**fields(21, batch="day"))
        with Client(config) as another:
            assert another.batch("night") == tickets
            assert another.batch("noon") == []

    def test_redis_away_is_no_error(self, config: Config, engine: Engine, worker_id, fields, tmp_path, caplog) -> None:
        """A committed submission is accepted with a warning, and the sweeper sends its message."""
        with Client(config, redis_url=f"redis+socket://{tmp_path}/nobody.sock") as client:
            ticket = client.submit(**fields())
            assert "sweeper" in caplog.text
            assert client.get(ticket.evaluation_id) == ticket
            assert evaluations.published(engine) == {}
            assert ticket.cancel()


class TestRefused:
    def test_bad_fields(self, client: Client, engine: Engine, fields) -> None:
        """The error names the field, its fault and the valid values, but never repeats the source."""
        for changes, error, message in WRONG:
            with pytest.raises(error, match=message) as caught:
                client.submit(**fields(**changes))
            assert len(str(caught.value)) < 300
        for evaluate in (partial(client.evaluate, **fields()), partial(client.evaluate_batch, [fields()])):
            with pytest.raises(InvalidRequest, match=r"timeout: .*not NaN"):
                evaluate(timeout=INF - INF)
        assert written(engine) == 0

    def test_no_worker_at_all(self, client: Client, engine: Engine, worker_id: UUID, fields) -> None:
        """A submission to an empty fleet fails with that reason, unless the producer accepts to wait for a worker."""
        workers.stop(engine, worker_id)
        for lane in ("auto", "cpu"):
            with pytest.raises(LaneUnavailable, match="kqueue up"):
                client.submit(**fields(lane=lane))
        assert client.submit(**fields(), allow_idle_lane=True).created

    def test_a_fallback_for_gpu_lanes(self, config: Config, engine: Engine, worker_id: UUID, fields) -> None:
        """It replaces a GPU lane without workers, unless it cannot judge the kernel or has no workers either."""

        def lane_of(**changes: object) -> str:
            with Client(config.model_copy(update={"gpu_fallback": "cpu"})) as client:
                allow = bool(changes.pop("allow_idle_lane", False))
                evaluation_id = client.submit(**fields(**changes), allow_idle_lane=allow).evaluation_id
            with engine.connect() as connection:
                return connection.scalars(
                    text("SELECT lane FROM evaluations WHERE id = :id"), {"id": evaluation_id}
                ).one()

        assert [lane_of(lane=lane) for lane in ("gpu.a100", "gpu", "cpu", "auto")] == ["cpu"] * 4
        assert lane_of(lane="gpu.a100", allow_idle_lane=True) == "gpu.a100"
        with pytest.raises(LaneUnavailable):
            lane_of(lane="gpu.a100", backend="cuda")
        workers.stop(engine, worker_id)
        with pytest.raises(LaneUnavailable, match=r"serves gpu\.a100"):
            lane_of(lane="gpu.a100")

    def test_no_database(self, config: Config, fields, tmp_path: Path) -> None:
        """The first use of a client raises the typed error if no database answers."""
        with (
            Client(config, database_url=f"postgresql://postgres@/x?host={tmp_path}") as client,
            pytest.raises(DatabaseUnavailable, match="KQUEUE_DATABASE_URL"),
        ):
            client.submit(**fields())

    def test_no_settings(self, config: Config) -> None:
        """The error names the setting to set, and does not repeat a URL, which can hold a password."""
        with pytest.raises(ConfigError, match=r"KQUEUE_DATABASE_URL.*kqueue up"):
            Client()
        for url in ("mysql://u@h/d", "nonsense"):
            with pytest.raises(ConfigError, match="KQUEUE_DATABASE_URL") as caught:
                Client(config, database_url=url)
            assert "u@h" not in str(caught.value)

    def test_another_schema(self, config: Config, database_url: str, fields) -> None:
        """An old schema is refused permanently before any read or write."""
        schema.downgrade(database_url, "base")
        with Client(config) as client, pytest.raises(SchemaMismatch, match="kqueue db upgrade"):
            client.submit(**fields())


class TestWait:
    def test_before_and_after(self, client: Client, engine: Engine, judge, fields) -> None:
        """A later verdict and an earlier one are returned, in spite of foreign notifications."""
        ticket = client.submit(**fields())
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ticket.wait, 60)
            change(engine, "SELECT pg_notify('kqueue_verdicts', 'nonsense')")
            judge(ticket.evaluation_id)
            verdict = waiting.result()
        assert (verdict.category, verdict.evaluation_id) == (Category.PASSED, ticket.evaluation_id)
        assert ticket.wait(timeout=60) == verdict == ticket.verdict() == client.verdict(str(ticket.evaluation_id))
        assert ticket.done()

    def test_no_polling(self, client: Client, fields) -> None:
        """A waiting client sends no query."""
        ticket = client.submit(**fields())
        engine, read = client._transport._engine, threading.Event()
        asked: list[str] = []
        event.listen(engine, "checkin", lambda *_: read.set())
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ticket.wait, 60)
            assert read.wait(60), "it reads once, when it listens"
            event.listen(engine, "before_cursor_execute", lambda *args: asked.append(args[2]))
            time.sleep(0.7)
            assert asked == []
            ticket.cancel()
            assert waiting.result().category is Category.CANCELLED
        assert asked, "the test sees what a client asks"

    def test_survives_a_broken_connection(self, client: Client, server, database_url: str, judge, fields) -> None:
        """A waiter gets a verdict that was written while its listening connection was broken."""
        first, second = client.submit_batch([fields(0), fields(1)])
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(ticket.wait, 60) for ticket in (first, second)]
            for ticket in (first, second):
                time.sleep(0.2)
                server.cut(database_url)
                judge(ticket.evaluation_id)
            assert [future.result().passed for future in waiting] == [True, True]

    def test_many_waiters_one_thread(self, client: Client, judge, fields) -> None:
        """Many tickets with several waiters each need one more thread and one more connection."""
        tickets = client.submit_batch(fields(n) for n in range(40))
        futures = [client._transport.watch(ticket.evaluation_id) for ticket in tickets * 3]
        assert [thread.name for thread in threading.enumerate()].count("kqueue-verdicts") == 1
        for ticket in tickets:
            judge(ticket.evaluation_id)
        assert all(future.result(timeout=60).passed for future in futures)

    def test_closing_releases_waiters(self, client: Client, fields) -> None:
        """Closing the client raises an error in each waiter, and no thread remains."""
        ticket = client.submit(**fields())
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ticket.wait)
            time.sleep(0.2)
            client.close()
            with pytest.raises(KqueueError, match="closed"):
                waiting.result(timeout=60)
        assert "kqueue-verdicts" not in [thread.name for thread in threading.enumerate()]

    def test_as_completed_and_wait_all(self, client: Client, judge, fields) -> None:
        """The one yields in the order of verdicts, the other returns in the order of tickets."""
        tickets = client.submit_batch(fields(n) for n in range(3))
        coming = client.as_completed(tickets, timeout=60)
        for ticket in reversed(tickets):
            judge(ticket.evaluation_id)
            assert next(coming)[0] == ticket
        assert [v.log for v in client.wait_all(tickets, timeout=1e10)] == [fields(n)["kernel"] for n in range(3)]
        with pytest.raises(WaitTimeout, match="1 of 2"):
            list(client.as_completed([tickets[0], client.submit(**fields(9))], timeout=2))


@pytest.mark.usefixtures("judging")
class TestEvaluate:
    def test_a_bad_entry_never_spoils_the_rest(self, client: Client, fields) -> None:
        """Verdicts and refusals have the positions of their entries."""
        client.submit(**fields(100, idempotency_key="taken"))
        mine = fields(5, idempotency_key="mine")
        entries = [fields(0), fields(1, backend="rust"), Request(**fields(2)), fields(3, lane="gpu")]
        entries += [fields(4, idempotency_key="taken"), "nonsense", mine, mine]
        answers = client.evaluate_batch(entries, timeout=INF)
        first = [Verdict, InvalidRequest, Verdict, LaneUnavailable]
        assert [type(one) for one in answers] == [*first, IdempotencyConflict, InvalidRequest, Verdict, Verdict]
        assert [a.log for a in answers if isinstance(a, Verdict)] == [fields(n)["kernel"] for n in (0, 2, 5, 5)]
        assert answers[6] == answers[7]


@pytest.mark.anyio
class TestAsync:
    @pytest.fixture
    async def client(self, config: Config, worker_id: UUID) -> AsyncGenerator[AsyncClient]:
        async with AsyncClient(config) as client:
            yield client

    async def test_the_whole_way(self, client: AsyncClient, judging, fields) -> None:
        """Submit, wait, evaluate and batches work as coroutines."""
        ticket = await client.submit(**fields())
        verdict = await ticket.wait(timeout=60)
        assert verdict.passed
        assert await ticket.done()
        assert await ticket.verdict() == await client.verdict(ticket.evaluation_id) == verdict
        assert await (await client.get(str(ticket.evaluation_id))).cancel() is False
        assert (await client.evaluate(**fields(1), timeout=60)).passed
        answers = await client.evaluate_batch([fields(2), {}, fields(3)], timeout=60)
        assert [type(a) for a in answers] == [Verdict, InvalidRequest, Verdict]
        tickets = await client.submit_batch([fields(4, batch="night"), fields(5, batch="night")])
        assert len(await client.wait_all(tickets, 20)) == 2
        assert await client.batch("night") == tickets
        with pytest.raises(UnknownEvaluation):
            await client.cancel(uuid4())

    async def test_hundreds_of_waiters_need_no_threads(self, client: AsyncClient, judge, fields) -> None:
        """The loop and one listening thread wait for all, and a cancelled waiter disturbs no other."""
        tickets = await client.submit_batch([fields(n) for n in range(50)])
        before = threading.active_count()
        waiters = [asyncio.create_task(ticket.wait(60)) for ticket in tickets * 6]
        await asyncio.sleep(0.1)
        assert threading.active_count() <= before + 1
        waiters[0].cancel()
        for ticket in tickets:
            await asyncio.to_thread(judge, ticket.evaluation_id)
        answers = await asyncio.gather(*waiters, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert all(isinstance(answer, Verdict) for answer in answers[1:])

    async def test_timeouts_and_order(self, client: AsyncClient, judge, fields) -> None:
        """`as_completed` yields in the order of verdicts, and a missing verdict is a WaitTimeout."""
        first, second = await client.submit_batch([fields(0), fields(1)])
        await asyncio.to_thread(judge, second.evaluation_id)
        assert (await second.wait(timeout=60)).passed  # it listens from now on
        coming = client.as_completed([first, second], timeout=2)
        assert (await anext(coming))[0] == second
        with pytest.raises(WaitTimeout, match="1 of 2"):
            await anext(coming)
        with pytest.raises(WaitTimeout):
            await first.wait(timeout=0.05)


class TestPublicFace:
    def test_every_name_is_there(self) -> None:
        """Each lazily exported name exists, and the type checker's list is the same."""
        typed = {
            line.rsplit(" as ", 1)[1]
            for line in Path(kqueue.__file__).read_text().splitlines()
            if line.startswith("    from kqueue.") and " as " in line
        }
        assert typed == set(kqueue._homes())
        assert all(getattr(kqueue, name).__name__ == name for name in typed)
        assert typed <= set(dir(kqueue))
        with pytest.raises(AttributeError, match="nonsense"):
            kqueue.nonsense  # noqa: B018
