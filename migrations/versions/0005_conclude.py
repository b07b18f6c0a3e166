"""One function that writes verdicts, for workers and for cancelling.

No role can insert verdicts any more. The right to call ``kqueue_conclude`` permits any verdict, and the right to call
``kqueue_cancel`` only the verdict of a cancelled evaluation.
"""

from __future__ import annotations

import importlib
from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

#: Both run with their owner's rights, so their names must not resolve to objects of a caller.
CONCLUDE = """
CREATE FUNCTION {schema}.kqueue_conclude(verdict jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    given {schema}.verdicts := jsonb_populate_record(NULL::{schema}.verdicts, verdict);
BEGIN
    given.finished_at := now();
    INSERT INTO {schema}.verdicts VALUES (given.*) ON CONFLICT DO NOTHING;
    UPDATE {schema}.evaluations SET state = 'done' WHERE id = given.evaluation_id;
    PERFORM pg_notify('kqueue_verdicts', given.evaluation_id::text);
END
$$
"""
CANCEL = """
CREATE OR REPLACE FUNCTION {schema}.kqueue_cancel(which uuid) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found_state text;
BEGIN
    SELECT e.state INTO found_state FROM {schema}.evaluations AS e WHERE e.id = which FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF found_state = 'done' THEN
        RETURN false;
    END IF;
    PERFORM {schema}.kqueue_conclude(jsonb_build_object(
        'evaluation_id', which, 'category', 'cancelled', 'blame', 'nobody', 'written_by', 'client',
        'message', 'the producer cancelled the evaluation', 'log', '', 'facts', '{{}}'::jsonb, 'evidence', '{{}}'::jsonb
    ));
    RETURN true;
END
$$
"""
#: The table's comment before and after this migration.
_ENVIRONMENT: Final = (
    "Facts on which times depend, identified by their hash.",
    "The facts on which times depend, identified by their hash.",
)


def upgrade() -> None:
    """Add the function, and use it for cancelling. Only its owner can call it until rights are granted."""
    schema = _schema()
    op.execute(CONCLUDE.format(schema=schema))
    op.execute(
        "COMMENT ON FUNCTION kqueue_conclude IS "
        "'Writes the verdict of an evaluation that the caller has locked, unless there is one, and notifies.'"
    )
    op.execute("REVOKE ALL ON FUNCTION kqueue_conclude FROM PUBLIC")
    op.execute(CANCEL.format(schema=schema))
    op.create_table_comment("environments", _ENVIRONMENT[1], existing_comment=_ENVIRONMENT[0])


def downgrade() -> None:
    """Restore the earlier function for cancelling. The older version's upgrade permits workers to insert verdicts."""
    roles = importlib.import_module("migrations.versions.0003_roles")
    op.execute(roles.CANCEL.format(schema=_schema()).replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION"))
    op.execute("DROP FUNCTION kqueue_conclude")
    op.create_table_comment("environments", _ENVIRONMENT[0], existing_comment=_ENVIRONMENT[1])


def _schema() -> str:
    schema: str = op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))
    return schema
