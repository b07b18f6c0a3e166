"""Probes of the fleet's own judge: evaluations with known outcomes, their results, and the pauses that they caused.

A sweeper has no right to write sources and evaluations. ``kqueue_probe`` writes them for a probe, and marks the
evaluation, so that reports leave it out.
"""

from __future__ import annotations

import importlib
from typing import Final

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

#: It runs with its owner's rights, so its names must not resolve to objects of its caller. It hashes the sources
#: itself. A kernel's hash covers its backend, a zero byte and its source.
PROBE: Final = """
CREATE FUNCTION {schema}.kqueue_probe(probe jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    problem text := encode(sha256(convert_to(probe ->> 'problem', 'UTF8')), 'hex');
    kernel text := encode(sha256(
        convert_to(probe ->> 'backend', 'UTF8') || decode('00', 'hex') || convert_to(probe ->> 'kernel', 'UTF8')
    ), 'hex');
BEGIN
    -- Whose it is does not come from the caller: a producer like others where turns are taken, whom nothing is charged.
    INSERT INTO {schema}.problems (hash, source) VALUES (problem, probe ->> 'problem') ON CONFLICT DO NOTHING;
    INSERT INTO {schema}.kernels (hash, backend, source) VALUES (kernel, probe ->> 'backend', probe ->> 'kernel')
    ON CONFLICT DO NOTHING;
    INSERT INTO {schema}.evaluations (id, problem_hash, kernel_hash, lane, settings, expires_at, producer, probe)
    VALUES (
        (probe ->> 'id')::uuid, problem, kernel, probe ->> 'lane', probe -> 'settings',
        now() + make_interval(secs => (probe ->> 'queue_wait_s')::float8), 'kqueue''s probes', true
    );
    INSERT INTO {schema}.probes (evaluation_id, lane, kind, idea, spin_ms, confirms)
    VALUES (
        (probe ->> 'id')::uuid, probe ->> 'lane', probe ->> 'kind', probe ->> 'idea', (probe ->> 'spin_ms')::float8,
        (probe ->> 'confirms')::boolean
    );
END
$$
"""
#: The views of evaluations, with the text to replace and its replacement, which excludes probes.
_REAL: Final = (
    ("evaluation_overview", None, "\n        WHERE NOT e.probe"),
    ("outcomes", "GROUP BY", "WHERE NOT e.probe\n        GROUP BY"),
    ("best_verdicts", "WHERE ", "WHERE NOT e.probe AND "),
)


def upgrade() -> None:
    """Add the tables. Earlier evaluations are not probes."""
    op.add_column("evaluations", sa.Column("probe", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.create_table(
        "probes",
        sa.Column("evaluation_id", sa.Uuid(), nullable=False),
        sa.Column("lane", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("idea", sa.Text(), nullable=False),
        sa.Column("spin_ms", sa.Double(), nullable=True),
        sa.Column("confirms", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("submitted_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("settled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finding", sa.Text(), nullable=True),
        sa.Column("words", sa.Text(), nullable=True),
        sa.Column("bias", sa.Double(), nullable=True),
        sa.Column("judged_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("host", sa.Text(), nullable=True),
        sa.Column("device", sa.Text(), nullable=True),
        sa.Column("spent", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.CheckConstraint("kind IN ('honest', 'cheat', 'spin')", name=op.f("ck_probes_kind")),
        sa.CheckConstraint(
            "finding IN ('agreed', 'void', 'cheat_accepted', 'cheat_mistaken', 'honest_refused', 'clock_short', "
            "'clock_long', 'clock_uneven')",
            name=op.f("ck_probes_finding"),
        ),
        sa.PrimaryKeyConstraint("evaluation_id", name=op.f("pk_probes")),
        comment="A probe of the fleet's own judge: an evaluation with a known outcome, and its result.",
    )
    op.create_index("ix_probes_settled_at", "probes", ["settled_at"])
    op.create_index("ix_probes_open", "probes", ["lane"], postgresql_where=sa.text("settled_at IS NULL"))
    op.create_table(
        "probe_lanes",
        sa.Column("lane", sa.Text(), nullable=False),
        sa.Column("ended", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("due_after", sa.Double(), nullable=False),
        sa.Column("looked_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("lane", name=op.f("pk_probe_lanes")),
        comment="The number of evaluations of a lane since its last probe.",
    )
    op.create_table(
        "probe_pauses",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("finding", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("probes", postgresql.ARRAY(sa.Uuid()), nullable=False),
        sa.Column("doubted_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("paused_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("resumed_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_probe_pauses")),
        comment="A GPU, or a host's CPU slots, that was taken out of service because probes were judged wrongly.",
    )
    op.create_index("ix_probe_pauses_open", "probe_pauses", ["host"], postgresql_where=sa.text("resumed_at IS NULL"))
    op.execute(PROBE.format(schema=_schema()))
    op.execute("COMMENT ON FUNCTION kqueue_probe IS 'Submits a probe of the fleet''s own judge.'")
    op.execute("REVOKE ALL ON FUNCTION kqueue_probe FROM PUBLIC")
    for name, query in _views().items():
        op.execute(f"CREATE OR REPLACE VIEW {name} AS {query}")


def downgrade() -> None:
    """Remove the tables, and the probes, which would count as users' evaluations."""
    op.execute("DROP FUNCTION kqueue_probe")
    for name, query in _earlier().items():
        op.execute(f"CREATE OR REPLACE VIEW {name} AS {query}")
    for table in ("probe_pauses", "probe_lanes", "probes"):
        op.drop_table(table)
    op.execute("DELETE FROM verdicts AS v USING evaluations AS e WHERE e.id = v.evaluation_id AND e.probe")
    op.execute("DELETE FROM evaluations WHERE probe")
    op.drop_column("evaluations", "probe")


def _earlier() -> dict[str, str]:
    """Return the views' queries before this migration."""
    first = importlib.import_module("migrations.versions.0001_everything")
    reuse = importlib.import_module("migrations.versions.0010_reuse")
    queries = {name: query for name, _, query in first.VIEWS}
    for before, after in reuse._OVERVIEW:
        queries["evaluation_overview"] = queries["evaluation_overview"].replace(before, after)
    return {name: queries[name] for name, _, _ in _REAL}


def _views() -> dict[str, str]:
    queries = _earlier()
    for name, before, after in _REAL:
        if before is None:
            queries[name] = queries[name].rstrip() + after
        else:
            assert queries[name].count(before) == 1
            queries[name] = queries[name].replace(before, after)
    return queries


def _schema() -> str:
    schema: str = op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))
    return schema
