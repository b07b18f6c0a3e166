"""The audit log, the last use of sessions, and tokens without a secret for people who log in by OpenID Connect."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table and the columns. Existing sessions count as used now."""
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text()),
        sa.Column("token_id", sa.Uuid()),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
        comment="An entry of the audit log: who did what. Only the owner of the tables reads or removes entries.",
    )
    op.create_index("ix_audit_at", "audit", ["at"])
    now = sa.Column("seen_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False)
    op.add_column("sessions", now)
    op.alter_column("tokens", "digest", nullable=True)


def downgrade() -> None:
    """Remove the audit log, and log people out."""
    op.drop_table("audit")
    op.drop_column("sessions", "seen_at")
    op.execute("DELETE FROM sessions USING tokens WHERE token_id = id AND tokens.digest IS NULL")
    op.execute("UPDATE tokens SET digest = 'none:' || id WHERE digest IS NULL")
    op.alter_column("tokens", "digest", nullable=False)
