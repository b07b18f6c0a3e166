"""Indexes for pages: the words of problems and logs, and evaluations by problem, kernel or batch with their times.

Creating them blocks writers: with a million evaluations for some minutes. To avoid that, create any of them before
under a running fleet by ``CREATE INDEX CONCURRENTLY`` with the same name. Existing indexes are skipped.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

#: The words of a text: letters and digits between ASCII punctuation. Later changes of
#: :data:`kqueue.store.models.words` need a new migration.
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
#: The indexes that the new ones replace.
_FORMER: Final = {
    "ix_evaluations_problem_hash": "evaluations (problem_hash)",
    "ix_evaluations_kernel_hash": "evaluations (kernel_hash)",
    "ix_evaluations_batch": "evaluations (batch) WHERE batch IS NOT NULL",
}


def upgrade() -> None:
    """Create the indexes, and drop the indexes that they replace."""
    for name, on in _INDEXES.items():
        # An interrupted CONCURRENTLY leaves an invalid index of the same name.
        broken = sa.text("SELECT NOT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:name)")
        if op.get_bind().scalar(broken, {"name": name}):
            op.execute(f"DROP INDEX {name}")
        op.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {on}")
    for name in _FORMER:
        op.execute(f"DROP INDEX {name}")


def downgrade() -> None:
    """Drop the indexes, and create the former ones again."""
    for name, on in _FORMER.items():
        op.execute(f"CREATE INDEX {name} ON {on}")
    for name in _INDEXES:
        op.execute(f"DROP INDEX {name}")
