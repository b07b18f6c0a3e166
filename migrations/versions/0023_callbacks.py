"""Callbacks: URLs to which verdicts are sent."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0020"
branch_labels = None
depends_on = None

#: In the verdict's transaction, so that no verdict is committed without its callback. It runs with the rights of
#: `kqueue_conclude` or `kqueue_reuse`, and changes rows that no server has claimed.
_DUE: Final = """
CREATE FUNCTION kqueue_call() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
BEGIN
    UPDATE callbacks SET next_at = now() WHERE evaluation_id = NEW.evaluation_id;
    RETURN NULL;
END
$$
"""


def upgrade() -> None:
    """Create the table, and the trigger that makes a callback due."""
    schema = op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))
    time = sa.DateTime(timezone=True)
    op.create_table(
        "callbacks",
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("owner", sa.Text(), server_default=sa.text("kqueue_owner()"), nullable=False),
        sa.Column("evaluation_id", sa.Uuid()),
        sa.Column("batch", sa.Text()),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("next_at", time),
        sa.Column("delivered_at", time),
        sa.Column("error", sa.Text()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_callbacks")),
        sa.ForeignKeyConstraint(
            ["evaluation_id"],
            ["evaluations.id"],
            name=op.f("fk_callbacks_evaluation_id_evaluations"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["batch", "owner"],
            ["batches.name", "batches.owner"],
            name=op.f("fk_callbacks_batch_owner_batches"),
            ondelete="CASCADE",
        ),
        sa.UniqueConstraint("evaluation_id", name=op.f("uq_callbacks_evaluation_id")),
        sa.UniqueConstraint("owner", "batch", name=op.f("uq_callbacks_owner_batch")),
        comment="A URL that gets the verdict of an evaluation, or the result of a batch.",
    )
    op.create_index(
        "ix_callbacks_due", "callbacks", ["owner", "next_at"], postgresql_where=sa.text("next_at IS NOT NULL")
    )
    op.execute(_DUE.format(schema=schema))
    op.execute("COMMENT ON FUNCTION kqueue_call IS 'Makes the callback of an evaluation with a verdict due.'")
    op.execute("REVOKE ALL ON FUNCTION kqueue_call FROM PUBLIC")
    op.execute("CREATE TRIGGER kqueue_call AFTER INSERT ON verdicts FOR EACH ROW EXECUTE FUNCTION kqueue_call()")


def downgrade() -> None:
    """Remove the callbacks."""
    op.execute("DROP TRIGGER kqueue_call ON verdicts")
    op.execute("DROP FUNCTION kqueue_call")
    op.drop_table("callbacks")
