"""Owners of problems, kernels, evaluations, batches, searches and tokens.

All existing rows belong to the owner ``local``. :func:`kqueue.store.roles.apply` enables row-level security, because
its policies name roles. The new indexes and foreign keys read all evaluations and block writers meanwhile: with a
million evaluations for about a minute.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

#: A session of the fleet itself can act for any owner (``kqueue.owner``), and restrict itself to the owner's rows
#: (``kqueue.sees``). All other sessions belong to the owner of their login, whatever they set. The functions use
#: ``session_user``, so that they hold within functions that run with their owner's rights too.
_SESSION: Final = """
CREATE FUNCTION {schema}.kqueue_trusted() RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT r.rolsuper OR r.rolbypassrls OR pg_has_role(r.oid, c.relowner, 'MEMBER') OR EXISTS (
        SELECT FROM unnest(ARRAY['kqueue_gateway', 'kqueue_worker', 'kqueue_reader']) AS role
        WHERE pg_has_role(r.oid, to_regrole(role)::oid, 'MEMBER')
    )
    FROM pg_roles AS r, pg_class AS c WHERE r.rolname = session_user AND c.oid = '{schema}.tokens'::regclass
$$;
CREATE FUNCTION {schema}.kqueue_owner() RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(
        CASE
            WHEN {schema}.kqueue_trusted() THEN nullif(current_setting('kqueue.owner', true), '')
            ELSE (SELECT l.owner FROM {schema}.logins AS l WHERE l.name = session_user)
        END,
        'local'
    )
$$;
CREATE FUNCTION {schema}.kqueue_sees_all() RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT {schema}.kqueue_trusted() AND current_setting('kqueue.sees', true) IS DISTINCT FROM 'own'
$$;
CREATE FUNCTION {schema}.kqueue_act(who text, held boolean) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF NOT {schema}.kqueue_trusted() THEN
        RETURN;
    END IF;
    PERFORM pg_catalog.set_config('kqueue.owner', who, true);
    PERFORM pg_catalog.set_config('kqueue.sees', CASE WHEN held THEN 'own' ELSE 'all' END, true);
    -- The owner of the tables obeys kqueue.sees itself, so it needs no role.
    IF held AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_roles AS r, pg_catalog.pg_class AS c
        WHERE r.rolname = session_user AND c.oid = '{schema}.tokens'::pg_catalog.regclass
          AND NOT r.rolsuper AND NOT r.rolbypassrls AND pg_catalog.pg_has_role(r.oid, c.relowner, 'MEMBER')
    ) THEN
        PERFORM pg_catalog.set_config('role', 'kqueue_tenant', true);
    END IF;
END
$$;
"""
#: Its callers see their own evaluations only, but a lane's window counts the evaluations of all owners. For producers'
#: logins it counts only the ones of their owner, unless the tables belong to a superuser.
_WAITING: Final = """
CREATE FUNCTION {schema}.kqueue_waiting(of_lane text, most integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    sees text := current_setting('kqueue.sees', true);
    number integer;
BEGIN
    PERFORM set_config('kqueue.sees', 'all', true);
    -- This order is the index's. Without it the planner can prefer to read the whole table.
    SELECT count(*) INTO number FROM (
        SELECT FROM {schema}.evaluations AS e WHERE e.state = 'queued' AND e.lane = of_lane
        ORDER BY e.priority, e.producer, e.submitted_at, e.id LIMIT most
    ) AS few;
    PERFORM set_config('kqueue.sees', coalesce(sees, ''), true);
    RETURN number;
END
$$
"""
_FUNCTIONS: Final = {
    "kqueue_trusted": "True for sessions of the fleet itself, which can act for any owner.",
    "kqueue_owner": "The owner for whom the session acts.",
    "kqueue_sees_all": "True if the session is not held to the rows of one owner.",
    "kqueue_act": (
        "Lets a trusted session act for an owner until the transaction ends, and if held see only the owner''s rows."
    ),
    "kqueue_waiting": "The number of queued evaluations of a lane, at most the given number.",
}
#: Changes to the functions that run with their owner's rights.
_CONCLUDES: Final = (
    ("given.content := NULL;", "given.content := NULL;\n    {owner}"),
    ("given.finished_at\n        FROM", "given.finished_at, e.owner\n        FROM"),
)
_OWNED: Final = "SELECT e.owner INTO given.owner FROM {schema}.evaluations AS e WHERE e.id = given.evaluation_id;"
_CANCELS: Final = ("e.id = which FOR", "e.id = which AND {mine} FOR")
_REUSES: Final = ("WHERE e.reuse AND", "WHERE {mine} AND e.reuse AND")
_MINE: Final = "({schema}.kqueue_sees_all() OR e.owner = {schema}.kqueue_owner())"
#: Evaluations of two owners are never equal. Hashes of the first owner's stay the same.
_CONTENT: Final = (
    "convert_to(e.problem",
    "convert_to(CASE e.owner WHEN 'local' THEN '' ELSE e.owner || ' ' END || e.problem",
)
_PROBES: Final = (
    ("problems (hash, source) VALUES (problem", "problems (hash, owner, source) VALUES (problem, {fleet}"),
    (
        "kernels (hash, backend, source) VALUES (kernel",
        "kernels (hash, owner, backend, source) VALUES (kernel, {fleet}",
    ),
    ("evaluations (id,", "evaluations (owner, id,"),
    ("VALUES (\n        (probe ->> 'id')::uuid, problem", "VALUES (\n        {fleet}, (probe ->> 'id')::uuid, problem"),
)
_KERNEL: Final = ("k.hash = e.kernel_hash", "k.hash = e.kernel_hash AND k.owner = e.owner")
#: Tables with an owner, and their primary keys before, if the owner joins them.
_TABLES: Final = {
    "problems": "hash",
    "kernels": "hash",
    "batches": "name",
    "evaluations": None,
    "verdicts": None,
    "summaries": None,
    "baselines": None,
    "search_runs": None,
    "tokens": None,
}
#: Indexes that get the column, so that policies need no other read.
_INCLUDING: Final = ("ix_summaries_problem", "ix_summaries_batch", "ix_evaluations_problem_hash_submitted_at")
_COMMENTS: Final = {
    "problems": ("A reference, identified by the hash of its source", "."),
    "kernels": ("A candidate''s source and backend, identified by the hash of both", "."),
}


def upgrade() -> None:
    """Give everything to the owner ``local``."""
    schema = _schema()
    op.create_table(
        "logins",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_logins")),
        comment="A login of the database that submits for an owner.",
    )
    op.execute(_SESSION.format(schema=schema))
    op.drop_constraint("fk_baselines_problem_hash_problems", "baselines")
    for kind in ("problem", "kernel"):
        op.drop_constraint(f"fk_evaluations_{kind}_hash_{kind}s", "evaluations")
    for table, key in _TABLES.items():
        op.add_column(table, sa.Column("owner", sa.Text(), server_default=sa.text("kqueue_owner()"), nullable=False))
        if key is not None:
            op.drop_constraint(f"pk_{table}", table)
            op.create_primary_key(op.f(f"pk_{table}"), table, [key, "owner"])
    for kind in ("problem", "kernel"):
        names = ([f"{kind}_hash", "owner"], ["hash", "owner"])
        op.create_foreign_key(op.f(f"fk_evaluations_{kind}_hash_owner_{kind}s"), "evaluations", f"{kind}s", *names)
    op.drop_constraint("uq_evaluations_idempotency_key", "evaluations")
    op.create_unique_constraint(
        op.f("uq_evaluations_owner_idempotency_key"), "evaluations", ["owner", "idempotency_key"]
    )
    op.drop_constraint("uq_search_runs_name", "search_runs")
    op.create_unique_constraint(op.f("uq_search_runs_owner_name"), "search_runs", ["owner", "name"])
    op.create_index("ix_evaluations_owner_submitted_at", "evaluations", ["owner", "submitted_at"])
    for name in _INCLUDING:
        _index(
            name, lambda on: on.replace("reused)", "reused, owner)").replace("(kernel_hash)", "(kernel_hash, owner)")
        )
    for table, (words, end) in _COMMENTS.items():
        op.execute(f"COMMENT ON TABLE {table} IS '{words} within its owner{end}'")
    op.execute(_WAITING.format(schema=schema))
    for name, meaning in _FUNCTIONS.items():
        op.execute(f"COMMENT ON FUNCTION {name} IS '{meaning}'")
        op.execute(f"REVOKE ALL ON FUNCTION {name} FROM PUBLIC")
    mine = _MINE.format(schema=schema)
    conclude, cancel, reuse, probe = _functions()
    op.execute(_changed(conclude, *_CONCLUDES, _CONTENT).replace("{owner}", _OWNED.format(schema=schema)))
    op.execute(_changed(cancel, _CANCELS).replace("{mine}", mine))
    op.execute(_changed(reuse, _REUSES, _CONTENT).replace("{mine}", mine))
    op.execute(_changed(probe, *_PROBES).replace("{fleet}", "'kqueue''s probes'"))
    for name, query in _views().items():
        changed = _changed(query, _KERNEL)
        if name == "evaluation_overview":
            changed = _changed(changed, ("v.reused_from", "v.reused_from, e.owner"))
        op.execute(f"CREATE OR REPLACE VIEW {name} AS {changed}")
    for name in (*_views(), "fleet_utilisation"):
        op.execute(f"ALTER VIEW {name} SET (security_invoker = true)")


def downgrade() -> None:
    """Remove the owners. Equal sources of several owners become one, and later batches and keys of equal names go."""
    policies = sa.text("SELECT tablename, policyname FROM pg_policies WHERE schemaname = current_schema()")
    for table, policy in op.get_bind().execute(policies).all():
        op.execute(f"DROP POLICY {policy} ON {table}")
    secured = sa.text("""
        SELECT relname FROM pg_class WHERE relrowsecurity AND relnamespace = current_schema()::regnamespace
    """)
    for table in op.get_bind().scalars(secured).all():
        op.execute(f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY, DISABLE ROW LEVEL SECURITY")
    if op.get_bind().scalar(sa.text("SELECT to_regrole('kqueue_tenant')")) is not None:
        op.execute(f"REVOKE ALL ON ALL TABLES IN SCHEMA {_schema()} FROM kqueue_tenant")
        op.execute(f"REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {_schema()} FROM kqueue_tenant")
    for function in _functions():
        op.execute(function)
    op.execute("DROP FUNCTION kqueue_waiting")
    overview = sa.text("SELECT obj_description('evaluation_overview'::regclass)")
    comment = op.get_bind().scalar(overview)
    op.execute("DROP VIEW evaluation_overview")
    for name, query in _views().items():
        op.execute(f"CREATE OR REPLACE VIEW {name} AS {query}")
    op.execute(sa.text("SELECT 1") if comment is None else f"COMMENT ON VIEW evaluation_overview IS '{comment}'")
    for name in (*_views(), "fleet_utilisation"):
        op.execute(f"ALTER VIEW {name} RESET (security_invoker)")
    for kind in ("problem", "kernel"):
        op.drop_constraint(f"fk_evaluations_{kind}_hash_owner_{kind}s", "evaluations")
    op.drop_constraint("uq_evaluations_owner_idempotency_key", "evaluations")
    op.drop_constraint("uq_search_runs_owner_name", "search_runs")
    _keep_one("evaluations", "idempotency_key", "UPDATE evaluations SET idempotency_key = NULL")
    _keep_one("search_runs", "name", "UPDATE search_runs SET name = left(name, 60) || '-' || left(id::text, 36)")
    for name in _INCLUDING:
        _index(
            name, lambda on: on.replace("reused, owner)", "reused)").replace("(kernel_hash, owner)", "(kernel_hash)")
        )
    for table, key in _TABLES.items():
        if key is not None:
            _keep_one(table, key, f"DELETE FROM {table}")  # noqa: S608
            op.drop_constraint(f"pk_{table}", table)
            op.create_primary_key(op.f(f"pk_{table}"), table, [key])
        op.drop_column(table, "owner")
    for kind in ("problem", "kernel"):
        op.create_foreign_key(
            op.f(f"fk_evaluations_{kind}_hash_{kind}s"), "evaluations", f"{kind}s", [f"{kind}_hash"], ["hash"]
        )
    op.create_foreign_key(
        op.f("fk_baselines_problem_hash_problems"), "baselines", "problems", ["problem_hash"], ["hash"]
    )
    op.create_unique_constraint(op.f("uq_evaluations_idempotency_key"), "evaluations", ["idempotency_key"])
    op.create_unique_constraint(op.f("uq_search_runs_name"), "search_runs", ["name"])
    for table, (words, end) in _COMMENTS.items():
        op.execute(f"COMMENT ON TABLE {table} IS '{words}{end}'")
    for name in ("kqueue_act", "kqueue_sees_all", "kqueue_owner", "kqueue_trusted"):
        op.execute(f"DROP FUNCTION {name}")
    op.drop_table("logins")


def _keep_one(table: str, key: str, change: str) -> None:
    """Change all rows of equal keys, except the first owner's."""
    op.execute(f"""
        {change} WHERE EXISTS (SELECT FROM {table} AS o WHERE o.{key} = {table}.{key} AND o.owner < {table}.owner)
    """)


def _index(name: str, change: Callable[[str], str]) -> None:
    """Create an index again with another definition."""
    on: str = op.get_bind().scalar(sa.text("SELECT pg_get_indexdef(to_regclass(:name))"), {"name": name})
    op.execute(f"DROP INDEX {name}")
    op.execute(change(on))


def _changed(text: str, *changes: tuple[str, str]) -> str:
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def _functions() -> list[str]:
    """Return the definitions of conclude, cancel, reuse and probe before this migration."""
    everything, schema = importlib.import_module("migrations.versions.0018_everything"), _schema()
    return [
        everything.FUNCTIONS[f"kqueue_{name}"][1]
        .format(schema=schema, content=everything.CONTENT)
        .replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")
        for name in ("conclude", "cancel", "reuse", "probe")
    ]


def _views() -> dict[str, str]:
    """Return the queries of the views of kernels before this migration."""
    medians = importlib.import_module("migrations.versions.0019_medians")
    everything = importlib.import_module("migrations.versions.0018_everything")
    views = {name: everything.VIEWS[name][1] for name in ("evaluation_overview", "outcomes")}
    return views | {"best_verdicts": medians._BEST.format(error=medians._ERROR)}


def _schema() -> str:
    schema: str = op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))
    return schema
