"""The native API below ``/v1``."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter

from kqueue.categories import CATEGORIES
from kqueue.http.auth import Reader

router: Final = APIRouter(prefix="/v1", tags=["v1"])


@router.get("/categories")
async def categories(_: Reader) -> list[dict[str, Any]]:
    """The table of categories: what can come of an evaluation, and whose failure it is."""
    return [
        {
            "category": row.category,
            "blame": row.blame,
            "compiled": row.compiled,
            "correctness": row.correctness,
            "retried": row.retried,
            "meaning": row.meaning,
        }
        for row in CATEGORIES.values()
    ]
