"""The reuse of verdicts: the hash of each evaluation's content, and a function that answers by an earlier verdict.

``kqueue_conclude`` stores the hash of the judged content with each verdict of a judge, and ``kqueue_reuse`` searches
for it. Producers can call the latter, so it trusts no argument but hashes the contents of the evaluations' rows.
"""

from __future__ import annotations

import importlib
from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

#: The hash of the content of an evaluation ``e``.
_CONTENT: Final = (
    "encode(sha256(convert_to(e.problem_hash || ' ' || e.kernel_hash || ' ' || e.settings::text, 'UTF8')), 'hex')"
)
#: Both run with their owner's rights, so their names must not resolve to objects of a caller.
CONCLUDE: Final = """
CREATE OR REPLACE FUNCTION {schema}.kqueue_conclude(verdict jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    given {schema}.verdicts := jsonb_populate_record(NULL::{schema}.verdicts, verdict);
BEGIN
    given.finished_at := now();
    given.content := NULL;
    IF given.attempt_id IS NOT NULL
        AND (given.blame IN ('none', 'candidate') OR coalesce(given.facts ->> 'suspected', '') = 'true')
    THEN
        SELECT {content} INTO given.content FROM {schema}.evaluations AS e WHERE e.id = given.evaluation_id;
    END IF;
    INSERT INTO {schema}.verdicts VALUES (given.*) ON CONFLICT DO NOTHING;
    UPDATE {schema}.evaluations SET state = 'done' WHERE id = given.evaluation_id;
    PERFORM pg_notify('kqueue_verdicts', given.evaluation_id::text);
END
$$
"""
#: The last 32 judged evaluations of each content are examined. All of them that were judged under today's conditions
#: must agree. The limits make the planner use the indexes, one step for each evaluation, however many were judged. So
#: one plan suits all calls, and planning at each call would take longer than the search. Rows are selected by id alone,
#: because the planner would scan all queued evaluations if there were none at the last ANALYZE.
REUSE: Final = """
CREATE FUNCTION {schema}.kqueue_reuse(which uuid[], live_s double precision) RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    equal record;
    waits boolean;
    earlier jsonb;
BEGIN
    FOR equal IN
        WITH serving AS MATERIALIZED (
            SELECT DISTINCT lane, w.fingerprint
            FROM {schema}.workers AS w CROSS JOIN LATERAL unnest(w.lanes) AS lane
            WHERE w.stopped_at IS NULL AND w.paused IS NULL AND w.fingerprint IS NOT NULL
              AND w.heartbeat_at >= now() - make_interval(secs => live_s)
        ), asked AS MATERIALIZED (
            SELECT e.id, e.lane, {content} AS content
            FROM unnest(which) AS given (id) CROSS JOIN LATERAL (
                SELECT * FROM {schema}.evaluations AS one WHERE one.id = given.id LIMIT 1
            ) AS e
            WHERE e.reuse AND e.state = 'queued' AND e.attempts = 0
              AND (e.expires_at IS NULL OR e.expires_at > now()) AND e.lane IN (SELECT lane FROM serving)
        ), judged AS (
            SELECT c.content, last.*
            FROM (SELECT DISTINCT content FROM asked) AS c CROSS JOIN LATERAL (
                SELECT v.evaluation_id, v.category, v.finished_at, a.environment_hash,
                       coalesce(a.fingerprint, w.fingerprint) AS fingerprint,
                       v.reusable IS TRUE AND NOT EXISTS (
                           SELECT FROM {schema}.gpus AS g
                           WHERE g.uuid = w.device AND (g.state = 'quarantined' OR v.finished_at < g.since)
                       ) AS sound
                FROM {schema}.verdicts AS v
                JOIN {schema}.attempts AS a ON a.id = v.attempt_id
                JOIN {schema}.workers AS w ON w.id = a.worker_id
                WHERE v.content = c.content
                ORDER BY v.finished_at DESC LIMIT 32
            ) AS last
        ), agreed AS (
            SELECT content, fingerprint, max(finished_at) FILTER (WHERE sound) AS finished_at,
                   (array_agg(evaluation_id ORDER BY finished_at DESC) FILTER (WHERE sound))[1] AS original,
                   (array_agg(environment_hash ORDER BY finished_at DESC) FILTER (WHERE sound))[1] AS environment_hash
            FROM judged GROUP BY content, fingerprint
            HAVING bool_or(sound) AND count(DISTINCT category) = 1
        )
        SELECT DISTINCT ON (asked.id) asked.id, agreed.original, agreed.environment_hash
        FROM asked
        JOIN agreed ON agreed.content = asked.content
        JOIN serving ON serving.lane = asked.lane AND serving.fingerprint = agreed.fingerprint
        ORDER BY asked.id, agreed.finished_at DESC
    LOOP
        SELECT e.state = 'queued' AND e.attempts = 0 INTO waits
        FROM {schema}.evaluations AS e WHERE e.id = equal.id FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN waits IS NOT TRUE;
        SELECT to_jsonb(v) INTO earlier FROM {schema}.verdicts AS v WHERE v.evaluation_id = equal.original;
        CONTINUE WHEN NOT FOUND OR earlier -> 'evidence' ? 'emptied_at';
        PERFORM {schema}.kqueue_conclude(earlier || jsonb_build_object(
            'evaluation_id', equal.id, 'attempt_id', NULL, 'reusable', NULL, 'written_by', 'database',
            'reused_from', equal.original, 'judged_at', earlier -> 'finished_at',
            'environment_hash', equal.environment_hash
        ));
        RETURN NEXT equal.id;
    END LOOP;
END
$$
"""
#: Changes to the view of the first migration: the environment and the original of a reused verdict.
_OVERVIEW: Final = (
    ("n.hash = last.environment_hash", "n.hash = coalesce(last.environment_hash, v.environment_hash)"),
    ("AS total_s\n", "AS total_s,\n            v.reused_from\n"),
)


def upgrade() -> None:
    """Add columns and functions. Earlier evaluations and verdicts are not reused."""
    op.add_column("evaluations", sa.Column("reuse", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    for table in ("workers", "attempts"):
        op.add_column(table, sa.Column("fingerprint", sa.Text(), nullable=True))
    op.add_column("verdicts", sa.Column("content", sa.Text(), nullable=True))
    op.add_column("verdicts", sa.Column("reusable", sa.Boolean(), nullable=True))
    op.add_column("verdicts", sa.Column("reused_from", sa.Uuid(), nullable=True))
    op.add_column("verdicts", sa.Column("judged_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("verdicts", sa.Column("environment_hash", sa.Text(), nullable=True))
    op.create_foreign_key(
        op.f("fk_verdicts_environment_hash_environments"), "verdicts", "environments", ["environment_hash"], ["hash"]
    )
    op.create_index(
        "ix_verdicts_content", "verdicts", ["content", "finished_at"], postgresql_where=sa.text("content IS NOT NULL")
    )
    schema = _schema()
    op.execute(CONCLUDE.format(schema=schema, content=_CONTENT))
    op.execute(REUSE.format(schema=schema, content=_CONTENT))
    op.execute(
        "COMMENT ON FUNCTION kqueue_reuse IS 'Ends queued evaluations with verdicts of equal ones that were judged, "
        "and returns them. A worker counts as live for live_s seconds after its last heartbeat.'"
    )
    op.execute("REVOKE ALL ON FUNCTION kqueue_reuse FROM PUBLIC")
    query = _overview()
    for before, after in _OVERVIEW:
        assert before in query
        query = query.replace(before, after)
    op.execute(f"CREATE OR REPLACE VIEW evaluation_overview AS {query}")


def downgrade() -> None:
    """Remove the reuse. Reused verdicts stay, and their messages name the originals."""
    op.execute("""
        UPDATE verdicts SET message = concat_ws(' ', nullif(message, ''), '(reused from ' || reused_from || ')')
        WHERE reused_from IS NOT NULL
    """)
    op.execute("DROP FUNCTION kqueue_reuse")
    op.execute("DROP VIEW evaluation_overview")
    op.execute(f"CREATE VIEW evaluation_overview AS {_overview()}")
    first = importlib.import_module("migrations.versions.0001_everything")
    [meaning] = [meaning for name, meaning, _ in first.VIEWS if name == "evaluation_overview"]
    op.execute(f"COMMENT ON VIEW evaluation_overview IS '{meaning}'")
    conclude = importlib.import_module("migrations.versions.0005_conclude")
    op.execute(conclude.CONCLUDE.format(schema=_schema()).replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION"))
    op.drop_index("ix_verdicts_content", table_name="verdicts")
    for column in ("environment_hash", "judged_at", "reused_from", "reusable", "content"):
        op.drop_column("verdicts", column)
    for table in ("attempts", "workers"):
        op.drop_column(table, "fingerprint")
    op.drop_column("evaluations", "reuse")


def _overview() -> str:
    first = importlib.import_module("migrations.versions.0001_everything")
    [query] = [query for name, _, query in first.VIEWS if name == "evaluation_overview"]
    return query


def _schema() -> str:
    schema: str = op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))
    return schema
