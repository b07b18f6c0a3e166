"""`kqueue categories`: the table of categories."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add this group's commands to ``app``."""
    app.command()(categories)


def categories(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/categories.md.")] = False,
) -> None:
    """Print the table of categories."""
    from kqueue import categories as table

    if markdown:
        typer.echo(table.markdown(), nl=False)
        return
    from kqueue.cli.render import category_text, print_table, yes_no

    print_table(
        ("category", "blame", "compiled", "correct", "meaning"),
        (
            (
                category_text(row.category, row.blame),
                row.blame,
                yes_no(row.compiled),
                yes_no(row.correctness),
                row.meaning,
            )
            for row in table.CATEGORIES.values()
        ),
    )
