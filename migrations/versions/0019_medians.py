"""The view of the best kernels ranks them by the median of their measurements."""

from __future__ import annotations

import importlib
from typing import Final

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

#: As in kqueue.store.reports.boards: of an even number of measurements the slower of the two in the middle counts.
_BEST: Final = """
    SELECT DISTINCT ON (problem_hash, precision, device)
        problem_hash, problem_label, precision, device, kernel_hash, kernel_label, backend, runtime_ms, baseline_ms,
        speedup, evaluation_id, finished_at, speedup / factor AS speedup_low, speedup * factor AS speedup_high, measured
    FROM (
        SELECT
            e.problem_hash, e.problem_label, e.settings ->> 'precision' AS precision, n.device, e.kernel_hash,
            e.kernel_label, k.backend, v.runtime_ms, v.baseline_ms, v.speedup, v.evaluation_id, v.finished_at,
            1 + sqrt(power(m.error, 2) + power(b.error, 2)) AS factor,
            count(*) OVER alike AS measured,
            row_number() OVER (alike ORDER BY v.speedup NULLS FIRST, v.runtime_ms DESC, v.evaluation_id) AS place
        FROM verdicts AS v
        JOIN evaluations AS e ON e.id = v.evaluation_id
        JOIN kernels AS k ON k.hash = e.kernel_hash
        JOIN attempts AS a ON a.id = v.attempt_id
        LEFT JOIN environments AS n ON n.hash = a.environment_hash,
        LATERAL (SELECT {error} FROM (SELECT v.runtime AS of) AS one) AS m (error),
        LATERAL (SELECT {error} FROM (SELECT v.baseline AS of) AS one) AS b (error)
        WHERE NOT e.probe AND v.category = 'passed' AND v.runtime_ms IS NOT NULL AND v.reused_from IS NULL
        WINDOW alike AS (PARTITION BY e.problem_hash, e.kernel_hash, e.settings ->> 'precision', n.device)
    ) AS every
    WHERE place = (measured + 1) / 2
    ORDER BY problem_hash, precision, device, speedup DESC NULLS LAST, runtime_ms, evaluation_id
"""
_ERROR: Final = """
    ((of ->> 'high_ms')::float8 - (of ->> 'low_ms')::float8) / 2 / nullif((of ->> 'median_ms')::float8, 0)
"""


def upgrade() -> None:
    """Replace the view, with further columns at its end, so that grants stay."""
    op.execute(f"CREATE OR REPLACE VIEW best_verdicts AS {_BEST.format(error=_ERROR)}")
    op.execute(
        "COMMENT ON VIEW best_verdicts IS 'The kernel with the best median for each problem, precision, device.'"
    )


def downgrade() -> None:
    """Restore the fastest single verdicts. Roles must be granted the view again (`kqueue fleet roles`)."""
    op.execute("DROP VIEW best_verdicts")
    _, query = importlib.import_module("migrations.versions.0018_everything").VIEWS["best_verdicts"]
    op.execute(f"CREATE VIEW best_verdicts AS {query}")
