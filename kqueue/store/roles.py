"""Roles in the database: groups with the minimum privileges of each part of a fleet.

They belong to the cluster and cannot log in. Logins become members (:func:`login`, ``kqueue db login``). Several
databases of a cluster share the roles, so they are created if missing and never dropped.
:func:`kqueue.store.schema.upgrade` applies the privileges each time: it grants missing ones and revokes excess ones.
The owner of the tables and one-machine fleets need no roles.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, LiteralString, cast

from psycopg.sql import SQL, Composable, Identifier, Literal
from sqlalchemy import Connection, Engine, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError, ProgrammingError

from kqueue.contract import Settings
from kqueue.errors import ConfigError
from kqueue.store.engine import transaction
from kqueue.store.models import LOCAL, Callback, Login, SearchProposal, SearchRun, SearchStep, Token

if TYPE_CHECKING:
    from psycopg import Connection as PsycopgConnection

#: Role that submits, waits and cancels. It cannot write verdicts.
PRODUCER: Final = "kqueue_producer"
#: Role that claims, renews, ends and sweeps. It cannot change sources or outcomes of verdicts.
WORKER: Final = "kqueue_worker"
#: Role that serves HTTP: a producer that can also read tokens.
GATEWAY: Final = "kqueue_gateway"
#: Role that the gateway assumes for a request whose caller sees the work of one owner only.
TENANT: Final = "kqueue_tenant"
#: Role that only reads.
READER: Final = "kqueue_reader"

_ALL: Final = ("",)
#: Relations that every role can read. Only the gateway can read the digests of tokens and sessions.
_READABLE: Final = (
    *("alembic_version", "attempts", "baselines", "batches", "environments", "evaluations", "gpus", "kernels"),
    *("probe_lanes", "probe_pauses", "probes", "problems", "search_proposals", "search_runs", "search_steps"),
    *("shared_problems", "shares", "summaries", "verdicts", "workers"),
    *("best_verdicts", "evaluation_overview", "fleet_utilisation", "outcomes"),
)

#: Functions that every role can call: policies and defaults of columns use them, and no role gains rights by them.
_CALLABLE: Final = (
    *("kqueue_act", "kqueue_notify", "kqueue_owner", "kqueue_rules", "kqueue_sees_all"),
    *("kqueue_session", "kqueue_trusted"),
)

#: Type of privileges on relations and functions, with their columns (``""``: all of them).
_Rights = Mapping[str, Mapping[str, tuple[str, ...]]]

#: Privileges on the columns that decide the order of evaluations, why one waits, and whether it is accepted.
_WEIGHTS: Final = {"SELECT": ("id", "weight", "budget_s", "budget_window_s", "budget_then", "limits")}

#: Privileges on the state of callbacks. A URL can contain secrets, so only servers can read it.
_CALLED: Final = {"SELECT": tuple(sorted(set(Callback.__table__.columns.keys()) - {"url"}))}

_SHOWN: Final = ("label", "leaderboard")
_PRODUCE: Final[_Rights] = {
    "tokens": _WEIGHTS,
    "problems": {"INSERT": ("hash", "source", "shared_from")},
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
    "batches": {"INSERT": ("name", "owner", "last_at"), "UPDATE": ("last_at",)},
    "shared_problems": {"INSERT": ("hash", "source", "settings", *_SHOWN), "UPDATE": _SHOWN},
    "callbacks": _CALLED
    | {
        "INSERT": ("evaluation_id", "batch", "url"),
        "UPDATE": ("id", "url", "attempts", "next_at", "delivered_at", "error"),
    },
    "kqueue_cancel": {"EXECUTE": _ALL},
    "kqueue_reuse": {"EXECUTE": _ALL},
    "kqueue_unshare": {"EXECUTE": _ALL},
    "kqueue_waiting": {"EXECUTE": _ALL},
}
#: Additional privileges of producers' logins, which run searches. A producer has no privilege on a whole table except
#: reading, because any other one allows to lock it.
_SEARCH: Final[_Rights] = {
    table.__tablename__: dict.fromkeys(("INSERT", "UPDATE"), tuple(table.__table__.columns.keys()))
    for table in (SearchRun, SearchStep, SearchProposal)
}
#: Privileges of servers of HTTP, which record tokens and serve shared problems.
_SERVE: Final[_Rights] = _PRODUCE | {
    "evaluations": _PRODUCE["evaluations"] | {"UPDATE": ("published_at", "token_id")},
    # Servers of the version before remove rows.
    "shared_problems": {**_PRODUCE["shared_problems"], "DELETE": _ALL},
    "kqueue_board": {"EXECUTE": _ALL},
}
#: Privileges of each role in addition to reading the relations in :data:`_READABLE`.
_WRITES: Final[Mapping[str, _Rights]] = {
    READER: {"callbacks": _CALLED, "tokens": _WEIGHTS},
    PRODUCER: {**_PRODUCE, **_SEARCH, "kqueue_fits": {"EXECUTE": _ALL}},
    TENANT: {**_SERVE, "tokens": {"SELECT": tuple(sorted(set(Token.__table__.columns.keys()) - {"digest"}))}},
    GATEWAY: {
        **_SERVE,
        "callbacks": _PRODUCE["callbacks"] | {"SELECT": _ALL},
        # A person who logs in by OpenID Connect gets a token without a secret: the gateway cannot write a digest.
        "tokens": {
            "SELECT": _ALL,
            "INSERT": ("id", "name", "scopes", "owner"),
            "UPDATE": ("last_used_at", "revoked_at"),
        },
        # Browsers log in and out. Only the creator of tokens creates login links.
        "sessions": {
            "SELECT": _ALL,
            "INSERT": ("digest", "token_id", "ends_at"),
            "UPDATE": ("seen_at",),
            "DELETE": _ALL,
        },
        # It adds to its trail, and can neither read nor change it.
        "audit": {"INSERT": ("actor", "owner", "token_id", "action", "subject")},
        # Resets and self-tests of GPUs by an operator.
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
        # Rows of workers that stopped long ago are removed. The foreign key protects rows that an attempt refers to.
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
        "kqueue_relieve": {"EXECUTE": _ALL},
        "kqueue_reuse": {"EXECUTE": _ALL},
    },
}
#: All roles.
ROLES: Final = tuple(_WRITES)

_OWNED: Final = "owner = (SELECT {schema}.kqueue_owner())"
#: True without an agent's session. The planner takes IS NOT NULL for nearly always true, and IS NULL for nearly always
#: false.
_NO_SESSION: Final = "(SELECT CASE WHEN {schema}.kqueue_session() IS NULL THEN true END) IS NOT NULL"
_SUBMITTED: Final = "session = (SELECT {schema}.kqueue_session())"
_EVALUATED: Final = "EXISTS (SELECT FROM {schema}.evaluations AS e WHERE e.id = evaluation_id)"
_OF_SESSION: Final = (
    "EXISTS (SELECT FROM {{schema}}.evaluations AS e WHERE e.{kind}_hash = {kind}s.hash AND e.owner = {kind}s.owner)"
)
_SEARCHED: Final = "EXISTS (SELECT FROM {schema}.search_runs AS r WHERE r.id = run_id)"
#: Tables with rows of owners, and the condition that a row is the session's own. In the nested queries, the policies of
#: the other table apply. Postgres evaluates `kqueue_owner` and `kqueue_session` once for each query, because they are
#: in subqueries. Without an agent's session, no row needs a look at another table.
_OWN: Final = {
    "attempts": _EVALUATED,
    "audit": "false",
    "baselines": _OWNED,
    "batches": _OWNED,
    "callbacks": f"{_OWNED} AND ((evaluation_id IS NULL AND {_NO_SESSION}) OR {_EVALUATED})",
    "evaluations": f"{_OWNED} AND ({_NO_SESSION} OR {_SUBMITTED})",
    "kernels": f"{_OWNED} AND ({_NO_SESSION} OR {_OF_SESSION.format(kind='kernel')})",
    "problems": f"{_OWNED} AND ({_NO_SESSION} OR session IS NULL OR {_SUBMITTED} "
    f"OR {_OF_SESSION.format(kind='problem')})",
    "search_proposals": _SEARCHED,
    "search_runs": f"{_OWNED} AND {_NO_SESSION}",
    "search_steps": _SEARCHED,
    "shared_problems": _OWNED,
    "shares": "false",
    "summaries": f"{_OWNED} AND ({_NO_SESSION} OR {_EVALUATED})",
    "tokens": _OWNED,
    "verdicts": f"{_OWNED} AND ({_NO_SESSION} OR {_EVALUATED})",
}
#: Tables whose rows can be written if they are the owner's. The condition above is then for reading only.
_WRITABLE: Final = ("kernels",)
#: Additional conditions for producers' logins: only servers know to cut shapes that another owner holds out.
_DIRECT: Final = {"problems": " AND (shared_from IS NULL OR strpos(source, 'held_out') = 0)"}
#: Further condition of evaluations that producers' logins add: a worker can read them, and they count for no token.
_FITTING: Final = """
    producer !~ '^(token:|kqueue''s )' AND length(lane || producer) < 300
    AND (SELECT bool_and(length(label) BETWEEN 1 AND 200) IS NOT false
         FROM unnest(ARRAY[problem_label, kernel_label, batch, idempotency_key]) AS label)
    AND {schema}.kqueue_fits(settings, '{forms}')
"""
#: Tables of which all rows can be read, except by producers' logins.
_PUBLIC: Final = ("shared_problems",)

#: Type of one privilege: the role, the relation or function, the privilege, and the column (``""``: all).
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
    -- PUBLIC can execute a function unless that was revoked. A backup restored without privileges loses the revocation.
    SELECT coalesce(r.rolname, 'public'), p.proname, a.privilege_type, ''
    FROM pg_proc AS p CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
    LEFT JOIN pg_roles AS r ON r.oid = a.grantee
    WHERE p.pronamespace = current_schema()::regnamespace AND starts_with(p.proname, 'kqueue_')
    AND (r.rolname = ANY(:roles) OR a.grantee = 0)
""")

_PRESENT: Final = text("SELECT rolname FROM pg_roles WHERE rolname = ANY(:roles) ORDER BY rolname")
_IS_TENANT: Final = text("""
    SELECT EXISTS (
        SELECT FROM pg_auth_members WHERE roleid = to_regrole('kqueue_tenant') AND member = to_regrole('kqueue_gateway')
    )
""")
#: Query for the statements that limit the producers' logins that could take all connections. A client needs up to 8.
_UNLIMITED: Final = text("""
    SELECT format('ALTER ROLE %I CONNECTION LIMIT 50', rolname) FROM logins JOIN pg_roles ON rolname = name
    WHERE rolconnlimit = -1 AND pg_has_role(oid, to_regrole('kqueue_producer')::oid, 'USAGE') AND NOT rolsuper
""")
#: Query that returns True if a login has more privileges than the roles, and no row if it does not exist.
_MORE: Final = text("""
    SELECT
        rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls
        OR rolname = current_user OR rolname = ANY(:roles)
        OR pg_has_role(oid, (SELECT relowner FROM pg_class WHERE oid = to_regclass('alembic_version')), 'MEMBER')
    FROM pg_roles WHERE rolname = :name
""")


def rights(role: str) -> Iterator[_Right]:
    """Yield all privileges of a role."""
    for relation in _READABLE:
        yield role, relation, "SELECT", ""
    for function in _CALLABLE:
        yield role, function, "EXECUTE", ""
    objects: _Rights = _WRITES[role]
    for thing, privileges in objects.items():
        for privilege, columns in privileges.items():
            for column in columns:
                yield role, thing, privilege, column


def apply(connection: Connection) -> list[str]:
    """Create the missing roles, and set the privileges and policies of all.

    Nothing happens if another user owns the tables.

    Returns:
        The statements that this user cannot run, for the roles that do not exist and the membership of the gateway.
    """
    owner = "SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = to_regclass('alembic_version')"
    if not connection.scalar(text(owner)):
        return []
    refused = [f"CREATE ROLE {role} NOLOGIN" for role in ROLES if not _ensure(connection, role)]
    present = connection.scalars(_PRESENT, {"roles": list(ROLES)}).all()
    wanted = {right for role in present for right in rights(role)}
    present_rights: set[_Right] = {
        (r[0], r[1], r[2], r[3]) for r in connection.execute(_GRANTED, {"roles": list(ROLES)})
    }
    for right in sorted(wanted - present_rights):
        _execute(connection, _statement("GRANT", right, "TO"))
    for right in sorted(present_rights - wanted):
        _execute(connection, _statement("REVOKE", right, "FROM"))
    membership = f"GRANT {TENANT} TO {GATEWAY}"
    if not connection.scalar(_IS_TENANT) and not ({TENANT, GATEWAY} <= set(present) and _try(connection, membership)):
        refused.append(membership)
    _secure(connection, present)
    return refused + [each for each in connection.scalars(_UNLIMITED).all() if not _try(connection, each)]


def _secure(connection: Connection, present: Collection[str]) -> None:
    """Enable row-level security, and create the missing policies. A policy's name has a hash of its definition."""
    schema = connection.scalars(text("SELECT quote_ident(current_schema())")).one()
    tables_owner = connection.scalars(
        text("SELECT relowner::regrole::text FROM pg_class WHERE oid = to_regclass('alembic_version')")
    ).one()
    fleet = ", ".join(role for role in present if role in (GATEWAY, READER, WORKER))
    producer, tenant = (role if role in present else "" for role in (PRODUCER, TENANT))
    policies: list[tuple[str, str]] = []
    for table, own in _OWN.items():
        own, everything = own.format(schema=schema), f"(SELECT {schema}.kqueue_sees_all())"
        check = _OWNED.format(schema=schema) if table in _WRITABLE else None
        for roles, condition, written in (
            (fleet, "true", None),
            (producer, own + _DIRECT.get(table, ""), check),
            (tenant, own, check),
            # The functions that run with its rights are held too, if their caller is.
            (tables_owner, f"{everything} OR {own}", check and f"{everything} OR {check}"),
            *((each, None, None) for each in (tenant, tables_owner) if table in _PUBLIC),
        ):
            if roles:
                policy = f"FOR SELECT TO {roles} USING (true)"
                if condition is not None:
                    policy = f"TO {roles} USING ({condition})" + (f" WITH CHECK ({written})" if written else "")
                policies.append((table, policy))
    if producer:
        forms = json.dumps(list(_forms(Settings.model_json_schema())))
        fitting = _FITTING.format(schema=schema, forms=forms)
        policies.append(("evaluations", f"AS RESTRICTIVE FOR INSERT TO {producer} WITH CHECK ({fitting})"))
        for table, privileges in _WRITES[PRODUCER].items():
            # Python cannot read all times of Postgres.
            times = sorted({one for columns in privileges.values() for one in columns if one.endswith("_at")})
            bounded = " AND ".join(f"coalesce({one}, now()) BETWEEN '2000-01-01' AND '2100-01-01'" for one in times)
            if times:
                policies.append((table, f"AS RESTRICTIVE TO {producer} USING (true) WITH CHECK ({bounded})"))
    wanted = {
        (table, f"kqueue_{hashlib.sha256(policy.encode()).hexdigest()[:12]}"): policy for table, policy in policies
    }
    rows = connection.execute(text("SELECT tablename, policyname FROM pg_policies WHERE schemaname = current_schema()"))
    existing = {(row.tablename, row.policyname) for row in rows}
    for table, name in sorted(existing - wanted.keys()):
        connection.exec_driver_sql(f"DROP POLICY {name} ON {table}")
    for table, name in sorted(wanted.keys() - existing):
        connection.exec_driver_sql(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        connection.exec_driver_sql(f"CREATE POLICY {name} ON {table} {wanted[table, name]}")


def _forms(schema: dict[str, Any], definitions: Mapping[str, Any] = {}, path: str = "") -> Iterator[dict[str, Any]]:
    """Yield the path, kind, known words or bounds, and default of each part of a JSON schema, for ``kqueue_fits``."""
    definitions = schema.get("$defs", definitions)
    form = schema | schema.get("anyOf", [{}])[0]
    form |= definitions.get(form.get("$ref", "").rpartition("/")[2], {})
    words = form | definitions.get(form.get("items", {}).get("$ref", "").rpartition("/")[2], {})
    properties: dict[str, Any] = form.get("properties", {})
    yield {
        "path": path,
        "kind": form["type"],
        "known": words.get("enum", list(properties)),
        "least": form.get("minimum", form.get("exclusiveMinimum", -1e300) + 1e-9),
        "most": form.get("maximum", form.get("exclusiveMaximum", 1e300) - 1),
        "preset": schema.get("default"),
        "nullable": "anyOf" in schema,
    }
    for name, part in properties.items():
        yield from _forms(part, definitions, f"{path}.{name}".lstrip("."))


def identity(engine: Engine) -> tuple[bool, str]:
    """Return True if sessions of this login can act for any owner, and the owner for whom they act by default."""
    with transaction(engine) as connection:
        trusted, owner = connection.execute(text("SELECT kqueue_trusted(), kqueue_owner()")).one()
    return trusted, owner


def login(
    engine: Engine,
    name: str,
    role: str,
    password: str,
    *,
    owner: str = LOCAL,
    limits: Mapping[str, float] | None = None,
) -> None:
    """Create a login that is a member of exactly one of the roles, or change the password of an existing one.

    The server receives the password's verifier, never the password. A producer sees the rows of its ``owner`` only.
    ``limits`` are the greatest settings of its submissions, by dotted path. Without any, an existing login keeps its.
    Raise ConfigError if the existing ``name`` has more privileges, or the role does not exist yet. Raise
    DatabaseUnavailable if this user cannot create logins, or Postgres cannot be used.
    """
    if not password:
        raise ConfigError(f"no password was given for {name}")
    with transaction(engine) as connection:
        if connection.scalar(text("SELECT to_regrole(:role)"), {"role": role}) is None:
            raise ConfigError(
                f"the role {role} does not exist: run `kqueue db upgrade` as a user that can create roles"
            )
        has_more = connection.execute(_MORE, {"name": name, "roles": list(ROLES)}).scalar_one_or_none()
        if has_more:
            raise ConfigError(f"{name} has more privileges than {role}: choose another name")
        raw: PsycopgConnection[Any] = connection.connection.driver_connection  # pyright: ignore[reportAssignmentType]
        verifier = raw.pgconn.encrypt_password(password.encode(), name.encode(), b"scram-sha-256").decode()
        verb = SQL("CREATE") if has_more is None else SQL("ALTER")
        values = {"owner": owner} | ({"limits": limits} if limits else {})
        connection.execute(
            insert(Login).values(name=name, **values).on_conflict_do_update(index_elements=[Login.name], set_=values)
        )
        member = Identifier(name)
        # A producer's login gets a limit below.
        more = SQL("") if role == PRODUCER else SQL(" CONNECTION LIMIT -1")
        _execute(connection, SQL("{} ROLE {} LOGIN PASSWORD {}").format(verb, member, Literal(verifier)) + more)
        for other in ROLES:
            if other == role:
                _execute(connection, SQL("GRANT {} TO {}").format(Identifier(role), member))
            elif connection.scalar(
                text(
                    "SELECT count(*) FROM pg_auth_members WHERE roleid = to_regrole(:role) "
                    "AND member = (SELECT oid FROM pg_roles WHERE rolname = :name)"
                ),
                {"role": other, "name": name},
            ):
                _execute(connection, SQL("REVOKE {} FROM {}").format(Identifier(other), member))
        for statement in connection.scalars(_UNLIMITED).all():
            connection.exec_driver_sql(statement)


def _ensure(connection: Connection, role: str) -> bool:
    """Create the role if it is missing, and return True if it then exists."""
    if connection.scalar(text("SELECT to_regrole(:role)"), {"role": role}) is not None:
        return True
    return _try(connection, f"CREATE ROLE {role} NOLOGIN")


def _try(connection: Connection, statement: str) -> bool:
    """Run a statement on roles, and return False if this user lacks the right."""
    try:
        with connection.begin_nested():
            connection.execute(text(statement))
    except IntegrityError:  # another database's migration has just done it
        return True
    except ProgrammingError as error:
        state = getattr(error.orig, "sqlstate", None)
        if state == "42710":  # it exists
            return True
        if state == "42501":  # this user lacks the right
            return False
        raise
    return True


def _statement(verb: LiteralString, right: _Right, preposition: LiteralString) -> Composable:
    role, thing, privilege, column = right
    return SQL(verb + " {}{} ON {}{} " + preposition + " {}").format(
        # The names of privileges come from the constants above or from Postgres.
        SQL(cast("LiteralString", privilege)),
        SQL(" ({})").format(Identifier(column)) if column else SQL(""),
        SQL("FUNCTION " if privilege == "EXECUTE" else ""),
        Identifier(thing),
        Identifier(role),
    )


def _execute(connection: Connection, statement: Composable) -> None:
    raw: Any = connection.connection.driver_connection
    connection.exec_driver_sql(statement.as_string(raw))
