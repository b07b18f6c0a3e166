"""Callbacks: URLs to which verdicts are sent."""

from __future__ import annotations

from typing import Final

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

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


def upgrade() -> None:
    """Create the table."""
    op.execute(_CALLBACKS)


def downgrade() -> None:
    """Remove the callbacks."""
    op.drop_table("callbacks")
