"""Roles in the database: groups with the rights that each part of a fleet needs, and no more.

They belong to the cluster and cannot log in; logins are made members (:func:`login`, ``kqueue db login``).
Several databases of one cluster share them, so they are made where they are missing and never dropped.
:func:`kqueue.store.schema.upgrade` applies the rights each time: what is lacking is granted, what is too
much is revoked. The owner of the tables needs none of this, and neither does a one-machine fleet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, LiteralString, cast

from psycopg.sql import SQL, Composable, Identifier, Literal
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import IntegrityError, ProgrammingError

from kqueue.errors import ConfigError
from kqueue.store.engine import transaction

if TYPE_CHECKING:
    from psycopg import Connection as PsycopgConnection

#: Submits, waits and cancels; writes no verdict.
PRODUCER: Final = "kqueue_producer"
#: Claims, renews, ends and sweeps; changes no source and no verdict's outcome.
WORKER: Final = "kqueue_worker"
#: Serves HTTP: a producer that also looks tokens up.
GATEWAY: Final = "kqueue_gateway"
#: Reads.
READER: Final = "kqueue_reader"

_ALL: Final = ("",)
#: The relations that every role may read. Only the gateway reads the digests of tokens
#: and sessions.
_READABLE: Final = (
    "alembic_version",
    "attempts",
    "baselines",
    "batches",
    "environments",
    "evaluations",
    "gpus",
    "kernels",
    "probe_lanes",
    "probe_pauses",
    "probes",
    "problems",
    "search_proposals",
    "search_runs",
    "search_steps",
    "shares",
    "summaries",
    "verdicts",
    "workers",
    "best_verdicts",
    "evaluation_overview",
    "fleet_utilisation",
    "outcomes",
)

#: Privileges on a relation or function, with their columns (``""``: all of them).
_Rights = Mapping[str, Mapping[str, tuple[str, ...]]]

#: What decides whose turn it is, and with that why an evaluation waits, and whether it is accepted.
_WEIGHTS: Final = {"SELECT": ("id", "weight", "budget_s", "budget_window_s", "budget_then")}

_PRODUCE: Final[_Rights] = {
    "tokens": _WEIGHTS,
    "problems": {"INSERT": ("hash", "source")},
    "kernels": {"INSERT": ("hash", "backend", "source")},
    "evaluations": {
        "INSERT": (
            "id",
            "problem_hash",
            "kernel_hash",
            "problem_label",
            "kernel_label",
            "lane",
            "settings",
            "batch",
            "idempotency_key",
            "expires_at",
            "published_at",
            "priority",
            "producer",
            "reuse",
            "traceparent",
        ),
        "UPDATE": ("published_at",),
    },
    "batches": {"INSERT": _ALL, "UPDATE": ("last_at",)},
    "kqueue_cancel": {"EXECUTE": _ALL},
    "kqueue_reuse": {"EXECUTE": _ALL},
}
#: The rights of whoever searches, beside those of a producer.
_SEARCH: Final[_Rights] = {
    name: {"INSERT": _ALL, "UPDATE": _ALL} for name in ("search_runs", "search_steps", "search_proposals")
}
#: The rights of each role beside reading the relations in :data:`_READABLE`.
_WRITES: Final[Mapping[str, _Rights]] = {
    READER: {"tokens": _WEIGHTS},
    PRODUCER: _PRODUCE | _SEARCH,
    GATEWAY: {
        **_PRODUCE,
        "evaluations": _PRODUCE["evaluations"] | {"UPDATE": ("published_at", "token_id")},
        "tokens": {"SELECT": _ALL, "UPDATE": ("last_used_at",)},
        # Browsers log in and out. Links that log one in are made by whoever may make tokens.
        "sessions": {"SELECT": _ALL, "INSERT": ("digest", "token_id", "ends_at"), "DELETE": _ALL},
        # An operator's resets and tests of GPUs.
        "gpus": {"UPDATE": ("state", "reason", "since", "failures", "check_at", "reset_at")},
        "workers": {"UPDATE": ("paused",)},
        "probe_pauses": {"UPDATE": ("resumed_at",)},
    },
    WORKER: {
        "evaluations": {"UPDATE": ("state", "attempts", "available_at", "published_at")},
        "attempts": {
            "INSERT": ("evaluation_id", "number", "worker_id", "lease_until", "payer"),
            "UPDATE": (
                "environment_hash",
                "fingerprint",
                "lease_until",
                "step",
                "ended_at",
                "category",
                "message",
                "outcome",
                "written_by",
                "handed_back",
            ),
        },
        "shares": {"INSERT": _ALL, "DELETE": _ALL},
        "tokens": _WEIGHTS,
        "environments": {"INSERT": _ALL},
        "baselines": {"INSERT": _ALL, "UPDATE": ("measurement",)},
        # Rows of workers that ended long ago are removed; those that an attempt refers to cannot be.
        "workers": {"INSERT": _ALL, "UPDATE": _ALL, "DELETE": _ALL},
        "gpus": {"INSERT": _ALL, "UPDATE": _ALL},
        "probes": {
            "UPDATE": ("settled_at", "finding", "words", "bias", "judged_at", "worker", "host", "device", "spent")
        },
        "probe_lanes": {"INSERT": _ALL, "UPDATE": _ALL},
        "probe_pauses": {"INSERT": _ALL, "UPDATE": ("resumed_at",)},
        "kqueue_probe": {"EXECUTE": _ALL},
        "kqueue_cancel": {"EXECUTE": _ALL},
        "kqueue_conclude": {"EXECUTE": _ALL},
        "kqueue_reuse": {"EXECUTE": _ALL},
    },
}
#: All roles.
ROLES: Final = tuple(_WRITES)

#: One right: the role, the relation or function, the privilege, and the column (``""``: all).
_Right = tuple[str, str, str, str]

_GRANTED: Final = text("""
    SELECT r.rolname, c.relname, a.privilege_type, ''
    FROM pg_class AS c CROSS JOIN LATERAL aclexplode(c.relacl) AS a JOIN pg_roles AS r ON r.oid = a.grantee
    WHERE c.relnamespace = current_schema()::regnamespace AND r.rolname = ANY(:roles)
    UNION ALL
    SELECT r.rolname, c.relname, a.privilege_type, t.attname
    FROM pg_attribute AS t JOIN pg_class AS c ON c.oid = t.attrelid
    CROSS JOIN LATERAL aclexplode(t.attacl) AS a JOIN pg_roles AS r ON r.oid = a.grantee
    WHERE c.relnamespace = current_schema()::regnamespace AND r.rolname = ANY(:roles)
    UNION ALL
    -- A function is everybody's unless that was revoked, which a backup restored without privileges forgets.
    SELECT coalesce(r.rolname, 'public'), p.proname, a.privilege_type, ''
    FROM pg_proc AS p CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
    LEFT JOIN pg_roles AS r ON r.oid = a.grantee
    WHERE p.pronamespace = current_schema()::regnamespace AND starts_with(p.proname, 'kqueue_')
    AND (r.rolname = ANY(:roles) OR a.grantee = 0)
""")

#: Asks if a login may do more than the roles may. The answer has no row if there is no such login.
_MORE: Final = text("""
    SELECT
        rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls
        OR rolname = current_user OR rolname = ANY(:roles)
        OR pg_has_role(oid, (SELECT relowner FROM pg_class WHERE oid = to_regclass('alembic_version')), 'MEMBER')
    FROM pg_roles WHERE rolname = :name
""")


def rights(role: str) -> Iterator[_Right]:
    """Yield all rights of a role."""
    for relation in _READABLE:
        yield role, relation, "SELECT", ""
    things: _Rights = _WRITES[role]
    for thing, privileges in things.items():
        for privilege, columns in privileges.items():
            for column in columns:
                yield role, thing, privilege, column


def apply(connection: Connection) -> list[str]:
    """Make the roles that are missing, and set the rights of all.

    Nothing happens if another user owns the tables.

    Returns:
        The roles that do not exist and that this user may not make.
    """
    owner = "SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = to_regclass('alembic_version')"
    if not connection.scalar(text(owner)):
        return []
    missing = [role for role in ROLES if not _ensure(connection, role)]
    present = [role for role in ROLES if role not in missing]
    wanted = {right for role in present for right in rights(role)}
    found: set[_Right] = {(r[0], r[1], r[2], r[3]) for r in connection.execute(_GRANTED, {"roles": list(ROLES)})}
    for right in sorted(wanted - found):
        _execute(connection, _statement("GRANT", right, "TO"))
    for right in sorted(found - wanted):
        _execute(connection, _statement("REVOKE", right, "FROM"))
    return missing


def login(engine: Engine, name: str, role: str, password: str) -> None:
    """Make ``name`` a login with this password that is a member of one of the roles, and of no other of them.

    If it exists, its password is changed. The server is given the password's verifier, never the password.

    Raises:
        ConfigError: ``name`` stands for somebody who may do more, or the role does not exist yet.
        DatabaseUnavailable: this user may not make logins, or Postgres cannot be used.
    """
    if not password:
        raise ConfigError(f"no password was given for {name}")
    with transaction(engine) as connection:
        if connection.scalar(text("SELECT to_regrole(:role)"), {"role": role}) is None:
            raise ConfigError(
                f"the role {role} does not exist: run `kqueue db upgrade` as a user that may create roles"
            )
        known = connection.execute(_MORE, {"name": name, "roles": list(ROLES)}).scalar_one_or_none()
        if known:
            raise ConfigError(f"{name} may do more than {role}: choose another name")
        raw: PsycopgConnection[Any] = connection.connection.driver_connection  # pyright: ignore[reportAssignmentType]
        verifier = raw.pgconn.encrypt_password(password.encode(), name.encode(), b"scram-sha-256").decode()
        verb = SQL("CREATE") if known is None else SQL("ALTER")
        who = Identifier(name)
        _execute(connection, SQL("{} ROLE {} LOGIN PASSWORD {}").format(verb, who, Literal(verifier)))
        for other in ROLES:
            if other == role:
                _execute(connection, SQL("GRANT {} TO {}").format(Identifier(role), who))
            elif connection.scalar(
                text(
                    "SELECT count(*) FROM pg_auth_members WHERE roleid = to_regrole(:role) "
                    "AND member = (SELECT oid FROM pg_roles WHERE rolname = :name)"
                ),
                {"role": other, "name": name},
            ):
                _execute(connection, SQL("REVOKE {} FROM {}").format(Identifier(other), who))


def _ensure(connection: Connection, role: str) -> bool:
    """Make the role if it is missing; return True if it exists then."""
    if connection.scalar(text("SELECT to_regrole(:role)"), {"role": role}) is not None:
        return True
    try:
        with connection.begin_nested():
            connection.execute(text(f"CREATE ROLE {role} NOLOGIN"))
    except IntegrityError:  # another database's migration made it at this moment
        return True
    except ProgrammingError as error:
        state = getattr(error.orig, "sqlstate", None)
        if state == "42710":  # it exists
            return True
        if state == "42501":  # this user may not
            return False
        raise
    return True


def _statement(verb: LiteralString, right: _Right, preposition: LiteralString) -> Composable:
    role, thing, privilege, column = right
    return SQL(verb + " {}{} ON {}{} " + preposition + " {}").format(
        # Privileges are named by the constants above or by Postgres.
        SQL(cast("LiteralString", privilege)),
        SQL(" ({})").format(Identifier(column)) if column else SQL(""),
        SQL("FUNCTION " if privilege == "EXECUTE" else ""),
        Identifier(thing),
        Identifier(role),
    )


def _execute(connection: Connection, statement: Composable) -> None:
    raw: Any = connection.connection.driver_connection
    connection.exec_driver_sql(statement.as_string(raw))
