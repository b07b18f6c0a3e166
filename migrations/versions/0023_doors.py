"""Producers' logins cannot stop each other: notifications, hashes of sources, settings, limits, blocking sessions.

The checks of hashes hold for new rows. Existing ones are not read, so the upgrade takes no time.
"""

from __future__ import annotations

import importlib
from typing import Final

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

#: The contents of the hashes of sources (:class:`kqueue.contract.Request`).
_HASHED: Final = {
    "problems": "convert_to(source, 'UTF8')",
    "kernels": r"convert_to(backend, 'UTF8') || '\x00'::bytea || convert_to(source, 'UTF8')",
}
#: Sessions that notify after their commits (:func:`kqueue.store.engine.notify`) set kqueue.notifies. The version before
#: does not.
_NOTIFIES: Final = (
    "PERFORM pg_notify('kqueue_verdicts', given.evaluation_id::text);",
    """PERFORM {schema}.kqueue_notify('kqueue_verdicts', given.evaluation_id::text)
    WHERE current_setting('kqueue.notifies', true) IS DISTINCT FROM 'after';""",
)
_FUNCTIONS: Final = {
    "kqueue_notify": """(channel text, payload text) RETURNS void LANGUAGE plpgsql {search} AS $$
BEGIN
    PERFORM pg_notify(channel, payload) WHERE pg_notification_queue_usage() < 0.5;
END $$; COMMENT ON FUNCTION kqueue_notify IS 'Notifies, unless the queue of notifications is half full.'""",
    # An owner without superuser's rights needs pg_signal_backend and pg_read_all_stats. The number is the first half of
    # the fleet's advisory locks.
    "kqueue_relieve": """() RETURNS TABLE (login name, reason text, ended boolean)
LANGUAGE plpgsql SECURITY DEFINER {search} AS $$
DECLARE
    process integer;
BEGIN
    FOR process, login, reason IN
        WITH producing AS MATERIALIZED (
            SELECT a.*, clock_timestamp() - a.xact_start AS age
            FROM pg_stat_activity AS a JOIN pg_roles AS r ON r.oid = a.usesysid JOIN {schema}.logins ON name = a.usename
            WHERE NOT r.rolsuper AND pg_has_role(r.oid, to_regrole('kqueue_producer')::oid, 'USAGE')
        )
        SELECT p.pid, p.usename, words FROM producing AS p, LATERAL (SELECT CASE
            WHEN EXISTS (SELECT FROM pg_locks AS l WHERE l.pid = p.pid AND classid = x'6B717565'::integer::oid)
                THEN 'held a lock of the fleet'
            WHEN EXISTS (
                SELECT FROM pg_locks AS l
                WHERE l.waitstart < clock_timestamp() - interval '1 s' AND p.pid = ANY (pg_blocking_pids(l.pid))
                AND l.pid NOT IN (SELECT pid FROM producing)
            ) THEN 'blocked the fleet'
            WHEN p.age > interval '5 s' AND pg_notification_queue_usage() > 0.1 THEN 'held all notifications'
            WHEN p.state ^@ 'idle in transaction' AND p.state_change < clock_timestamp() - interval '1 min'
                OR p.age > interval '10 min' THEN 'had a transaction open for too long'
        END AS words) AS given WHERE words IS NOT NULL
    LOOP
        BEGIN
            ended := pg_terminate_backend(process);
        EXCEPTION WHEN insufficient_privilege THEN
            ended := false;
        END;
        RETURN NEXT;
    END LOOP;
END $$; COMMENT ON FUNCTION kqueue_relieve IS 'Ends and returns sessions of producers'' logins that stop others.'""",
    "kqueue_unshare": """(which text) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER {search} AS $$
BEGIN
    DELETE FROM {schema}.shared_problems WHERE hash = which AND owner = {schema}.kqueue_owner();
    RETURN FOUND;
END $$; COMMENT ON FUNCTION kqueue_unshare IS 'Stops sharing a problem of the session''s owner, or returns false.'""",
    "kqueue_fits": """(settings jsonb, forms jsonb) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER {search} AS $$
DECLARE
    wrong record;
BEGIN
    SELECT f.path, least(f.most, (l.limits ->> f.path)::numeric) AS most INTO wrong
    FROM jsonb_to_recordset(forms)
        AS f (path text, kind text, known jsonb, least numeric, most numeric, preset jsonb, nullable boolean)
    LEFT JOIN {schema}.logins AS l ON l.name = session_user,
    coalesce(settings #> string_to_array(f.path, '.'), f.preset) AS given (v)
    WHERE NOT coalesce(v = 'null' AND f.nullable OR CASE f.kind
        WHEN 'object' THEN v - ARRAY(SELECT jsonb_array_elements_text(f.known)) = '{{}}'
        WHEN 'array' THEN jsonb_array_length(v) <= jsonb_array_length(f.known) AND f.known @> v
        WHEN 'string' THEN jsonb_typeof(v) = 'string' AND f.known @> v
        WHEN 'boolean' THEN v IN ('true', 'false')
        ELSE v::numeric BETWEEN f.least AND least(f.most, (l.limits ->> f.path)::numeric)
            AND (f.kind = 'number' OR v::numeric % 1 = 0)
    END, f.preset IS NULL AND v IS NULL) LIMIT 1;
    IF FOUND THEN
        RAISE check_violation USING MESSAGE = format('settings.%s: wrong, unknown or above %s', wrong.path, wrong.most);
    END IF;
    RETURN true;
END $$; COMMENT ON FUNCTION kqueue_fits IS 'True if settings fit the forms and the login''s limits, or an error.'""",
}


def upgrade() -> None:
    """Add the columns, the checks and the functions."""
    people = importlib.import_module("migrations.versions.0021_people")
    words = {"schema": people._schema(), "search": "SET search_path = pg_catalog, pg_temp"}
    for table in ("tokens", "logins"):
        op.add_column(table, sa.Column("limits", JSONB(), server_default=sa.text("'{}'"), nullable=False))
    for table, content in _HASHED.items():
        op.execute(f"""
            ALTER TABLE {table} ADD CONSTRAINT ck_{table}_hash CHECK (
                hash = encode(sha256({content}), 'hex') OR hash = repeat('0', 64) AND source = ''
            ) NOT VALID
        """)
    for name, definition in _FUNCTIONS.items():
        op.execute(f"CREATE FUNCTION {name}{definition.format(**words)}")
        op.execute(f"REVOKE ALL ON FUNCTION {name} FROM PUBLIC")
    people._replace("kqueue_conclude", *(text.format(**words) for text in _NOTIFIES))


def downgrade() -> None:
    """Remove them, and the policies that call the functions."""
    people = importlib.import_module("migrations.versions.0021_people")
    people._replace("kqueue_conclude", *(text.format(schema=people._schema()) for text in reversed(_NOTIFIES)))
    for name in _FUNCTIONS:
        op.execute(f"DROP FUNCTION {name} CASCADE")
    for table in _HASHED:
        op.drop_constraint(f"ck_{table}_hash", table)
    for table in ("tokens", "logins"):
        op.drop_column(table, "limits")
