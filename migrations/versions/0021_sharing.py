"""Shared problems, and sessions of agents.

Evaluations of a session reuse verdicts of this session only. The new column of evaluations is added without a rewrite,
and its index is empty.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_SESSION: Final = """
CREATE FUNCTION {schema}.kqueue_session() RETURNS text LANGUAGE sql STABLE AS $$
    SELECT nullif(pg_catalog.current_setting('kqueue.session', true), '')
$$
"""
#: As in kqueue.store.reports.boards: a kernel counts by its median measurement. Of an owner's kernels the fastest
#: counts, so that the number of its kernels stays hidden.
_BOARD: Final = """
CREATE FUNCTION {schema}.kqueue_board(of_problem text, most integer) RETURNS TABLE (
    rank bigint, owner text, "precision" text, device text, runtime_ms double precision, baseline_ms double precision,
    speedup double precision, measured bigint
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    sees text := current_setting('kqueue.sees', true);
BEGIN
    PERFORM set_config('kqueue.sees', 'all', true);
    RETURN QUERY
    WITH taking_part AS (
        SELECT p.owner FROM {schema}.problems AS p
        JOIN {schema}.shared_problems AS s ON s.hash = p.hash AND s.owner = coalesce(p.shared_from, p.owner)
        WHERE p.hash = of_problem AND s.leaderboard
    ), every AS (
        SELECT e.owner, e.settings ->> 'precision' AS "precision", n.device, m.runtime_ms, v.baseline_ms, m.speedup,
               count(*) OVER alike AS measured,
               row_number() OVER (alike ORDER BY m.speedup NULLS FIRST, m.runtime_ms DESC, m.evaluation_id) AS place
        FROM {schema}.summaries AS m
        JOIN {schema}.evaluations AS e ON e.id = m.evaluation_id
        JOIN {schema}.verdicts AS v ON v.evaluation_id = m.evaluation_id
        JOIN {schema}.attempts AS a ON a.id = v.attempt_id
        LEFT JOIN {schema}.environments AS n ON n.hash = a.environment_hash
        WHERE m.problem_hash = of_problem AND m.owner IN (SELECT owner FROM taking_part)
          AND m.category = 'passed' AND NOT m.reused AND m.runtime_ms IS NOT NULL
        WINDOW alike AS (PARTITION BY e.owner, e.kernel_hash, e.settings ->> 'precision', n.device)
    ), best AS (
        SELECT DISTINCT ON (owner, "precision", device) * FROM every WHERE place = (measured + 1) / 2
        ORDER BY owner, "precision", device, speedup DESC NULLS LAST, runtime_ms
    )
    SELECT rank() OVER (PARTITION BY "precision", device ORDER BY speedup DESC NULLS LAST, runtime_ms),
           owner, "precision", device, runtime_ms, baseline_ms, speedup, measured
    FROM best ORDER BY "precision", device, 1, owner LIMIT most;
    PERFORM set_config('kqueue.sees', coalesce(sees, ''), true);
END
$$
"""
_FUNCTIONS: Final = {
    "kqueue_session": "The session of an agent to which the transaction is restricted, or null.",
    "kqueue_board": "The fastest kernels of the owners that judge against a shared problem with a leaderboard.",
}
#: Changes to functions that run with their owner's rights: names, the old and the new text.
_CONTENT: Final = (
    "e.owner || ' ' END || e.problem_hash",
    "e.owner || ' ' END || coalesce(e.session || ' ', '') || e.problem_hash",
)
_CHANGES: Final = {
    "kqueue_conclude": (_CONTENT,),
    "kqueue_reuse": (_CONTENT,),
    "kqueue_cancel": (
        (
            "e.owner = {schema}.kqueue_owner())",
            (
                "e.owner = {schema}.kqueue_owner() AND coalesce(e.session = {schema}.kqueue_session(), "
                "{schema}.kqueue_session() IS NULL))"
            ),
        ),
    ),
}
_COLUMNS: Final = {"problems": ("session", "shared_from"), "evaluations": ("session",)}


def upgrade() -> None:
    """Add the columns, the table and the functions. Nothing that exists is shared or belongs to a session."""
    schema = _schema()
    op.execute(_SESSION.format(schema=schema))
    for table, columns in _COLUMNS.items():
        for name in columns:
            default = sa.text("kqueue_session()") if name == "session" else None
            op.add_column(table, sa.Column(name, sa.Text(), server_default=default))
    op.create_index(
        "ix_evaluations_session", "evaluations", ["session"], postgresql_where=sa.text("session IS NOT NULL")
    )
    op.create_table(
        "shared_problems",
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), server_default=sa.text("kqueue_owner()"), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("leaderboard", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.CheckConstraint(
            "hash = encode(sha256(convert_to(source, 'UTF8')), 'hex')", name=op.f("ck_shared_problems_hash")
        ),
        sa.PrimaryKeyConstraint("hash", "owner", name=op.f("pk_shared_problems")),
        comment="A problem that its owner shares with all owners.",
    )
    op.execute(_BOARD.format(schema=schema))
    for name, meaning in _FUNCTIONS.items():
        op.execute(f"COMMENT ON FUNCTION {name} IS '{meaning}'")
        op.execute(f"REVOKE ALL ON FUNCTION {name} FROM PUBLIC")
    for name, changes in _CHANGES.items():
        for before, after in changes:
            _replace(name, before.format(schema=schema), after.format(schema=schema))


def downgrade() -> None:
    """Remove the shared problems, and let all evaluations of an owner reuse each other's verdicts."""
    schema = _schema()
    for name, changes in _CHANGES.items():
        for before, after in changes:
            _replace(name, after.format(schema=schema), before.format(schema=schema))
    # The policies name the columns and the function. The next `kqueue db upgrade` creates its version's policies.
    policies = sa.text("SELECT tablename, policyname FROM pg_policies WHERE schemaname = current_schema()")
    for table, policy in op.get_bind().execute(policies).all():
        op.execute(f"DROP POLICY {policy} ON {table}")
    op.execute("DROP FUNCTION kqueue_board")
    op.drop_table("shared_problems")
    op.drop_index("ix_evaluations_session", "evaluations")
    for table, columns in _COLUMNS.items():
        for name in columns:
            op.drop_column(table, name)
    op.execute("DROP FUNCTION kqueue_session")


def _replace(name: str, before: str, after: str) -> None:
    """Replace a text that occurs once in a function's definition."""
    text: str = op.get_bind().scalar(sa.text("SELECT pg_get_functiondef(to_regproc(:name))"), {"name": name})
    assert text.count(before) == 1, (name, before)
    op.execute(text.replace(before, after))


def _schema() -> str:
    schema: str = op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))
    return schema
