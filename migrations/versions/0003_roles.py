"""Cancelling as a function, so that a producer needs no right to write verdicts.

The rights of the roles themselves are in :mod:`kqueue.store.roles`, which every upgrade applies, because they depend on
the newest schema, and roles can be created after the schema.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

#: It runs with its owner's rights, so its names must not resolve to objects of its caller.
CANCEL = """
CREATE FUNCTION {schema}.kqueue_cancel(which uuid) RETURNS boolean
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
    INSERT INTO {schema}.verdicts (evaluation_id, category, blame, message, facts, evidence, log, written_by)
    VALUES (which, 'cancelled', 'nobody', 'the producer cancelled the evaluation', '{{}}', '{{}}', '', 'client');
    UPDATE {schema}.evaluations SET state = 'done' WHERE id = which;
    PERFORM pg_notify('kqueue_verdicts', which::text);
    RETURN true;
END
$$
"""


def upgrade() -> None:
    """Add the function. Only its owner can call it until rights are granted."""
    schema = op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))
    op.execute(CANCEL.format(schema=schema))
    op.execute(
        "COMMENT ON FUNCTION kqueue_cancel IS "
        "'Ends an evaluation as cancelled. Returns false if it had its verdict, null if it does not exist.'"
    )
    op.execute("REVOKE ALL ON FUNCTION kqueue_cancel FROM PUBLIC")


def downgrade() -> None:
    """Remove the function and the roles' rights. The roles stay, because other databases can use them."""
    op.execute("DROP FUNCTION kqueue_cancel")
    for role in ("kqueue_producer", "kqueue_worker", "kqueue_gateway", "kqueue_reader"):
        if op.get_bind().scalar(sa.text("SELECT to_regrole(:role)"), {"role": role}) is not None:
            schema = op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))
            op.execute(f"REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {role}")
