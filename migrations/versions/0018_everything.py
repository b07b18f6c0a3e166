"""All tables, indexes, functions and views."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = None
branch_labels = None
depends_on = None

#: Tables by name, in the order of their foreign keys, with their comments and columns.
_TABLES: Final = {
    "environments": (
        "The facts on which times depend, identified by their hash.",
        """
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
        """,
    ),
    "kernels": (
        "A candidate's source and backend, identified by the hash of both.",
        """
        hash text CONSTRAINT pk_kernels PRIMARY KEY,
        backend text NOT NULL,
        source text NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now()
        """,
    ),
    "problems": (
        "A reference, identified by the hash of its source.",
        """
        hash text CONSTRAINT pk_problems PRIMARY KEY,
        source text NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now()
        """,
    ),
    "workers": (
        "A slot's worker process, one row for each start.",
        """
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
        """,
    ),
    "baselines": (
        "The reference's own time in one environment, cached.",
        """
        problem_hash text NOT NULL CONSTRAINT fk_baselines_problem_hash_problems REFERENCES problems (hash),
        environment_hash text NOT NULL,
        settings_key text NOT NULL,
        measurement jsonb NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        CONSTRAINT pk_baselines PRIMARY KEY (problem_hash, environment_hash, settings_key),
        CONSTRAINT fk_baselines_environment_hash_environments
            FOREIGN KEY (environment_hash) REFERENCES environments (hash)
        """,
    ),
    "tokens": (
        "A credential for the HTTP server, and the rights of its holder.",
        """
        id uuid CONSTRAINT pk_tokens PRIMARY KEY,
        name text NOT NULL,
        digest text NOT NULL CONSTRAINT uq_tokens_digest UNIQUE,
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
        CONSTRAINT ck_tokens_budget_then CHECK (budget_then IN ('refuse', 'lower')),
        CONSTRAINT ck_tokens_budget
            CHECK ((budget_s IS NULL) = (budget_window_s IS NULL) AND (budget_s IS NULL) = (budget_then IS NULL))
        """,
    ),
    "evaluations": (
        "One request to judge one kernel against one problem.",
        """
        id uuid CONSTRAINT pk_evaluations PRIMARY KEY,
        problem_hash text NOT NULL CONSTRAINT fk_evaluations_problem_hash_problems REFERENCES problems (hash),
        kernel_hash text NOT NULL CONSTRAINT fk_evaluations_kernel_hash_kernels REFERENCES kernels (hash),
        problem_label text,
        kernel_label text,
        lane text NOT NULL,
        settings jsonb NOT NULL,
        batch text,
        idempotency_key text CONSTRAINT uq_evaluations_idempotency_key UNIQUE,
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
        CONSTRAINT ck_evaluations_state CHECK (state IN ('queued', 'running', 'done')),
        CONSTRAINT ck_evaluations_priority CHECK (priority IN ('interactive', 'batch', 'idle'))
        """,
    ),
    "attempts": (
        "One execution of an evaluation by one worker.",
        """
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
        """,
    ),
    "verdicts": (
        "The one final outcome of an evaluation.",
        """
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
        environment_hash text CONSTRAINT fk_verdicts_environment_hash_environments REFERENCES environments (hash)
        """,
    ),
    "summaries": (
        "The columns of a verdict by which pages sum and sort, one narrow row each, without probes.",
        """
        evaluation_id uuid CONSTRAINT pk_summaries PRIMARY KEY
            CONSTRAINT fk_summaries_evaluation_id_verdicts REFERENCES verdicts (evaluation_id) ON DELETE CASCADE,
        problem_hash text NOT NULL,
        kernel_hash text NOT NULL,
        batch text,
        category text NOT NULL,
        runtime_ms float8,
        speedup float8,
        reused boolean NOT NULL,
        finished_at timestamptz NOT NULL
        """,
    ),
    "batches": (
        "A batch, and the time of its last submission within a second.",
        """
        name text CONSTRAINT pk_batches PRIMARY KEY,
        last_at timestamptz NOT NULL
        """,
    ),
    "gpus": (
        "A GPU that a host's fleet uses, and its state.",
        """
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
        """,
    ),
    "shares": (
        "A producer's recent use of the devices, which decides the order of evaluations.",
        """
        id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_shares PRIMARY KEY,
        producer text NOT NULL,
        resource text NOT NULL,
        priority text NOT NULL,
        seconds float8 NOT NULL DEFAULT 0,
        squares float8 NOT NULL DEFAULT 0,
        ended float8 NOT NULL DEFAULT 0,
        at timestamptz NOT NULL DEFAULT now()
        """,
    ),
    "sessions": (
        "A browser that is logged in with a token, or a link that logs one in.",
        """
        digest text CONSTRAINT pk_sessions PRIMARY KEY,
        token_id uuid NOT NULL CONSTRAINT fk_sessions_token_id_tokens REFERENCES tokens (id) ON DELETE CASCADE,
        is_link boolean NOT NULL DEFAULT false,
        created_at timestamptz NOT NULL DEFAULT now(),
        ends_at timestamptz NOT NULL
        """,
    ),
    "search_runs": (
        "A search for a fast kernel in many steps.",
        """
        id uuid CONSTRAINT pk_search_runs PRIMARY KEY,
        name text NOT NULL CONSTRAINT uq_search_runs_name UNIQUE,
        plan jsonb NOT NULL,
        state text NOT NULL DEFAULT 'running',
        created_at timestamptz NOT NULL DEFAULT now(),
        ended_at timestamptz,
        CONSTRAINT ck_search_runs_state CHECK (state IN ('running', 'stopped', 'done')),
        CONSTRAINT ck_search_runs_plan CHECK (jsonb_typeof(plan) = 'object'),
        CONSTRAINT ck_search_runs_name CHECK (name ~ '^[A-Za-z0-9][A-Za-z0-9._+-]{0,99}$')
        """,
    ),
    "search_steps": (
        "A step of a search: some kernels are chosen, and proposals made from each.",
        """
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
        """,
    ),
    "search_proposals": (
        "A kernel that was proposed in a search, and its result.",
        """
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
        """,
    ),
    "probes": (
        "A probe of the fleet's own judge: an evaluation with a known outcome, and its result.",
        """
        evaluation_id uuid CONSTRAINT pk_probes PRIMARY KEY,
        lane text NOT NULL,
        kind text NOT NULL,
        idea text NOT NULL,
        spin_ms float8,
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
        CONSTRAINT ck_probes_kind CHECK (kind IN ('honest', 'cheat', 'spin')),
        CONSTRAINT ck_probes_finding CHECK (finding IN (
            'agreed', 'void', 'cheat_accepted', 'cheat_mistaken', 'honest_refused', 'clock_short', 'clock_long',
            'clock_uneven'
        ))
        """,
    ),
    "probe_lanes": (
        "The number of evaluations of a lane since its last probe.",
        """
        lane text CONSTRAINT pk_probe_lanes PRIMARY KEY,
        ended float8 NOT NULL DEFAULT 0,
        due_after float8 NOT NULL,
        looked_at timestamptz NOT NULL DEFAULT now()
        """,
    ),
    "probe_pauses": (
        "A GPU, or a host's CPU slots, that was taken out of service because probes were judged wrongly.",
        """
        id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_probe_pauses PRIMARY KEY,
        host text NOT NULL,
        device text NOT NULL,
        finding text NOT NULL,
        reason text NOT NULL,
        probes uuid[] NOT NULL,
        doubted_since timestamptz,
        paused_at timestamptz NOT NULL DEFAULT now(),
        resumed_at timestamptz
        """,
    ),
}
#: The words of a text: letters and digits between ASCII punctuation. Later changes of
#: :data:`kqueue.store.models.words` need a new migration.
_WORDS: Final = (
    "to_tsvector('simple'::regconfig, translate(\"left\"({column}, 100000), "
    "'!\"#$%&''()*+,-./:;<=>?@[\\]^_`{{|}}~', '                                '))"
)
_INDEXES: Final = {
    "ix_attempts_busy": "attempts (worker_id, id) WHERE ended_at IS NULL",
    "ix_attempts_payer": "attempts (payer, ended_at) WHERE payer IS NOT NULL",
    "ix_attempts_running": "attempts (lease_until) WHERE ended_at IS NULL",
    "ix_attempts_worker_id": "attempts (worker_id, id)",
    "ix_batches_last_at": "batches (last_at)",
    "ix_evaluations_batch_open": "evaluations (batch, problem_hash) WHERE state <> 'done' AND batch IS NOT NULL",
    "ix_evaluations_batch_submitted_at": "evaluations (batch, submitted_at) WHERE batch IS NOT NULL",
    "ix_evaluations_expires_at": "evaluations (expires_at) WHERE state = 'queued'",
    "ix_evaluations_kernel_hash_submitted_at": "evaluations (kernel_hash, submitted_at)",
    "ix_evaluations_lane_state": "evaluations (lane, state)",
    "ix_evaluations_open": "evaluations (state, available_at) WHERE state <> 'done'",
    "ix_evaluations_probe_kernel": "evaluations (kernel_hash) WHERE probe",
    "ix_evaluations_probe_problem": "evaluations (problem_hash) WHERE probe",
    "ix_evaluations_problem_hash_submitted_at": "evaluations (problem_hash, submitted_at) INCLUDE (kernel_hash)",
    "ix_evaluations_profiled": "evaluations (problem_hash) WHERE (settings -> 'examine' ->> 'profile') = 'true'",
    "ix_evaluations_published": "evaluations (lane) WHERE state = 'queued' AND published_at IS NOT NULL",
    "ix_evaluations_queue": "evaluations (lane, priority, producer, submitted_at, id) WHERE state = 'queued'",
    "ix_evaluations_submitted_at": "evaluations (submitted_at)",
    "ix_evaluations_token_open": "evaluations (token_id) WHERE state <> 'done'",
    "ix_kernels_created_at": "kernels (created_at, hash)",
    "ix_probe_pauses_open": "probe_pauses (host) WHERE resumed_at IS NULL",
    "ix_probes_open": "probes (lane) WHERE settled_at IS NULL",
    "ix_probes_settled_at": "probes (settled_at)",
    "ix_problems_words": f"problems USING gin ({_WORDS.format(column='source')})",
    "ix_search_proposals_run_id_step": "search_proposals (run_id, step)",
    "ix_search_runs_created_at": "search_runs (created_at)",
    "ix_sessions_ends_at": "sessions (ends_at)",
    "ix_sessions_token_id": "sessions (token_id)",
    "ix_summaries_batch": (
        "summaries (batch, category, speedup DESC NULLS LAST, runtime_ms, evaluation_id) "
        "INCLUDE (problem_hash, finished_at, reused) WHERE batch IS NOT NULL"
    ),
    "ix_summaries_kernel": (
        "summaries (kernel_hash, problem_hash, runtime_ms, finished_at, evaluation_id) "
        "WHERE category = 'passed' AND NOT reused AND runtime_ms IS NOT NULL"
    ),
    "ix_summaries_problem": (
        "summaries (problem_hash, category, speedup DESC NULLS LAST, runtime_ms, evaluation_id) "
        "INCLUDE (finished_at, reused)"
    ),
    "ix_verdicts_attempt_id": "verdicts (attempt_id)",
    "ix_verdicts_category_finished_at": "verdicts (category, finished_at)",
    "ix_verdicts_content": "verdicts (content, finished_at) WHERE content IS NOT NULL",
    "ix_verdicts_finished_at": "verdicts (finished_at)",
    "ix_verdicts_whole": "verdicts (finished_at) WHERE NOT (evidence ? 'emptied_at')",
    "ix_verdicts_words": f"verdicts USING gin ({_WORDS.format(column='log')}) WHERE log <> ''",
    "ix_workers_alive": "workers (heartbeat_at) WHERE stopped_at IS NULL",
}
#: The hash of the content of an evaluation ``e``.
CONTENT: Final = (
    "encode(sha256(convert_to(e.problem_hash || ' ' || e.kernel_hash || ' ' || e.settings::text, 'UTF8')), 'hex')"
)
#: Functions by name, with their comments and definitions. They run with their owner's rights, so their names must not
#: resolve to objects of a caller. Only the owner can call them until roles are granted the right.
FUNCTIONS: Final = {
    # The content is a hash of what the judge judged. kqueue_reuse searches for it.
    "kqueue_conclude": (
        "Writes the verdict of an evaluation that the caller has locked, unless there is one, and notifies.",
        """
CREATE FUNCTION {schema}.kqueue_conclude(verdict jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    given {schema}.verdicts := jsonb_populate_record(NULL::{schema}.verdicts, verdict);
BEGIN
    given.finished_at := now();
    given.content := NULL;
    IF given.attempt_id IS NOT NULL
        AND (given.blame IN ('none', 'candidate') OR coalesce(given.facts ->> 'suspected', '') = 'true')
    THEN
        SELECT {content} INTO given.content FROM {schema}.evaluations AS e WHERE e.id = given.evaluation_id;
    END IF;
    INSERT INTO {schema}.verdicts VALUES (given.*) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        INSERT INTO {schema}.summaries
        SELECT given.evaluation_id, e.problem_hash, e.kernel_hash, e.batch, given.category, given.runtime_ms,
               given.speedup, given.reused_from IS NOT NULL, given.finished_at
        FROM {schema}.evaluations AS e WHERE e.id = given.evaluation_id AND NOT e.probe;
    END IF;
    UPDATE {schema}.evaluations SET state = 'done' WHERE id = given.evaluation_id;
    PERFORM pg_notify('kqueue_verdicts', given.evaluation_id::text);
END
$$
""",
    ),
    "kqueue_cancel": (
        "Ends an evaluation as cancelled. Returns false if it had its verdict, null if it does not exist.",
        """
CREATE FUNCTION {schema}.kqueue_cancel(which uuid) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found_state text;
BEGIN
    SELECT e.state INTO found_state FROM {schema}.evaluations AS e WHERE e.id = which FOR UPDATE;
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
$$
""",
    ),
    # It examines the last 32 judged evaluations of each content. All of them that were judged under today's conditions
    # must agree. The limits make the planner use the indexes, one step for each evaluation, however many were judged.
    # So one plan suits all calls, and planning at each call would take longer than the search. It selects rows by id
    # alone, because the planner would scan all queued evaluations if there were none at the last ANALYZE. Producers can
    # call it, so it trusts no argument but hashes the contents of the evaluations' rows.
    "kqueue_reuse": (
        (
            "Ends queued evaluations with verdicts of equal ones that were judged, "
            "and returns them. A worker counts as live for live_s seconds after its last heartbeat."
        ),
        """
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
            WHERE e.reuse AND e.state = 'queued' AND e.attempts = 0
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
$$
""",
    ),
    # For a verdict that an operator changes by hand. Retention does not change these columns.
    "kqueue_correct": (
        "Changes the summary of a verdict that is changed.",
        """
CREATE FUNCTION {schema}.kqueue_correct() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE {schema}.summaries
    SET category = NEW.category, runtime_ms = NEW.runtime_ms, speedup = NEW.speedup,
        reused = NEW.reused_from IS NOT NULL, finished_at = NEW.finished_at
    WHERE evaluation_id = NEW.evaluation_id;
    RETURN NULL;
END
$$
""",
    ),
    # A sweeper has no right to write sources and evaluations. The function hashes the sources itself. A kernel's hash
    # covers its backend, a zero byte and its source.
    "kqueue_probe": (
        "Submits a probe of the fleet's own judge.",
        """
CREATE FUNCTION {schema}.kqueue_probe(probe jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    problem text := encode(sha256(convert_to(probe ->> 'problem', 'UTF8')), 'hex');
    kernel text := encode(sha256(
        convert_to(probe ->> 'backend', 'UTF8') || decode('00', 'hex') || convert_to(probe ->> 'kernel', 'UTF8')
    ), 'hex');
BEGIN
    -- Whose it is does not come from the caller: a producer like others where turns are taken, whom nothing is charged.
    INSERT INTO {schema}.problems (hash, source) VALUES (problem, probe ->> 'problem') ON CONFLICT DO NOTHING;
    INSERT INTO {schema}.kernels (hash, backend, source) VALUES (kernel, probe ->> 'backend', probe ->> 'kernel')
    ON CONFLICT DO NOTHING;
    INSERT INTO {schema}.evaluations (id, problem_hash, kernel_hash, lane, settings, expires_at, producer, probe)
    VALUES (
        (probe ->> 'id')::uuid, problem, kernel, probe ->> 'lane', probe -> 'settings',
        now() + make_interval(secs => (probe ->> 'queue_wait_s')::float8), 'kqueue''s probes', true
    );
    INSERT INTO {schema}.probes (evaluation_id, lane, kind, idea, spin_ms, confirms)
    VALUES (
        (probe ->> 'id')::uuid, probe ->> 'lane', probe ->> 'kind', probe ->> 'idea', (probe ->> 'spin_ms')::float8,
        (probe ->> 'confirms')::boolean
    );
END
$$
""",
    ),
}
#: Views by name, with their comments and queries.
VIEWS: Final = {
    "evaluation_overview": (
        "One wide row for each evaluation: its request, state, outcome and environment.",
        """
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
            v.reused_from
        FROM evaluations AS e
        JOIN kernels AS k ON k.hash = e.kernel_hash
        LEFT JOIN verdicts AS v ON v.evaluation_id = e.id
        LEFT JOIN attempts AS first ON first.evaluation_id = e.id AND first.number = 1
        LEFT JOIN attempts AS last ON last.evaluation_id = e.id AND last.number = e.attempts
        LEFT JOIN workers AS w ON w.id = last.worker_id
        LEFT JOIN environments AS n ON n.hash = coalesce(last.environment_hash, v.environment_hash)
        WHERE NOT e.probe
        """,
    ),
    "outcomes": (
        "How many evaluations ended in each category, by UTC day, lane and backend, and whose failure it was.",
        """
        SELECT
            (v.finished_at AT TIME ZONE 'UTC')::date AS day, e.lane, k.backend, v.category, v.blame,
            count(*) AS evaluations
        FROM verdicts AS v
        JOIN evaluations AS e ON e.id = v.evaluation_id
        JOIN kernels AS k ON k.hash = e.kernel_hash
        WHERE NOT e.probe
        GROUP BY day, e.lane, k.backend, v.category, v.blame
        """,
    ),
    "best_verdicts": (
        "The fastest kernel that passed, for each problem, precision and device model.",
        """
        SELECT DISTINCT ON (e.problem_hash, precision, n.device)
            e.problem_hash, e.problem_label, e.settings ->> 'precision' AS precision, n.device,
            e.kernel_hash, e.kernel_label, k.backend, v.runtime_ms, v.baseline_ms, v.speedup,
            v.evaluation_id, v.finished_at
        FROM verdicts AS v
        JOIN evaluations AS e ON e.id = v.evaluation_id
        JOIN kernels AS k ON k.hash = e.kernel_hash
        JOIN attempts AS a ON a.id = v.attempt_id
        LEFT JOIN environments AS n ON n.hash = a.environment_hash
        WHERE NOT e.probe AND v.category = 'passed' AND v.runtime_ms IS NOT NULL
        ORDER BY e.problem_hash, precision, n.device, v.runtime_ms, v.finished_at
        """,
    ),
    "fleet_utilisation": (
        "Each worker that lived within the last hour: whether it lives, and how busy it was in that hour.",
        """
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
        WHERE coalesce(w.stopped_at, w.heartbeat_at) > now() - interval '1 hour'
        """,
    ),
}


def upgrade() -> None:
    """Create everything."""
    schema = op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))
    for name, (meaning, columns) in _TABLES.items():
        op.execute(f"CREATE TABLE {name} ({columns})")
        _comment("TABLE", name, meaning)
    for name, on in _INDEXES.items():
        op.execute(f"CREATE INDEX {name} ON {on}")
    for name, (meaning, definition) in FUNCTIONS.items():
        op.execute(definition.format(schema=schema, content=CONTENT))
        _comment("FUNCTION", name, meaning)
        op.execute(f"REVOKE ALL ON FUNCTION {name} FROM PUBLIC")
    op.execute("""
        CREATE TRIGGER kqueue_correct
        AFTER UPDATE OF category, runtime_ms, speedup, reused_from, finished_at ON verdicts
        FOR EACH ROW EXECUTE FUNCTION kqueue_correct()
    """)
    for name, (meaning, query) in VIEWS.items():
        op.execute(f"CREATE VIEW {name} AS {query}")
        _comment("VIEW", name, meaning)


def downgrade() -> None:
    """Drop everything. The roles stay, because other databases can use them."""
    for name in VIEWS:
        op.execute(f"DROP VIEW {name}")
    op.execute("DROP TRIGGER kqueue_correct ON verdicts")
    for name in FUNCTIONS:
        op.execute(f"DROP FUNCTION {name}")
    for name in reversed(_TABLES):
        op.execute(f"DROP TABLE {name}")
    for role in ("kqueue_producer", "kqueue_worker", "kqueue_gateway", "kqueue_reader"):
        if op.get_bind().scalar(sa.text("SELECT to_regrole(:role)"), {"role": role}) is not None:
            op.execute(f"REVOKE ALL ON alembic_version FROM {role}")


def _comment(kind: str, name: str, meaning: str) -> None:
    quoted = meaning.replace("'", "''")
    op.execute(f"COMMENT ON {kind} {name} IS '{quoted}'")
