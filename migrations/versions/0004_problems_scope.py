"""The scope ``problems``, between ``submit`` and ``admin``, which permits a token's holder to submit new problems."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Preserve the rights of existing tokens."""
    op.execute("UPDATE tokens SET scopes = array_replace(scopes, 'submit', 'problems')")
    op.create_table_comment(
        "tokens",
        "A credential for the HTTP server, and the rights of its holder.",
        existing_comment="A credential for HTTP, and its scopes.",
    )


def downgrade() -> None:
    """Extend no token's rights: a token that could only name existing problems becomes read-only."""
    op.execute("UPDATE tokens SET scopes = array_replace(scopes, 'submit', 'read')")
    op.execute("UPDATE tokens SET scopes = array_replace(scopes, 'problems', 'submit')")
    op.create_table_comment(
        "tokens",
        "A credential for HTTP, and its scopes.",
        existing_comment="A credential for the HTTP server, and the rights of its holder.",
    )
