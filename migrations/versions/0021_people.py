"""Shared problems, sessions of agents, callbacks, the audit log, and logins by OpenID Connect.

Evaluations of an agent's session reuse verdicts of this session only. The new columns of evaluations and problems are
added without a rewrite, and the new index is empty. Existing sessions of browsers count as used now.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_SHARING: Final = """
CREATE FUNCTION kqueue_session() RETURNS text LANGUAGE sql STABLE AS $$
    SELECT nullif(pg_catalog.current_setting('kqueue.session', true), '')
$$;
COMMENT ON FUNCTION kqueue_session IS 'The session of an agent to which the transaction is restricted, or null.';
REVOKE ALL ON FUNCTION kqueue_session FROM PUBLIC;
ALTER TABLE problems ADD session text DEFAULT kqueue_session(), ADD shared_from text;
ALTER TABLE evaluations ADD session text DEFAULT kqueue_session();
CREATE INDEX ix_evaluations_session ON evaluations (session) WHERE session IS NOT NULL;
CREATE TABLE shared_problems (
    hash text NOT NULL,
    owner text NOT NULL DEFAULT kqueue_owner(),
    label text NOT NULL,
    source text NOT NULL,
    leaderboard boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT ck_shared_problems_hash CHECK (hash = encode(sha256(convert_to(source, 'UTF8')), 'hex')),
    CONSTRAINT pk_shared_problems PRIMARY KEY (hash, owner)
);
COMMENT ON TABLE shared_problems IS 'A problem that its owner shares with all owners.';
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
;
COMMENT ON FUNCTION kqueue_board IS
    'The fastest kernels of the owners that judge against a shared problem with a leaderboard.';
REVOKE ALL ON FUNCTION kqueue_board FROM PUBLIC;
"""
_CALLBACKS: Final = r"""
CREATE TABLE callbacks (
    id uuid NOT NULL DEFAULT gen_random_uuid() CONSTRAINT pk_callbacks PRIMARY KEY,
    owner text NOT NULL DEFAULT kqueue_owner(),
    evaluation_id uuid CONSTRAINT uq_callbacks_evaluation_id UNIQUE
        CONSTRAINT fk_callbacks_evaluation_id_evaluations REFERENCES evaluations (id) ON DELETE CASCADE,
    batch text,
    url text NOT NULL,
    host text GENERATED ALWAYS AS (substring(url FROM '//(\[[^]]*\]|[^/:?#]*)')) STORED,
    attempts integer NOT NULL DEFAULT 0,
    next_at timestamptz,
    delivered_at timestamptz,
    error text,
    CONSTRAINT uq_callbacks_owner_batch UNIQUE (owner, batch),
    CONSTRAINT fk_callbacks_batch_owner_batches
        FOREIGN KEY (batch, owner) REFERENCES batches (name, owner) ON DELETE CASCADE
);
COMMENT ON TABLE callbacks IS 'A URL that gets the verdict of an evaluation, or the result of a batch.';
CREATE INDEX ix_callbacks_due ON callbacks (owner, next_at) WHERE next_at IS NOT NULL;
CREATE INDEX ix_callbacks_waiting ON callbacks (id) WHERE next_at IS NULL AND attempts = 0;
"""
_PEOPLE: Final = """
CREATE TABLE audit (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_audit PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    actor text NOT NULL,
    owner text,
    token_id uuid,
    action text NOT NULL,
    subject text NOT NULL
);
COMMENT ON TABLE audit IS
    'An entry of the audit log: who did what. Only the owner of the tables reads or removes entries.';
CREATE INDEX ix_audit_at ON audit (at);
ALTER TABLE sessions ADD seen_at timestamptz NOT NULL DEFAULT now();
ALTER TABLE tokens ALTER digest DROP NOT NULL;
"""
_REMOVAL: Final = """
DROP FUNCTION kqueue_board;
DROP TABLE callbacks, audit, shared_problems;
ALTER TABLE sessions DROP seen_at;
DELETE FROM sessions USING tokens WHERE token_id = id AND tokens.digest IS NULL;
UPDATE tokens SET digest = 'none:' || id WHERE digest IS NULL;
ALTER TABLE tokens ALTER digest SET NOT NULL;
ALTER TABLE evaluations DROP session;
ALTER TABLE problems DROP session, DROP shared_from;
DROP FUNCTION kqueue_session;
"""
#: Changes to functions that run with their owner's rights: names, the old and the new text.
_CONTENT: Final = (
    "e.owner || ' ' END || e.problem_hash",
    "e.owner || ' ' END || coalesce(e.session || ' ', '') || e.problem_hash",
)
_CHANGES: Final = {
    "kqueue_conclude": _CONTENT,
    "kqueue_reuse": _CONTENT,
    "kqueue_cancel": (
        "e.owner = {schema}.kqueue_owner())",
        (
            "e.owner = {schema}.kqueue_owner() AND coalesce(e.session = {schema}.kqueue_session(), "
            "{schema}.kqueue_session() IS NULL))"
        ),
    ),
}


def upgrade() -> None:
    """Add the columns, the tables and the functions. Nothing that exists is shared or belongs to a session."""
    schema = _schema()
    for statements in (_SHARING, _BOARD, _CALLBACKS, _PEOPLE):
        op.execute(statements.format(schema=schema))
    for name, (before, after) in _CHANGES.items():
        _replace(name, before.format(schema=schema), after.format(schema=schema))


def downgrade() -> None:
    """Remove the tables, log people out, and let all evaluations of an owner reuse each other's verdicts."""
    schema = _schema()
    for name, (before, after) in _CHANGES.items():
        _replace(name, after.format(schema=schema), before.format(schema=schema))
    # The policies name the columns and the function. The next `kqueue db upgrade` creates its version's policies.
    policies = sa.text("SELECT tablename, policyname FROM pg_policies WHERE schemaname = current_schema()")
    for table, policy in op.get_bind().execute(policies).all():
        op.execute(f"DROP POLICY {policy} ON {table}")
    op.execute(_REMOVAL)


def _replace(name: str, before: str, after: str) -> None:
    """Replace a text that occurs once in a function's definition."""
    text: str = op.get_bind().scalar(sa.text("SELECT pg_get_functiondef(to_regproc(:name))"), {"name": name})
    assert text.count(before) == 1, (name, before)
    op.execute(text.replace(before, after))


def _schema() -> str:
    schema: str = op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))
    return schema
