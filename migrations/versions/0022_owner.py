"""Find the owner of a session faster, because policies and defaults of columns do it in nearly every query."""

from __future__ import annotations

import importlib
from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

#: Postgres prepares a function in SQL for each query, and one in PL/pgSQL once for each connection. For members of
#: the fleet's roles, superusers included, no catalog is read.
_SESSION: Final = """
CREATE OR REPLACE FUNCTION {schema}.kqueue_trusted() RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF pg_has_role(session_user, to_regrole('kqueue_gateway')::oid, 'MEMBER')
        OR pg_has_role(session_user, to_regrole('kqueue_worker')::oid, 'MEMBER')
        OR pg_has_role(session_user, to_regrole('kqueue_reader')::oid, 'MEMBER')
    THEN
        RETURN true;
    END IF;
    RETURN (
        SELECT r.rolsuper OR r.rolbypassrls OR pg_has_role(r.oid, c.relowner, 'MEMBER')
        FROM pg_roles AS r, pg_class AS c
        WHERE r.rolname = session_user AND c.oid = '{schema}.tokens'::regclass
    );
END
$$;
CREATE OR REPLACE FUNCTION {schema}.kqueue_owner() RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF {schema}.kqueue_trusted() THEN
        RETURN coalesce(nullif(current_setting('kqueue.owner', true), ''), 'local');
    END IF;
    RETURN coalesce((SELECT l.owner FROM {schema}.logins AS l WHERE l.name = session_user), 'local');
END
$$;
CREATE OR REPLACE FUNCTION {schema}.kqueue_sees_all() RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN current_setting('kqueue.sees', true) IS DISTINCT FROM 'own' AND {schema}.kqueue_trusted();
END
$$
"""


def upgrade() -> None:
    """Write the functions in PL/pgSQL. Their results stay the same."""
    op.execute(_SESSION.format(schema=_schema()))


def downgrade() -> None:
    """Restore the functions in SQL."""
    owners = importlib.import_module("migrations.versions.0020_owners")
    op.execute(owners._SESSION.format(schema=_schema()).replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION"))


def _schema() -> str:
    schema: str = op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))
    return schema
