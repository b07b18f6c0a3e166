"""Callbacks: URLs to which verdicts are sent."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

#: The trigger runs in the verdict's transaction, so that no verdict is committed without its callback.
_CALLBACKS: Final = """
CREATE TABLE callbacks (
    id uuid NOT NULL DEFAULT gen_random_uuid() CONSTRAINT pk_callbacks PRIMARY KEY,
    owner text NOT NULL DEFAULT kqueue_owner(),
    evaluation_id uuid CONSTRAINT uq_callbacks_evaluation_id UNIQUE
        CONSTRAINT fk_callbacks_evaluation_id_evaluations REFERENCES evaluations (id) ON DELETE CASCADE,
    batch text,
    url text NOT NULL,
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
CREATE FUNCTION kqueue_call() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
BEGIN
    UPDATE callbacks SET next_at = now() WHERE evaluation_id = NEW.evaluation_id;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION kqueue_call IS 'Makes the callback of an evaluation with a verdict due.';
REVOKE ALL ON FUNCTION kqueue_call FROM PUBLIC;
CREATE TRIGGER kqueue_call AFTER INSERT ON verdicts FOR EACH ROW EXECUTE FUNCTION kqueue_call();
"""


def upgrade() -> None:
    """Create the table, and the trigger that makes a callback due."""
    op.execute(_CALLBACKS.format(schema=op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))))


def downgrade() -> None:
    """Remove the callbacks."""
    op.execute("DROP TRIGGER kqueue_call ON verdicts")
    op.execute("DROP FUNCTION kqueue_call")
    op.drop_table("callbacks")
