"""An index by lane and state, so that counting evaluations reads no rows."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the index."""
    op.create_index("ix_evaluations_lane_state", "evaluations", ["lane", "state"])


def downgrade() -> None:
    """Drop the index."""
    op.drop_index("ix_evaluations_lane_state", table_name="evaluations")
