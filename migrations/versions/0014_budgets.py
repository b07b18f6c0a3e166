"""Budgets of tokens, the token that pays for an attempt, and the lowest priority, ``idle``."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_PRIORITY = "ck_evaluations_priority"
_SPENT = "ck_tokens_budget_then"
_WHOLE = "ck_tokens_budget"


def upgrade() -> None:
    """Add the columns. Earlier attempts count for no budget."""
    op.add_column("tokens", sa.Column("budget_s", sa.Double(), nullable=True))
    op.add_column("tokens", sa.Column("budget_window_s", sa.Double(), nullable=True))
    op.add_column("tokens", sa.Column("budget_then", sa.Text(), nullable=True))
    op.create_check_constraint(op.f(_SPENT), "tokens", "budget_then IN ('refuse', 'lower')")
    op.create_check_constraint(
        op.f(_WHOLE),
        "tokens",
        "(budget_s IS NULL) = (budget_window_s IS NULL) AND (budget_s IS NULL) = (budget_then IS NULL)",
    )
    op.add_column("attempts", sa.Column("payer", sa.Text(), nullable=True))
    op.create_index(
        op.f("ix_attempts_payer"), "attempts", ["payer", "ended_at"], postgresql_where=sa.text("payer IS NOT NULL")
    )
    op.drop_constraint(op.f(_PRIORITY), "evaluations", type_="check")
    op.create_check_constraint(op.f(_PRIORITY), "evaluations", "priority IN ('interactive', 'batch', 'idle')")


def downgrade() -> None:
    """Remove the columns. Evaluations of priority ``idle`` become ``batch``."""
    op.execute("UPDATE evaluations SET priority = 'batch' WHERE priority = 'idle'")
    op.execute("UPDATE shares SET priority = 'batch' WHERE priority = 'idle'")
    op.drop_constraint(op.f(_PRIORITY), "evaluations", type_="check")
    op.create_check_constraint(op.f(_PRIORITY), "evaluations", "priority IN ('interactive', 'batch')")
    op.drop_index(op.f("ix_attempts_payer"), "attempts")
    op.drop_column("attempts", "payer")
    op.drop_constraint(op.f(_WHOLE), "tokens", type_="check")
    op.drop_constraint(op.f(_SPENT), "tokens", type_="check")
    for column in ("budget_then", "budget_window_s", "budget_s"):
        op.drop_column("tokens", column)
