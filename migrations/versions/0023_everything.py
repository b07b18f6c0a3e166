"""All tables, indexes, functions and views."""

from __future__ import annotations

import json
import re
from typing import Final

import sqlalchemy as sa
from alembic import op

from kqueue.contract import RULES

revision = "0023"
down_revision = None
branch_labels = None
depends_on = None

#: Functions that defaults of columns call, and those that they call. A session of the fleet itself can act for any
#: owner (``kqueue.owner``), and restrict itself to the owner's rows (``kqueue.sees``). All other sessions belong to the
#: owner of their login, whatever they set. The functions use ``session_user``, so that they hold within functions that
#: run with their owner's rights too. Postgres prepares a function in SQL for each query, and one in PL/pgSQL once for
#: each connection. For members of the fleet's roles, superusers included, no catalog is read.
_SESSION: Final = """
CREATE FUNCTION {schema}.kqueue_trusted() RETURNS boolean
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
COMMENT ON FUNCTION kqueue_trusted IS 'True for sessions of the fleet itself, which can act for any owner.';
CREATE FUNCTION {schema}.kqueue_owner() RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF {schema}.kqueue_trusted() THEN
        RETURN coalesce(nullif(current_setting('kqueue.owner', true), ''), 'local');
    END IF;
    RETURN coalesce((SELECT l.owner FROM {schema}.logins AS l WHERE l.name = session_user), 'local');
END
$$;
COMMENT ON FUNCTION kqueue_owner IS 'The owner for whom the session acts.';
CREATE FUNCTION {schema}.kqueue_sees_all() RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN current_setting('kqueue.sees', true) IS DISTINCT FROM 'own' AND {schema}.kqueue_trusted();
END
$$;
COMMENT ON FUNCTION kqueue_sees_all IS 'True if the session is not held to the rows of one owner.';
CREATE FUNCTION {schema}.kqueue_act(who text, held boolean) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF NOT {schema}.kqueue_trusted() THEN
        RETURN;
    END IF;
    PERFORM pg_catalog.set_config('kqueue.owner', who, true);
    PERFORM pg_catalog.set_config('kqueue.sees', CASE WHEN held THEN 'own' ELSE 'all' END, true);
    -- The owner of the tables obeys kqueue.sees itself, so it needs no role.
    IF held AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_roles AS r, pg_catalog.pg_class AS c
        WHERE r.rolname = session_user AND c.oid = '{schema}.tokens'::pg_catalog.regclass
          AND NOT r.rolsuper AND NOT r.rolbypassrls AND pg_catalog.pg_has_role(r.oid, c.relowner, 'MEMBER')
    ) THEN
        PERFORM pg_catalog.set_config('role', 'kqueue_tenant', true);
    END IF;
END
$$;
COMMENT ON FUNCTION kqueue_act IS
    'Lets a trusted session act for an owner until the transaction ends, and if held see only the owner''s rows.';
CREATE FUNCTION {schema}.kqueue_session() RETURNS text LANGUAGE sql STABLE AS $$
    SELECT nullif(pg_catalog.current_setting('kqueue.session', true), '')
$$;
COMMENT ON FUNCTION kqueue_session IS 'The session of an agent to which the transaction is restricted, or null.';
"""
#: Tables, in the order of their foreign keys. :class:`kqueue.contract.Request` hashes sources in the same way. The
#: checks of the hashes are not valid, as in a development version's database at 0023, whose older rows had no check.
_TABLES: Final = r"""
CREATE TABLE environments (
    hash text CONSTRAINT pk_environments PRIMARY KEY,
    device text NOT NULL,
    driver text,
    cuda text,
    torch text NOT NULL,
    triton text,
    python text NOT NULL,
    host text NOT NULL,
    facts jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE environments IS 'The facts on which times depend, identified by their hash.';
CREATE TABLE kernels (
    hash text NOT NULL,
    backend text NOT NULL,
    source text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    owner text NOT NULL DEFAULT kqueue_owner(),
    CONSTRAINT pk_kernels PRIMARY KEY (hash, owner)
);
ALTER TABLE kernels ADD CONSTRAINT ck_kernels_hash CHECK (
    hash = encode(sha256(convert_to(backend, 'UTF8') || '\x00'::bytea || convert_to(source, 'UTF8')), 'hex')
    OR hash = repeat('0', 64) AND source = ''
) NOT VALID;
COMMENT ON TABLE kernels IS 'A candidate''s source and backend, identified by the hash of both within its owner.';
CREATE TABLE problems (
    hash text NOT NULL,
    source text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    owner text NOT NULL DEFAULT kqueue_owner(),
    session text DEFAULT kqueue_session(),
    shared_from text,
    CONSTRAINT pk_problems PRIMARY KEY (hash, owner)
);
ALTER TABLE problems ADD CONSTRAINT ck_problems_hash CHECK (
    hash = encode(sha256(convert_to(source, 'UTF8')), 'hex') OR hash = repeat('0', 64) AND source = ''
) NOT VALID;
COMMENT ON TABLE problems IS 'A reference, identified by the hash of its source within its owner.';
CREATE TABLE workers (
    id uuid CONSTRAINT pk_workers PRIMARY KEY,
    name text NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    lanes text[] NOT NULL,
    device text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now(),
    heartbeat_at timestamptz NOT NULL DEFAULT now(),
    stopped_at timestamptz,
    paused text,
    waits_for text,
    waits_since timestamptz,
    fingerprint text
);
COMMENT ON TABLE workers IS 'A slot''s worker process, one row for each start.';
CREATE TABLE baselines (
    problem_hash text NOT NULL,
    environment_hash text NOT NULL,
    settings_key text NOT NULL,
    measurement jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    owner text NOT NULL DEFAULT kqueue_owner(),
    CONSTRAINT pk_baselines PRIMARY KEY (problem_hash, environment_hash, settings_key),
    CONSTRAINT fk_baselines_environment_hash_environments
        FOREIGN KEY (environment_hash) REFERENCES environments (hash)
);
COMMENT ON TABLE baselines IS 'The reference''s own time in one environment, cached.';
CREATE TABLE tokens (
    id uuid CONSTRAINT pk_tokens PRIMARY KEY,
    name text NOT NULL,
    digest text CONSTRAINT uq_tokens_digest UNIQUE,
    scopes text[] NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz,
    revoked_at timestamptz,
    last_used_at timestamptz,
    priority text NOT NULL DEFAULT 'interactive',
    weight float8 NOT NULL DEFAULT 1,
    budget_s float8,
    budget_window_s float8,
    budget_then text,
    owner text NOT NULL DEFAULT kqueue_owner(),
    limits jsonb NOT NULL DEFAULT '{}',
    CONSTRAINT ck_tokens_budget_then CHECK (budget_then IN ('refuse', 'lower')),
    CONSTRAINT ck_tokens_budget
        CHECK ((budget_s IS NULL) = (budget_window_s IS NULL) AND (budget_s IS NULL) = (budget_then IS NULL))
);
COMMENT ON TABLE tokens IS 'A credential for the HTTP server, and the rights of its holder.';
CREATE TABLE evaluations (
    id uuid CONSTRAINT pk_evaluations PRIMARY KEY,
    problem_hash text NOT NULL,
    kernel_hash text NOT NULL,
    problem_label text,
    kernel_label text,
    lane text NOT NULL,
    settings jsonb NOT NULL,
    batch text,
    idempotency_key text,
    state text NOT NULL DEFAULT 'queued',
    attempts integer NOT NULL DEFAULT 0,
    submitted_at timestamptz NOT NULL DEFAULT now(),
    available_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz,
    published_at timestamptz,
    token_id uuid CONSTRAINT fk_evaluations_token_id_tokens REFERENCES tokens (id),
    priority text NOT NULL DEFAULT 'batch',
    producer text NOT NULL DEFAULT '',
    reuse boolean NOT NULL DEFAULT false,
    probe boolean NOT NULL DEFAULT false,
    traceparent text,
    owner text NOT NULL DEFAULT kqueue_owner(),
    session text DEFAULT kqueue_session(),
    CONSTRAINT uq_evaluations_owner_idempotency_key UNIQUE (owner, idempotency_key),
    CONSTRAINT fk_evaluations_problem_hash_owner_problems
        FOREIGN KEY (problem_hash, owner) REFERENCES problems (hash, owner),
    CONSTRAINT fk_evaluations_kernel_hash_owner_kernels
        FOREIGN KEY (kernel_hash, owner) REFERENCES kernels (hash, owner),
    CONSTRAINT ck_evaluations_state CHECK (state IN ('queued', 'running', 'done')),
    CONSTRAINT ck_evaluations_priority CHECK (priority IN ('interactive', 'batch', 'idle'))
);
COMMENT ON TABLE evaluations IS 'One request to judge one kernel against one problem.';
CREATE TABLE attempts (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_attempts PRIMARY KEY,
    evaluation_id uuid NOT NULL
        CONSTRAINT fk_attempts_evaluation_id_evaluations REFERENCES evaluations (id) ON DELETE CASCADE,
    number integer NOT NULL,
    worker_id uuid NOT NULL CONSTRAINT fk_attempts_worker_id_workers REFERENCES workers (id),
    environment_hash text CONSTRAINT fk_attempts_environment_hash_environments REFERENCES environments (hash),
    started_at timestamptz NOT NULL DEFAULT now(),
    lease_until timestamptz NOT NULL,
    ended_at timestamptz,
    category text,
    message text,
    outcome jsonb,
    written_by text,
    handed_back boolean NOT NULL DEFAULT false,
    fingerprint text,
    payer text,
    step text,
    CONSTRAINT uq_attempts_evaluation_id_number UNIQUE (evaluation_id, number)
);
COMMENT ON TABLE attempts IS 'One execution of an evaluation by one worker.';
CREATE TABLE verdicts (
    evaluation_id uuid CONSTRAINT pk_verdicts PRIMARY KEY
        CONSTRAINT fk_verdicts_evaluation_id_evaluations REFERENCES evaluations (id) ON DELETE CASCADE,
    attempt_id bigint CONSTRAINT fk_verdicts_attempt_id_attempts REFERENCES attempts (id),
    category text NOT NULL,
    blame text NOT NULL,
    compiled boolean,
    correctness boolean,
    phase text,
    message text NOT NULL,
    runtime_ms float8,
    baseline_ms float8,
    speedup float8,
    facts jsonb NOT NULL,
    runtime jsonb,
    baseline jsonb,
    evidence jsonb NOT NULL,
    log text NOT NULL,
    written_by text NOT NULL,
    finished_at timestamptz NOT NULL DEFAULT now(),
    content text,
    reusable boolean,
    reused_from uuid,
    judged_at timestamptz,
    environment_hash text CONSTRAINT fk_verdicts_environment_hash_environments REFERENCES environments (hash),
    owner text NOT NULL DEFAULT kqueue_owner()
);
COMMENT ON TABLE verdicts IS 'The one final outcome of an evaluation.';
CREATE TABLE summaries (
    evaluation_id uuid CONSTRAINT pk_summaries PRIMARY KEY
        CONSTRAINT fk_summaries_evaluation_id_verdicts REFERENCES verdicts (evaluation_id) ON DELETE CASCADE,
    problem_hash text NOT NULL,
    kernel_hash text NOT NULL,
    batch text,
    category text NOT NULL,
    runtime_ms float8,
    speedup float8,
    reused boolean NOT NULL,
    finished_at timestamptz NOT NULL,
    owner text NOT NULL DEFAULT kqueue_owner()
);
COMMENT ON TABLE summaries IS
    'The columns of a verdict by which pages sum and sort, one narrow row each, without probes.';
CREATE TABLE batches (
    name text NOT NULL,
    last_at timestamptz NOT NULL,
    owner text NOT NULL DEFAULT kqueue_owner(),
    CONSTRAINT pk_batches PRIMARY KEY (name, owner)
);
COMMENT ON TABLE batches IS 'A batch, and the time of its last submission within a second.';
CREATE TABLE gpus (
    uuid text CONSTRAINT pk_gpus PRIMARY KEY,
    host text NOT NULL,
    index integer NOT NULL,
    name text NOT NULL,
    state text NOT NULL DEFAULT 'serving',
    reason text,
    since timestamptz NOT NULL DEFAULT now(),
    failures integer NOT NULL DEFAULT 0,
    check_at timestamptz,
    reset_at timestamptz,
    facts jsonb NOT NULL DEFAULT '{}',
    seen_at timestamptz NOT NULL DEFAULT now(),
    memory jsonb,
    CONSTRAINT ck_gpus_state CHECK (state IN ('serving', 'drained', 'quarantined'))
);
COMMENT ON TABLE gpus IS 'A GPU that a host''s fleet uses, and its state.';
CREATE TABLE shares (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_shares PRIMARY KEY,
    producer text NOT NULL,
    resource text NOT NULL,
    priority text NOT NULL,
    seconds float8 NOT NULL DEFAULT 0,
    squares float8 NOT NULL DEFAULT 0,
    ended float8 NOT NULL DEFAULT 0,
    at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE shares IS 'A producer''s recent use of the devices, which decides the order of evaluations.';
CREATE TABLE sessions (
    digest text CONSTRAINT pk_sessions PRIMARY KEY,
    token_id uuid NOT NULL CONSTRAINT fk_sessions_token_id_tokens REFERENCES tokens (id) ON DELETE CASCADE,
    is_link boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now(),
    ends_at timestamptz NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE sessions IS 'A browser that is logged in with a token, or a link that logs one in.';
CREATE TABLE search_runs (
    id uuid CONSTRAINT pk_search_runs PRIMARY KEY,
    name text NOT NULL,
    plan jsonb NOT NULL,
    state text NOT NULL DEFAULT 'running',
    created_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    owner text NOT NULL DEFAULT kqueue_owner(),
    CONSTRAINT uq_search_runs_owner_name UNIQUE (owner, name),
    CONSTRAINT ck_search_runs_state CHECK (state IN ('running', 'stopped', 'done')),
    CONSTRAINT ck_search_runs_plan CHECK (jsonb_typeof(plan) = 'object'),
    CONSTRAINT ck_search_runs_name CHECK (name ~ '^[A-Za-z0-9][A-Za-z0-9._+-]{0,99}$')
);
COMMENT ON TABLE search_runs IS 'A search for a fast kernel in many steps.';
CREATE TABLE search_steps (
    run_id uuid NOT NULL
        CONSTRAINT fk_search_steps_run_id_search_runs REFERENCES search_runs (id) ON DELETE CASCADE,
    number integer NOT NULL,
    digest text,
    summary text,
    best integer,
    test jsonb,
    started_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    CONSTRAINT pk_search_steps PRIMARY KEY (run_id, number)
);
COMMENT ON TABLE search_steps IS 'A step of a search: some kernels are chosen, and proposals made from each.';
CREATE TABLE search_proposals (
    run_id uuid NOT NULL,
    number integer NOT NULL,
    step integer NOT NULL,
    parent integer,
    prompt text,
    answer text,
    kernel text,
    error text,
    evaluation_id uuid,
    category text,
    message text,
    runtime_ms float8,
    speedup float8,
    scores jsonb,
    feedback text,
    asked_at timestamptz,
    ended_at timestamptz,
    CONSTRAINT pk_search_proposals PRIMARY KEY (run_id, number),
    CONSTRAINT fk_search_proposals_run_id_step_search_steps
        FOREIGN KEY (run_id, step) REFERENCES search_steps (run_id, number) ON DELETE CASCADE
);
COMMENT ON TABLE search_proposals IS 'A kernel that was proposed in a search, and its result.';
CREATE TABLE probes (
    evaluation_id uuid CONSTRAINT pk_probes PRIMARY KEY,
    lane text NOT NULL,
    kind text NOT NULL,
    idea text NOT NULL,
    duration_ms float8,
    confirms boolean NOT NULL DEFAULT false,
    submitted_at timestamptz NOT NULL DEFAULT now(),
    settled_at timestamptz,
    finding text,
    words text,
    bias float8,
    judged_at timestamptz,
    worker text,
    host text,
    device text,
    spent boolean NOT NULL DEFAULT false,
    CONSTRAINT ck_probes_kind CHECK (kind IN ('honest', 'cheat', 'known_duration')),
    CONSTRAINT ck_probes_finding CHECK (finding IN (
        'agreed', 'void', 'cheat_accepted', 'cheat_mistaken', 'honest_refused', 'clock_short', 'clock_long',
        'clock_uneven'
    ))
);
COMMENT ON TABLE probes IS 'A probe of the fleet''s own judge: an evaluation with a known outcome, and its result.';
CREATE TABLE probe_lanes (
    lane text CONSTRAINT pk_probe_lanes PRIMARY KEY,
    ended float8 NOT NULL DEFAULT 0,
    due_after float8 NOT NULL,
    looked_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE probe_lanes IS 'The number of evaluations of a lane since its last probe.';
CREATE TABLE probe_pauses (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_probe_pauses PRIMARY KEY,
    host text NOT NULL,
    device text NOT NULL,
    finding text NOT NULL,
    reason text NOT NULL,
    probes uuid[] NOT NULL,
    doubted_since timestamptz,
    paused_at timestamptz NOT NULL DEFAULT now(),
    resumed_at timestamptz
);
COMMENT ON TABLE probe_pauses IS
    'A GPU, or a host''s CPU slots, that was taken out of service because probes were judged wrongly.';
CREATE TABLE logins (
    name text CONSTRAINT pk_logins PRIMARY KEY,
    owner text NOT NULL,
    limits jsonb NOT NULL DEFAULT '{}'
);
COMMENT ON TABLE logins IS 'A login of the database that submits for an owner.';
CREATE TABLE shared_problems (
    hash text NOT NULL,
    owner text NOT NULL DEFAULT kqueue_owner(),
    label text NOT NULL,
    source text NOT NULL,
    leaderboard boolean NOT NULL DEFAULT false,
    settings jsonb NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT ck_shared_problems_hash CHECK (hash = encode(sha256(convert_to(source, 'UTF8')), 'hex')),
    CONSTRAINT pk_shared_problems PRIMARY KEY (hash, owner)
);
COMMENT ON TABLE shared_problems IS 'A problem that its owner shares with all owners.';
CREATE TABLE callbacks (
    id uuid NOT NULL DEFAULT gen_random_uuid() CONSTRAINT pk_callbacks PRIMARY KEY,
    owner text NOT NULL DEFAULT kqueue_owner(),
    evaluation_id uuid CONSTRAINT uq_callbacks_evaluation_id UNIQUE
        CONSTRAINT fk_callbacks_evaluation_id_evaluations REFERENCES evaluations (id) ON DELETE CASCADE,
    batch text,
    url text NOT NULL,
    host text GENERATED ALWAYS AS (substring(url FROM '//(\[[^]]*\]|[^/:?#]*)')) STORED,
    attempts integer NOT NULL DEFAULT 0,
    next_at timestamptz,
    delivered_at timestamptz,
    error text,
    CONSTRAINT uq_callbacks_owner_batch UNIQUE (owner, batch),
    CONSTRAINT fk_callbacks_batch_owner_batches
        FOREIGN KEY (batch, owner) REFERENCES batches (name, owner) ON DELETE CASCADE
);
COMMENT ON TABLE callbacks IS 'A URL that gets the verdict of an evaluation, or the result of a batch.';
CREATE TABLE audit (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_audit PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    actor text NOT NULL,
    owner text,
    token_id uuid,
    action text NOT NULL,
    subject text NOT NULL
);
COMMENT ON TABLE audit IS
    'An entry of the audit log: who did what. Only the owner of the tables reads or removes entries.';
"""
#: The words of a text: letters and digits between ASCII punctuation. Later changes of
#: :data:`kqueue.store.models.words` need a new migration.
_WORDS: Final = (
    "to_tsvector('simple'::regconfig, translate(\"left\"({column}, 100000), "
    "'!\"#$%&''()*+,-./:;<=>?@[\\]^_`{{|}}~', '                                '))"
)
#: Some include the owner, so that policies need no other read.
_INDEXES: Final = """
CREATE INDEX ix_attempts_busy ON attempts (worker_id, id) WHERE ended_at IS NULL;
CREATE INDEX ix_attempts_payer ON attempts (payer, ended_at) WHERE payer IS NOT NULL;
CREATE INDEX ix_attempts_running ON attempts (lease_until) WHERE ended_at IS NULL;
CREATE INDEX ix_attempts_worker_id ON attempts (worker_id, id);
CREATE INDEX ix_audit_at ON audit (at);
CREATE INDEX ix_batches_last_at ON batches (last_at);
CREATE INDEX ix_callbacks_due ON callbacks (owner, next_at) WHERE next_at IS NOT NULL;
CREATE INDEX ix_callbacks_waiting ON callbacks (id) WHERE next_at IS NULL AND attempts = 0;
CREATE INDEX ix_evaluations_batch_open ON evaluations (batch, problem_hash) WHERE state <> 'done' AND batch IS NOT NULL;
CREATE INDEX ix_evaluations_batch_submitted_at ON evaluations (batch, submitted_at) WHERE batch IS NOT NULL;
CREATE INDEX ix_evaluations_expires_at ON evaluations (expires_at) WHERE state = 'queued';
CREATE INDEX ix_evaluations_kernel_hash_submitted_at ON evaluations (kernel_hash, submitted_at);
CREATE INDEX ix_evaluations_lane_state ON evaluations (lane, state);
CREATE INDEX ix_evaluations_open ON evaluations (state, available_at) WHERE state <> 'done';
CREATE INDEX ix_evaluations_owner_submitted_at ON evaluations (owner, submitted_at);
CREATE INDEX ix_evaluations_probe_kernel ON evaluations (kernel_hash) WHERE probe;
CREATE INDEX ix_evaluations_probe_problem ON evaluations (problem_hash) WHERE probe;
CREATE INDEX ix_evaluations_problem_hash_submitted_at ON evaluations (problem_hash, submitted_at)
    INCLUDE (kernel_hash, owner);
CREATE INDEX ix_evaluations_profiled ON evaluations (problem_hash) WHERE (settings -> 'examine' ->> 'profile') = 'true';
CREATE INDEX ix_evaluations_published ON evaluations (lane) WHERE state = 'queued' AND published_at IS NOT NULL;
CREATE INDEX ix_evaluations_queue ON evaluations (lane, priority, producer, submitted_at, id) WHERE state = 'queued';
CREATE INDEX ix_evaluations_session ON evaluations (session) WHERE session IS NOT NULL;
CREATE INDEX ix_evaluations_submitted_at ON evaluations (submitted_at);
CREATE INDEX ix_evaluations_token_open ON evaluations (token_id) WHERE state <> 'done';
CREATE INDEX ix_kernels_created_at ON kernels (created_at, hash);
CREATE INDEX ix_probe_pauses_open ON probe_pauses (host) WHERE resumed_at IS NULL;
CREATE INDEX ix_probes_open ON probes (lane) WHERE settled_at IS NULL;
CREATE INDEX ix_probes_settled_at ON probes (settled_at);
CREATE INDEX ix_problems_words ON problems USING gin ({words_source});
CREATE INDEX ix_search_proposals_run_id_step ON search_proposals (run_id, step);
CREATE INDEX ix_search_runs_created_at ON search_runs (created_at);
CREATE INDEX ix_sessions_ends_at ON sessions (ends_at);
CREATE INDEX ix_sessions_token_id ON sessions (token_id);
CREATE INDEX ix_summaries_batch ON summaries (batch, category, speedup DESC NULLS LAST, runtime_ms, evaluation_id)
    INCLUDE (problem_hash, finished_at, reused, owner) WHERE batch IS NOT NULL;
CREATE INDEX ix_summaries_kernel ON summaries (kernel_hash, problem_hash, runtime_ms, finished_at, evaluation_id)
    WHERE category = 'passed' AND NOT reused AND runtime_ms IS NOT NULL;
CREATE INDEX ix_summaries_problem
    ON summaries (problem_hash, category, speedup DESC NULLS LAST, runtime_ms, evaluation_id)
    INCLUDE (finished_at, reused, owner);
CREATE INDEX ix_verdicts_attempt_id ON verdicts (attempt_id);
CREATE INDEX ix_verdicts_category_finished_at ON verdicts (category, finished_at);
CREATE INDEX ix_verdicts_content ON verdicts (content, finished_at) WHERE content IS NOT NULL;
CREATE INDEX ix_verdicts_finished_at ON verdicts (finished_at);
CREATE INDEX ix_verdicts_whole ON verdicts (finished_at) WHERE NOT (evidence ? 'emptied_at');
CREATE INDEX ix_verdicts_words ON verdicts USING gin ({words_log}) WHERE log <> '';
CREATE INDEX ix_workers_alive ON workers (heartbeat_at) WHERE stopped_at IS NULL;
"""
#: The hash of the content of an evaluation ``e``. Evaluations of two owners or of two agents' sessions are never equal.
_CONTENT: Final = """encode(sha256(convert_to(
            CASE e.owner WHEN 'local' THEN '' ELSE e.owner || ' ' END || coalesce(e.session || ' ', '')
            || e.problem_hash || ' ' || e.kernel_hash || ' ' || e.settings::text, 'UTF8'
        )), 'hex')"""
#: Those with their owner's rights name all objects with their schema, so that no name resolves to a caller's object.
_FUNCTIONS: Final = """
-- The content is a hash of what the judge judged. kqueue_reuse searches for it. Sessions that notify after their
-- commits (kqueue.store.engine.notify) set kqueue.notifies. The version before does not.
CREATE FUNCTION {schema}.kqueue_conclude(verdict jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    given {schema}.verdicts := jsonb_populate_record(NULL::{schema}.verdicts, verdict);
BEGIN
    given.finished_at := now();
    given.content := NULL;
    SELECT e.owner INTO given.owner FROM {schema}.evaluations AS e WHERE e.id = given.evaluation_id;
    IF given.attempt_id IS NOT NULL
        AND (given.blame IN ('none', 'candidate') OR coalesce(given.facts ->> 'suspected', '') = 'true')
    THEN
        SELECT {content} INTO given.content FROM {schema}.evaluations AS e WHERE e.id = given.evaluation_id;
    END IF;
    INSERT INTO {schema}.verdicts VALUES (given.*) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        INSERT INTO {schema}.summaries
        SELECT given.evaluation_id, e.problem_hash, e.kernel_hash, e.batch, given.category, given.runtime_ms,
               given.speedup, given.reused_from IS NOT NULL, given.finished_at, e.owner
        FROM {schema}.evaluations AS e WHERE e.id = given.evaluation_id AND NOT e.probe;
    END IF;
    UPDATE {schema}.evaluations SET state = 'done' WHERE id = given.evaluation_id;
    PERFORM {schema}.kqueue_notify('kqueue_verdicts', given.evaluation_id::text)
    WHERE current_setting('kqueue.notifies', true) IS DISTINCT FROM 'after';
END
$$;
COMMENT ON FUNCTION kqueue_conclude IS
    'Writes the verdict of an evaluation that the caller has locked, unless there is one, and notifies.';
CREATE FUNCTION {schema}.kqueue_cancel(which uuid) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found_state text;
BEGIN
    SELECT e.state INTO found_state FROM {schema}.evaluations AS e
    WHERE e.id = which AND (
        {schema}.kqueue_sees_all() OR e.owner = {schema}.kqueue_owner()
        AND coalesce(e.session = {schema}.kqueue_session(), {schema}.kqueue_session() IS NULL)
    ) FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF found_state = 'done' THEN
        RETURN false;
    END IF;
    PERFORM {schema}.kqueue_conclude(jsonb_build_object(
        'evaluation_id', which, 'category', 'cancelled', 'blame', 'nobody', 'written_by', 'client',
        'message', 'the producer cancelled the evaluation', 'log', '', 'facts', '{{}}'::jsonb, 'evidence', '{{}}'::jsonb
    ));
    RETURN true;
END
$$;
COMMENT ON FUNCTION kqueue_cancel IS
    'Ends an evaluation as cancelled. Returns false if it had its verdict, null if it does not exist.';
-- It examines the last 32 judged evaluations of each content. All of them that were judged under today's conditions
-- must agree. The limits make the planner use the indexes, one step for each evaluation, however many were judged.
-- So one plan suits all calls, and planning at each call would take longer than the search. It selects rows by id
-- alone, because the planner would scan all queued evaluations if there were none at the last ANALYZE. Producers can
-- call it, so it trusts no argument but hashes the contents of the evaluations' rows.
CREATE FUNCTION {schema}.kqueue_reuse(which uuid[], live_s double precision) RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    equal record;
    waits boolean;
    earlier jsonb;
BEGIN
    FOR equal IN
        WITH serving AS MATERIALIZED (
            SELECT DISTINCT lane, w.fingerprint
            FROM {schema}.workers AS w CROSS JOIN LATERAL unnest(w.lanes) AS lane
            WHERE w.stopped_at IS NULL AND w.paused IS NULL AND w.fingerprint IS NOT NULL
              AND w.heartbeat_at >= now() - make_interval(secs => live_s)
        ), asked AS MATERIALIZED (
            SELECT e.id, e.lane, {content} AS content
            FROM unnest(which) AS given (id) CROSS JOIN LATERAL (
                SELECT * FROM {schema}.evaluations AS one WHERE one.id = given.id LIMIT 1
            ) AS e
            WHERE ({schema}.kqueue_sees_all() OR e.owner = {schema}.kqueue_owner())
              AND e.reuse AND e.state = 'queued' AND e.attempts = 0
              AND (e.expires_at IS NULL OR e.expires_at > now()) AND e.lane IN (SELECT lane FROM serving)
        ), judged AS (
            SELECT c.content, last.*
            FROM (SELECT DISTINCT content FROM asked) AS c CROSS JOIN LATERAL (
                SELECT v.evaluation_id, v.category, v.finished_at, a.environment_hash,
                       coalesce(a.fingerprint, w.fingerprint) AS fingerprint,
                       v.reusable IS TRUE AND NOT EXISTS (
                           SELECT FROM {schema}.gpus AS g
                           WHERE g.uuid = w.device AND (g.state = 'quarantined' OR v.finished_at < g.since)
                       ) AS sound
                FROM {schema}.verdicts AS v
                JOIN {schema}.attempts AS a ON a.id = v.attempt_id
                JOIN {schema}.workers AS w ON w.id = a.worker_id
                WHERE v.content = c.content
                ORDER BY v.finished_at DESC LIMIT 32
            ) AS last
        ), agreed AS (
            SELECT content, fingerprint, max(finished_at) FILTER (WHERE sound) AS finished_at,
                   (array_agg(evaluation_id ORDER BY finished_at DESC) FILTER (WHERE sound))[1] AS original,
                   (array_agg(environment_hash ORDER BY finished_at DESC) FILTER (WHERE sound))[1] AS environment_hash
            FROM judged GROUP BY content, fingerprint
            HAVING bool_or(sound) AND count(DISTINCT category) = 1
        )
        SELECT DISTINCT ON (asked.id) asked.id, agreed.original, agreed.environment_hash
        FROM asked
        JOIN agreed ON agreed.content = asked.content
        JOIN serving ON serving.lane = asked.lane AND serving.fingerprint = agreed.fingerprint
        ORDER BY asked.id, agreed.finished_at DESC
    LOOP
        SELECT e.state = 'queued' AND e.attempts = 0 INTO waits
        FROM {schema}.evaluations AS e WHERE e.id = equal.id FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN waits IS NOT TRUE;
        SELECT to_jsonb(v) INTO earlier FROM {schema}.verdicts AS v WHERE v.evaluation_id = equal.original;
        CONTINUE WHEN NOT FOUND OR earlier -> 'evidence' ? 'emptied_at';
        PERFORM {schema}.kqueue_conclude(earlier || jsonb_build_object(
            'evaluation_id', equal.id, 'attempt_id', NULL, 'reusable', NULL, 'written_by', 'database',
            'reused_from', equal.original, 'judged_at', earlier -> 'finished_at',
            'environment_hash', equal.environment_hash
        ));
        RETURN NEXT equal.id;
    END LOOP;
END
$$;
COMMENT ON FUNCTION kqueue_reuse IS
    'Ends queued evaluations with verdicts of equal ones that were judged, and returns them. '
    'A worker counts as live for live_s seconds after its last heartbeat.';
-- For a verdict that an operator changes by hand. Retention does not change these columns.
CREATE FUNCTION {schema}.kqueue_correct() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE {schema}.summaries
    SET category = NEW.category, runtime_ms = NEW.runtime_ms, speedup = NEW.speedup,
        reused = NEW.reused_from IS NOT NULL, finished_at = NEW.finished_at
    WHERE evaluation_id = NEW.evaluation_id;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION kqueue_correct IS 'Changes the summary of a verdict that is changed.';
-- A sweeper has no right to write sources and evaluations. The function hashes the sources itself. A kernel's hash
-- covers its backend, a zero byte and its source.
CREATE FUNCTION {schema}.kqueue_probe(probe jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    problem text := encode(sha256(convert_to(probe ->> 'problem', 'UTF8')), 'hex');
    kernel text := encode(sha256(
        convert_to(probe ->> 'backend', 'UTF8') || decode('00', 'hex') || convert_to(probe ->> 'kernel', 'UTF8')
    ), 'hex');
BEGIN
    -- Whose it is does not come from the caller: a producer like others where turns are taken, whom nothing is charged.
    INSERT INTO {schema}.problems (hash, owner, source) VALUES (problem, 'kqueue''s probes', probe ->> 'problem')
    ON CONFLICT DO NOTHING;
    INSERT INTO {schema}.kernels (hash, owner, backend, source)
    VALUES (kernel, 'kqueue''s probes', probe ->> 'backend', probe ->> 'kernel')
    ON CONFLICT DO NOTHING;
    INSERT INTO {schema}.evaluations (owner, id, problem_hash, kernel_hash, lane, settings, expires_at, producer, probe)
    VALUES (
        'kqueue''s probes', (probe ->> 'id')::uuid, problem, kernel, probe ->> 'lane', probe -> 'settings',
        now() + make_interval(secs => (probe ->> 'queue_wait_s')::float8), 'kqueue''s probes', true
    );
    INSERT INTO {schema}.probes (evaluation_id, lane, kind, idea, duration_ms, confirms)
    VALUES (
        (probe ->> 'id')::uuid, probe ->> 'lane', probe ->> 'kind', probe ->> 'idea', (probe ->> 'duration_ms')::float8,
        (probe ->> 'confirms')::boolean
    );
END
$$;
COMMENT ON FUNCTION kqueue_probe IS 'Submits a probe of the fleet''s own judge.';
-- Its callers see their own evaluations only, but a lane's window counts the evaluations of all owners. For producers'
-- logins it counts only the ones of their owner, unless the tables belong to a superuser.
CREATE FUNCTION {schema}.kqueue_waiting(of_lane text, most integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    sees text := current_setting('kqueue.sees', true);
    number integer;
BEGIN
    PERFORM set_config('kqueue.sees', 'all', true);
    -- This order is the index's. Without it the planner can prefer to read the whole table.
    SELECT count(*) INTO number FROM (
        SELECT FROM {schema}.evaluations AS e WHERE e.state = 'queued' AND e.lane = of_lane
        ORDER BY e.priority, e.producer, e.submitted_at, e.id LIMIT most
    ) AS few;
    PERFORM set_config('kqueue.sees', coalesce(sees, ''), true);
    RETURN number;
END
$$;
COMMENT ON FUNCTION kqueue_waiting IS 'The number of queued evaluations of a lane, at most the given number.';
CREATE FUNCTION {schema}.kqueue_rules(settings jsonb, usual jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(jsonb_object_agg(key, value), '{{}}') FROM jsonb_each(
        coalesce(settings -> 'timing', '{{}}') || coalesce(settings -> 'policies', '{{}}') || settings
    ) WHERE usual -> key <> value AND value <> '"reject"'
$$;
COMMENT ON FUNCTION kqueue_rules IS 'As kqueue.contract.rules_of: the settings with other values than usual.';
-- As in kqueue.store.reports.boards: a program counts by its median measurement. Of an owner's programs the one with
-- the largest lower bound counts, so that their number stays hidden. The bound's error is 5 % divided by that number.
CREATE FUNCTION {schema}.kqueue_board(of_problem text, most integer, usual jsonb DEFAULT '{{}}') RETURNS TABLE (
    rank bigint, owner text, "precision" text, device text, runtime_ms double precision, baseline_ms double precision,
    speedup double precision, speedup_low double precision, measured bigint, settings jsonb
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    sees text := current_setting('kqueue.sees', true);
BEGIN
    PERFORM set_config('kqueue.sees', 'all', true);
    RETURN QUERY
    WITH taking_part AS (
        SELECT p.owner, {schema}.kqueue_rules(s.settings, usual) AS fixed FROM {schema}.problems AS p
        JOIN {schema}.shared_problems AS s ON s.hash = p.hash AND s.owner = coalesce(p.shared_from, p.owner)
        WHERE p.hash = of_problem AND s.leaderboard
    ), every AS (
        SELECT e.owner, e.settings ->> 'precision' AS "precision", n.device, m.runtime_ms, v.baseline_ms, m.speedup,
               t.fixed, r.rules, sqrt(
                   power((v.runtime ->> 'high_ms')::float8 / nullif((v.runtime ->> 'median_ms')::float8, 0) - 1, 2)
                   + power((v.baseline ->> 'high_ms')::float8 / nullif((v.baseline ->> 'median_ms')::float8, 0) - 1, 2)
               ) AS error,
               count(*) OVER alike AS measured,
               row_number() OVER (alike ORDER BY m.speedup NULLS FIRST, m.runtime_ms DESC, m.evaluation_id) AS place
        FROM {schema}.summaries AS m
        JOIN taking_part AS t ON t.owner = m.owner
        JOIN {schema}.evaluations AS e ON e.id = m.evaluation_id
        JOIN {schema}.verdicts AS v ON v.evaluation_id = m.evaluation_id
        JOIN {schema}.attempts AS a ON a.id = v.attempt_id
        LEFT JOIN {schema}.environments AS n ON n.hash = a.environment_hash
        CROSS JOIN LATERAL {schema}.kqueue_rules(e.settings, usual) AS r (rules)
        WHERE m.problem_hash = of_problem AND e.settings -> 'timing' ->> 'purpose' IS DISTINCT FROM 'train'
          AND m.category = 'passed' AND NOT m.reused AND m.runtime_ms IS NOT NULL
        WINDOW alike AS (PARTITION BY e.owner, e.settings ->> 'precision', n.device, r.rules,
                         coalesce(v.evidence ->> 'program', e.kernel_hash))
    ), programs AS (
        SELECT *, speedup / (1 + error * sqrt(1 + 0.52 * ln(count(*) OVER mine))) AS low FROM every
        WHERE place = (measured + 1) / 2 WINDOW mine AS (PARTITION BY owner, "precision", device, rules)
    ), best AS (
        SELECT DISTINCT ON (owner, "precision", device, rules) * FROM programs
        ORDER BY owner, "precision", device, rules, low DESC NULLS LAST, speedup DESC NULLS LAST, runtime_ms
    )
    SELECT CASE WHEN rules = fixed THEN rank() OVER (PARTITION BY "precision", device, rules = fixed
               ORDER BY low DESC NULLS LAST, speedup DESC NULLS LAST, runtime_ms) END,
           owner, "precision", device, runtime_ms, baseline_ms, speedup, low, measured, rules
    FROM best ORDER BY "precision", device, 1 NULLS LAST, owner, rules LIMIT most;
    PERFORM set_config('kqueue.sees', coalesce(sees, ''), true);
END
$$;
COMMENT ON FUNCTION kqueue_board IS
    'The fastest kernels of the owners that judge against a shared problem with a leaderboard.';
CREATE FUNCTION {schema}.kqueue_notify(channel text, payload text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_notify(channel, payload) WHERE pg_notification_queue_usage() < 0.5;
END $$;
COMMENT ON FUNCTION kqueue_notify IS 'Notifies, unless the queue of notifications is half full.';
-- An owner without superuser's rights needs pg_signal_backend and pg_read_all_stats. The number is the first half of
-- the fleet's advisory locks.
CREATE FUNCTION {schema}.kqueue_relieve() RETURNS TABLE (login name, reason text, ended boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
END $$;
COMMENT ON FUNCTION kqueue_relieve IS 'Ends and returns sessions of producers'' logins that stop others.';
CREATE FUNCTION {schema}.kqueue_unshare(which text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM {schema}.shared_problems WHERE hash = which AND owner = {schema}.kqueue_owner();
    RETURN FOUND;
END $$;
COMMENT ON FUNCTION kqueue_unshare IS 'Stops sharing a problem of the session''s owner, or returns false.';
CREATE FUNCTION {schema}.kqueue_fits(settings jsonb, forms jsonb) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
END $$;
COMMENT ON FUNCTION kqueue_fits IS 'True if settings fit the forms and the login''s limits, or an error.';
CREATE TRIGGER kqueue_correct AFTER UPDATE OF category, runtime_ms, speedup, reused_from, finished_at ON verdicts
FOR EACH ROW EXECUTE FUNCTION kqueue_correct();
"""
#: Half of the interval of a measurement ``of``, relative to its median.
_ERROR: Final = """
        ((of ->> 'high_ms')::float8 - (of ->> 'low_ms')::float8) / 2 / nullif((of ->> 'median_ms')::float8, 0)
    """
_VIEWS: Final = """
CREATE VIEW evaluation_overview WITH (security_invoker = true) AS
    SELECT
        e.id, e.batch, e.problem_label, e.problem_hash, e.kernel_label, e.kernel_hash, k.backend, e.lane,
        e.settings ->> 'precision' AS precision,
        e.state, e.attempts, v.category, v.blame, v.compiled, v.correctness, v.phase, v.message,
        v.runtime_ms, v.baseline_ms, v.speedup, v.written_by,
        n.device, n.host, n.driver, n.cuda, n.torch, n.triton,
        w.name AS worker,
        e.submitted_at, first.started_at AS first_started_at, v.finished_at,
        extract(epoch FROM first.started_at - e.submitted_at)::double precision AS queued_s,
        extract(epoch FROM v.finished_at - e.submitted_at)::double precision AS total_s,
        v.reused_from, e.owner
    FROM evaluations AS e
    JOIN kernels AS k ON k.hash = e.kernel_hash AND k.owner = e.owner
    LEFT JOIN verdicts AS v ON v.evaluation_id = e.id
    LEFT JOIN attempts AS first ON first.evaluation_id = e.id AND first.number = 1
    LEFT JOIN attempts AS last ON last.evaluation_id = e.id AND last.number = e.attempts
    LEFT JOIN workers AS w ON w.id = last.worker_id
    LEFT JOIN environments AS n ON n.hash = coalesce(last.environment_hash, v.environment_hash)
    WHERE NOT e.probe;
COMMENT ON VIEW evaluation_overview IS 'One wide row for each evaluation: its request, state, outcome and environment.';
CREATE VIEW outcomes WITH (security_invoker = true) AS
    SELECT
        (v.finished_at AT TIME ZONE 'UTC')::date AS day, e.lane, k.backend, v.category, v.blame,
        count(*) AS evaluations
    FROM verdicts AS v
    JOIN evaluations AS e ON e.id = v.evaluation_id
    JOIN kernels AS k ON k.hash = e.kernel_hash AND k.owner = e.owner
    WHERE NOT e.probe
    GROUP BY day, e.lane, k.backend, v.category, v.blame;
COMMENT ON VIEW outcomes IS
    'How many evaluations ended in each category, by UTC day, lane and backend, and whose failure it was.';
-- As in kqueue.store.reports.boards: of an even number of measurements the slower of the two in the middle counts.
CREATE VIEW best_verdicts WITH (security_invoker = true) AS
    SELECT DISTINCT ON (problem_hash, precision, device)
        problem_hash, problem_label, precision, device, kernel_hash, kernel_label, backend, runtime_ms, baseline_ms,
        speedup, evaluation_id, finished_at, speedup / factor AS speedup_low, speedup * factor AS speedup_high,
        measured
    FROM (
        SELECT
            e.problem_hash, e.problem_label, e.settings ->> 'precision' AS precision, n.device, e.kernel_hash,
            e.kernel_label, k.backend, v.runtime_ms, v.baseline_ms, v.speedup, v.evaluation_id, v.finished_at,
            1 + sqrt(power(m.error, 2) + power(b.error, 2)) AS factor,
            count(*) OVER alike AS measured,
            row_number() OVER (alike ORDER BY v.speedup NULLS FIRST, v.runtime_ms DESC, v.evaluation_id) AS place
        FROM verdicts AS v
        JOIN evaluations AS e ON e.id = v.evaluation_id
        JOIN kernels AS k ON k.hash = e.kernel_hash AND k.owner = e.owner
        JOIN attempts AS a ON a.id = v.attempt_id
        LEFT JOIN environments AS n ON n.hash = a.environment_hash,
        LATERAL (SELECT {error} FROM (SELECT v.runtime AS of) AS one) AS m (error),
        LATERAL (SELECT {error} FROM (SELECT v.baseline AS of) AS one) AS b (error)
        WHERE NOT e.probe AND v.category = 'passed' AND v.runtime_ms IS NOT NULL AND v.reused_from IS NULL
            AND v.runtime ->> 'purpose' IS DISTINCT FROM 'train'
            AND {schema}.kqueue_rules(e.settings, '{usual}') = '{{}}'
            AND coalesce(e.batch !~ '^(autopsy|duel|tune)-' AND e.batch NOT IN (
                SELECT name FROM search_runs WHERE plan ->> 'algorithm' IN ('tune', 'tournament')), true)
        WINDOW alike AS (PARTITION BY e.problem_hash, e.kernel_hash, e.settings ->> 'precision', n.device)
    ) AS every
    WHERE place = (measured + 1) / 2
    ORDER BY problem_hash, precision, device, speedup DESC NULLS LAST, runtime_ms, evaluation_id;
COMMENT ON VIEW best_verdicts IS
    'The kernel with the best median for each problem, precision, device, of those judged by the usual rules.';
CREATE VIEW fleet_utilisation WITH (security_invoker = true) AS
    SELECT
        w.id, w.name, w.host, w.device, w.lanes,
        w.stopped_at IS NULL AND w.heartbeat_at > now() - interval '60 seconds' AS alive,
        coalesce(done.busy_s, 0) / greatest(
            extract(epoch FROM
                coalesce(w.stopped_at, now()) - greatest(w.started_at, now() - interval '1 hour')
            )::double precision,
            0.001
        ) AS busy_share,
        coalesce(done.evaluations, 0) AS evaluations,
        done.current_evaluation,
        w.started_at, w.heartbeat_at, w.stopped_at
    FROM workers AS w
    LEFT JOIN LATERAL (
        SELECT
            sum(extract(epoch FROM
                least(coalesce(a.ended_at, a.lease_until), now())
                - greatest(a.started_at, now() - interval '1 hour')
            ))::double precision AS busy_s,
            count(a.ended_at) AS evaluations,
            (array_agg(a.evaluation_id ORDER BY a.id DESC) FILTER (WHERE a.ended_at IS NULL))[1]
                AS current_evaluation
        FROM attempts AS a
        WHERE a.worker_id = w.id AND coalesce(a.ended_at, a.lease_until) > now() - interval '1 hour'
    ) AS done ON true
    WHERE coalesce(w.stopped_at, w.heartbeat_at) > now() - interval '1 hour';
COMMENT ON VIEW fleet_utilisation IS
    'Each worker that lived within the last hour: whether it lives, and how busy it was in that hour.';
"""


def upgrade() -> None:
    """Create everything. :func:`kqueue.store.roles.apply` adds the policies, which name roles, and grants rights."""
    schema = op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))
    op.execute(_SESSION.format(schema=schema))
    op.execute(_TABLES)
    op.execute(_INDEXES.format(**{f"words_{column}": _WORDS.format(column=column) for column in ("source", "log")}))
    op.execute(_FUNCTIONS.format(schema=schema, content=_CONTENT))
    op.execute(_VIEWS.format(schema=schema, error=_ERROR, usual=json.dumps(RULES)))
    # Only the owner can call them until roles are granted the right.
    op.execute(f"REVOKE ALL ON FUNCTION {_created('FUNCTION')} FROM PUBLIC")


def downgrade() -> None:
    """Drop everything. The roles stay, because other databases can use them."""
    # One statement for each kind, because policies of tables name other tables.
    for kind in ("VIEW", "TABLE", "FUNCTION"):
        op.execute(f"DROP {kind} {_created(kind)}")
    for role in ("kqueue_producer", "kqueue_worker", "kqueue_gateway", "kqueue_tenant", "kqueue_reader"):
        if op.get_bind().scalar(sa.text("SELECT to_regrole(:role)"), {"role": role}) is not None:
            op.execute(f"REVOKE ALL ON alembic_version FROM {role}")


def _created(kind: str) -> str:
    """Return the names of all objects of a kind, separated by commas."""
    statements = _SESSION + _TABLES + _FUNCTIONS + _VIEWS
    return ", ".join(re.findall(rf"^CREATE {kind} (?:{{schema}}\.)?(\w+)", statements, re.MULTILINE))
