"""Indexes for pages: the words of problems and logs, and evaluations by problem, kernel or batch with their times.

All are made while others wait to write: with a million evaluations for some minutes. Any of them may be made before,
under a running fleet, by ``CREATE INDEX CONCURRENTLY`` with the same name; what is there is passed over.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

#: The words of a text: letters and digits between ASCII's other signs. Later changes of
#: :data:`kqueue.store.models.words` need a migration of their own.
_WORDS: Final = (
    "to_tsvector('simple'::regconfig, translate(\"left\"({column}, 100000), "
    "'!\"#$%&''()*+,-./:;<=>?@[\\]^_`{{|}}~', '                                '))"
)
_INDEXES: Final = {
    "ix_problems_words": f"problems USING gin ({_WORDS.format(column='source')})",
    "ix_verdicts_words": f"verdicts USING gin ({_WORDS.format(column='log')}) WHERE log <> ''::text",
    "ix_kernels_created_at": "kernels (created_at, hash)",
    "ix_evaluations_problem_hash_submitted_at": "evaluations (problem_hash, submitted_at)",
    "ix_evaluations_kernel_hash_submitted_at": "evaluations (kernel_hash, submitted_at)",
    "ix_evaluations_batch_submitted_at": "evaluations (batch, submitted_at) WHERE batch IS NOT NULL",
}
#: What the new ones do better.
_FORMER: Final = {
    "ix_evaluations_problem_hash": "evaluations (problem_hash)",
    "ix_evaluations_kernel_hash": "evaluations (kernel_hash)",
    "ix_evaluations_batch": "evaluations (batch) WHERE batch IS NOT NULL",
}


def upgrade() -> None:
    """Make them, and remove those that they replace."""
    for name, on in _INDEXES.items():
        # What an interrupted CONCURRENTLY leaves has the name, and finds nothing.
        broken = sa.text("SELECT NOT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:name)")
        if op.get_bind().scalar(broken, {"name": name}):
            op.execute(f"DROP INDEX {name}")
        op.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {on}")
    for name in _FORMER:
        op.execute(f"DROP INDEX {name}")


def downgrade() -> None:
    """Remove them, and make the former ones again."""
    for name, on in _FORMER.items():
        op.execute(f"CREATE INDEX {name} ON {on}")
    for name in _INDEXES:
        op.execute(f"DROP INDEX {name}")
