"""Faults of one line, each of which breaks one promise, and the tests of the gate that should find it."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault to plant.

    Attributes:
        name: a name in lower case.
        promise: the promise that it breaks.
        path: the file to change, below the root.
        before, after: text that stands in the file once, and its replacement.
        tests: arguments for pytest: files or single tests, the one most likely to fail first.
    """

    name: str
    promise: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]


_CLAIMS = "kqueue/store/evaluations/claims.py"
_VERDICTS = "kqueue/store/evaluations/verdicts.py"
_CONDITIONS = "kqueue/store/evaluations/conditions.py"
_COMPARE = "workers/judge/pipeline/compare.py"
_EXCHANGE = "workers/judge/pipeline/exchange.py"
_KEPT = "workers/judge/pipeline/kept.py"
_SERIES = "workers/judge/pipeline/series.py"
_SEAL = "workers/judge/sandbox/seal.py"
_MESSAGES = "workers/messages.py"
_AUTH = "kqueue/http/auth.py"

FAULTS = (
    # The record -----------------------------------------------------------------------------------------
    Fault(
        "claim_running",
        "An evaluation is claimed once.",
        _CLAIMS,
        "            QUEUED,\n            Evaluation.available_at <= func.now(),",
        "            Evaluation.available_at <= func.now(),",
        ("tests/store/test_claims.py", "tests/store/test_races.py"),
    ),
    Fault(
        "claim_early",
        "A try after the fleet's failure waits for its delay.",
        _CLAIMS,
        "            Evaluation.available_at <= func.now(),\n",
        "",
        ("tests/store/test_claims.py", "tests/store/test_verdicts.py"),
    ),
    Fault(
        "claim_paused",
        "A paused worker takes no evaluation.",
        _CLAIMS,
        "Worker.paused.is_(None), not_(out_of_service)",
        "not_(out_of_service)",
        ("tests/store/test_claims.py", "tests/store/test_workers.py"),
    ),
    Fault(
        "claim_sick_gpu",
        "A GPU that is out of service judges nothing.",
        _CLAIMS,
        "Worker.paused.is_(None), not_(out_of_service)",
        "Worker.paused.is_(None)",
        ("tests/health/test_gpus.py", "tests/store/test_claims.py"),
    ),
    Fault(
        "claim_expired",
        "An evaluation that waited longer than its producer allowed is not begun.",
        _CLAIMS,
        "            not_(EXPIRED),\n",
        "",
        ("tests/store/test_claims.py", "tests/store/test_waiting.py"),
    ),
    Fault(
        "foreign_sources",
        "Sources that are not what their hashes stand for are not judged.",
        _CLAIMS,
        "        if (request.problem_hash, request.kernel_hash) != self.hashes:",
        "        if request.problem_hash != self.hashes[0]:",
        ("tests/store/test_claims.py", "tests/security/test_roles.py", "tests/store/test_submission.py"),
    ),
    Fault(
        "verdict_twice",
        "The first writer of a verdict wins.",
        _VERDICTS,
        "    if evaluation.state == EvaluationState.DONE:\n        return Recorded.LATE\n",
        "",
        ("tests/store/test_verdicts.py", "tests/store/test_races.py"),
    ),
    Fault(
        "end_in_two",
        "An attempt and its evaluation end together, whenever a process dies.",
        _VERDICTS,
        "    _conclude(connection, evaluation_id, outcome, written_by=written_by, attempt_id=attempt_id)\n    return",
        "    connection.connection.commit()\n"
        "    _conclude(connection, evaluation_id, outcome, written_by=written_by, attempt_id=attempt_id)\n    return",
        ("tests/store/test_machine.py",),
    ),
    Fault(
        "no_retry",
        "The fleet's failure is tried again.",
        _VERDICTS,
        "earlier.tries + 1 < evaluation.max_attempts",
        "earlier.tries + 1 < 1",
        ("tests/store/test_verdicts.py",),
    ),
    Fault(
        "retry_for_ever",
        "Tries are bounded.",
        _VERDICTS,
        "(earlier.tries + 1 < evaluation.max_attempts and not earlier.suspected)",
        "not earlier.suspected",
        ("tests/store/test_verdicts.py",),
    ),
    Fault(
        "suspect_tried_on",
        "A kernel that took its worker with it alone on its device is not tried again.",
        _VERDICTS,
        "(earlier.tries + 1 < evaluation.max_attempts and not earlier.suspected)",
        "earlier.tries + 1 < evaluation.max_attempts",
        ("tests/store/test_history.py", "tests/store/test_verdicts.py"),
    ),
    Fault(
        "handed_back_counts",
        "An attempt that was handed back is no try.",
        _VERDICTS,
        "if handed_back or (earlier",
        "if (earlier",
        ("tests/store/test_verdicts.py", "tests/store/test_races.py"),
    ),
    Fault(
        "lease_never_ends",
        "An attempt whose worker falls silent is ended.",
        _CONDITIONS,
        "Attempt.lease_until < func.now())",
        "Attempt.lease_until < func.now() - literal_column(\"interval '1 day'\"))",
        ("tests/store/test_sweeper.py", "tests/store/test_verdicts.py"),
    ),
    Fault(
        "lease_not_renewed",
        "A living worker's lease is renewed.",
        "workers/bookkeeping.py",
        "            self.attempt(lambda: registry.heartbeat(self.engine, worker_ids, lease_s=self._config.lease_s))\n",
        "",
        ("tests/fleet/test_life.py", "tests/fleet/test_deaths.py"),
    ),
    Fault(
        "unfit_text",
        "Characters that Postgres refuses are replaced.",
        "kqueue/store/clean.py",
        '    return _UNFIT.sub("\\ufffd", value)',
        "    return value",
        ("tests/store/test_clean.py", "tests/store/test_verdicts.py"),
    ),
    Fault(
        "luck_reused",
        "A verdict that depends on luck is not reused.",
        "kqueue/store/evaluations/reuse.py",
        "outcome.category.info.reusable and not disturbed",
        "not disturbed",
        ("tests/store/test_reuse.py",),
    ),
    # Blame ----------------------------------------------------------------------------------------------
    Fault(
        "killed_from_outside",
        "A judge that is killed from outside is a lost worker, not a failed judge.",
        "workers/judge/deaths.py",
        "    if exitcode in _FROM_OUTSIDE:",
        "    if exitcode not in _FROM_OUTSIDE and exitcode < -1000:",
        ("tests/fleet/test_deaths.py", "tests/judge/test_supervisor.py"),
    ),
    Fault(
        "fleet_not_compiled",
        "A failure of the fleet is never recorded as `compiled=False`.",
        "kqueue/categories.py",
        "    (Blame.FLEET, None, None): {",
        "    (Blame.FLEET, False, None): {",
        ("tests/test_evidence.py", "tests/store/test_verdicts.py", "tests/store/test_schema.py"),
    ),
    Fault(
        "cancel_blames_next",
        "A death is recorded for the evaluation whose clerk died, and for no other.",
        "workers/judge/host/status_page.py",
        "(record for record in self.read() if record.evaluation_id == evaluation_id)",
        "(record for record in self.read())",
        ("tests/fleet/test_cancel_next.py",),
    ),
    Fault(
        "handler_swallowed",
        "A worker whose start fails ends.",
        "workers/app.py",
        "                    os._exit(1)\n",
        "                    pass\n",
        ("tests/fleet/test_life.py",),
    ),
    Fault(
        "never_replaced",
        "A worker that fails every evaluation is replaced.",
        "workers/delivery.py",
        "        if self._failures == _MOST_FAILURES:",
        "        if self._failures < 0:",
        ("tests/fleet/test_life.py",),
    ),
    Fault(
        "exception_text",
        "An exception whose text cannot be read is reported as that exception.",
        "workers/judge/candidate/failures.py",
        "if tag is Tag.COMPILE else text_of(shown),",
        "if tag is Tag.COMPILE else str(shown),",
        ("tests/judge/test_messages.py",),
    ),
    # The comparison -------------------------------------------------------------------------------------
    Fault(
        "infinity_forgotten",
        "A value that is not finite where the reference is finite is wrong.",
        _COMPARE,
        "        stray = finite & ~out.isfinite()",
        "        stray = finite & out.isnan()",
        ("tests/judge/pipeline/test_compare.py",),
    ),
    Fault(
        "mask_forgotten",
        "Where the reference is infinite, only the same infinity is right.",
        _COMPARE,
        "return same | (finite & (error <= tolerance.rtol * size + tolerance.atol))",
        "return same | (error <= tolerance.rtol * size + tolerance.atol) | ~finite",
        ("tests/judge/pipeline/test_compare.py",),
    ),
    Fault(
        "zeros_pass",
        "All values together are nearer to a tiny reference than zeros are.",
        _COMPARE,
        "        if is_far and not self._answers()",
        "        if is_far and figures.size > 9 and not self._answers()",
        ("tests/judge/pipeline/test_compare.py",),
    ),
    Fault(
        "mean_passes",
        "The mean of a nearly constant reference is no answer.",
        _COMPARE,
        "        if enough and shifts and",
        "        if not enough and shifts and",
        ("tests/judge/pipeline/test_compare.py",),
    ),
    Fault(
        "shape_unchecked",
        "An output of another shape is told as such.",
        _EXCHANGE,
        "        if mine.shape != theirs.shape:",
        "        if len(mine.shape) != len(theirs.shape):",
        ("tests/judge/pipeline/test_compare.py", "tests/judge/test_judge.py"),
    ),
    Fault(
        "dtype_unchecked",
        "An output of another dtype is told as such.",
        _EXCHANGE,
        "        if mine.dtype != theirs.dtype:",
        "        if mine.dtype is None:",
        ("tests/judge/pipeline/test_compare.py", "tests/judge/test_judge.py"),
    ),
    Fault(
        "excused_by_far",
        "A value beyond the tolerance is excused only as far as the reference itself errs.",
        "workers/judge/pipeline/rounding.py",
        "_LARGER: Final = 4\n",
        "_LARGER: Final = 400\n",
        ("tests/judge/pipeline/test_compare.py", "tests/judge/pipeline/test_reference.py"),
    ),
    Fault(
        "false_cause",
        "A lower precision is named as the cause only where it explains the error.",
        _COMPARE,
        "            and least <= errors[0] <= most\n            and rounding.are_coarse(",
        "            and least <= errors[0]\n            and bool(",
        ("tests/judge/pipeline/test_downgrade.py",),
    ),
    # Time -----------------------------------------------------------------------------------------------
    Fault(
        "timed_unverified",
        "Timed calls are verified.",
        _KEPT,
        "chosen = [proof for number, proof in enumerate(proofs) if number < _SHARPENED or not right[number]]",
        "chosen = [proof for number, proof in enumerate(proofs) if number < 0 and right[number]]",
        ("tests/judge/pipeline/test_timing.py",),
    ),
    Fault(
        "first_calls_kept",
        "Of all timed calls each is as likely to be verified as any other.",
        _KEPT,
        "number - 1 if number <= self._most else self._random.randrange(number)",
        "number - 1",
        ("tests/judge/pipeline/test_timing.py",),
    ),
    Fault(
        "work_in_few_calls",
        "A kernel that works in some calls only is measured by those.",
        _SERIES,
        "times = [max(call, least) - taken for call in series.calls]",
        "times = [call - taken for call in series.calls]",
        ("tests/judge/pipeline/test_timing.py",),
    ),
    Fault(
        "null_slowed",
        "A kernel gains nothing from a launch overhead that it has slowed.",
        _SERIES,
        "return max(0.0, own if own <= theirs + slack else theirs)",
        "return own",
        ("tests/judge/pipeline/test_timing.py",),
    ),
    Fault(
        "own_time_trusted",
        "A time by a process's own clock counts only where the judge's clock confirms it.",
        _SERIES,
        "return None if excess is None or excess > 0 else",
        "return None if excess is None else",
        ("tests/judge/pipeline/test_timing.py",),
    ),
    # The seal -------------------------------------------------------------------------------------------
    Fault(
        "uid_kept",
        "A candidate runs with a uid of its own.",
        _SEAL,
        "        become(profile.uid)\n",
        "        pass\n",
        ("tests/sandbox/test_seal.py", "tests/judge/test_judge.py"),
    ),
    Fault(
        "descriptors_kept",
        "A candidate has no descriptor of the fleet's.",
        _SEAL,
        "    _close_all_but(keep | {0, 1, 2} | ({mount} if mount is not None else set()))\n",
        "    pass\n",
        ("tests/sandbox/test_seal.py", "tests/judge/test_judge.py"),
    ),
    Fault(
        "capabilities_kept",
        "A candidate has no capabilities.",
        _SEAL,
        "    linux.drop_capabilities()\n",
        "",
        ("tests/sandbox/test_seal.py",),
    ),
    Fault(
        "no_filter",
        "System calls are filtered.",
        _SEAL,
        "        seccomp.enforce(means.filter)\n",
        "",
        ("tests/sandbox/test_seal.py",),
    ),
    Fault(
        "files_in_reach",
        "A candidate reaches no files but its own and its libraries.",
        _SEAL,
        "        restrict_files(means, profile.scratch, shelf)\n",
        "        pass\n",
        ("tests/sandbox/test_seal.py",),
    ),
    Fault(
        "outlives_parent",
        "A sealed process dies with its parent.",
        _SEAL,
        "    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)\n",
        "",
        ("tests/sandbox/test_roles.py", "tests/sandbox/test_seal.py", "tests/fleet/test_life.py"),
    ),
    Fault(
        "files_unbounded",
        "A file of a candidate is bounded.",
        _SEAL,
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (profile.file_bytes, profile.file_bytes))\n",
        "",
        ("tests/sandbox/test_seal.py", "tests/judge/test_judge.py"),
    ),
    # Messages -------------------------------------------------------------------------------------------
    Fault(
        "any_task",
        "A message runs no other task.",
        _MESSAGES,
        '    if headers.get("task") != broker.EVALUATE:\n        raise Refused("it names another task")\n',
        "",
        ("tests/security/test_messages.py",),
    ),
    Fault(
        "any_order",
        "A worker obeys no order but the permitted ones.",
        _MESSAGES,
        "    for name in set(Panel.data) - _ORDERS.keys() - _ALIASES:",
        "    for name in set():",
        ("tests/security/test_messages.py",),
    ),
    Fault(
        "any_signal",
        "A judge is ended by SIGKILL only.",
        _MESSAGES,
        '            "signal": "SIGKILL",',
        '            "signal": arguments.get("signal"),',
        ("tests/security/test_messages.py",),
    ),
    Fault(
        "not_json",
        "A message that is not JSON is dropped.",
        _MESSAGES,
        "    except (ValueError, RecursionError):\n        return None\n",
        "    except RecursionError:\n        return None\n",
        ("tests/security/test_messages.py",),
    ),
    Fault(
        "forged_key",
        "A forged key in Redis stops no worker.",
        "kqueue/broker.py",
        "        pipe.delete(key)\n",
        "",
        ("tests/security/test_messages.py",),
    ),
    # HTTP and the page ----------------------------------------------------------------------------------
    Fault(
        "scope_unchecked",
        "A token does no more than its scopes allow.",
        _AUTH,
        "        if not caller.may(self.scope):",
        "        if self.scope is Scope.ADMIN and not caller.may(self.scope):",
        ("tests/http/test_tokens.py", "tests/http/test_access.py"),
    ),
    Fault(
        "admin_unchecked",
        "Only a token of the scope admin runs the fleet.",
        _AUTH,
        "        if not caller.may(self.scope):",
        "        if self.scope is not Scope.ADMIN and not caller.may(self.scope):",
        ("tests/http/test_tokens.py", "tests/http/test_devices.py"),
    ),
    Fault(
        "fleet_unhidden",
        "A report of the fleet names no evaluation of another owner.",
        "kqueue/store/reports/overview.py",
        "ids - existing(engine, ids) if viewer().held else set()",
        "set()",
        ("tests/web/test_owners.py",),
    ),
    Fault(
        "report_cut_off",
        "A command reads all pages of a long list.",
        "kqueue/cli/connection.py",
        "len(page) // most * (left - most)",
        "0",
        ("tests/cli/test_over_http.py",),
    ),
    Fault(
        "owner_unchecked",
        "A credential sees the work of its owner only.",
        "kqueue/http/gateway.py",
        "held=not self.may(wide)",
        "held=False",
        ("tests/web/test_owners.py",),
    ),
    Fault(
        "revoked_token",
        "A revoked or expired token is refused.",
        "kqueue/store/tokens.py",
        ".where(Token.digest == digest, VALID)",
        ".where(Token.digest == digest)",
        ("tests/http/test_tokens.py", "tests/web/test_sessions.py"),
    ),
    Fault(
        "socket_for_all",
        "The unix socket is the owner's.",
        _AUTH,
        "if peer in {0, os.geteuid()} else None",
        "if peer >= 0 else None",
        ("tests/http/test_socket.py", "tests/security/test_local_users.py"),
    ),
    Fault(
        "unescaped",
        "Foreign text is escaped on every page.",
        "kqueue/web/present.py",
        "    autoescape=True,",
        "    autoescape=False,",
        ("tests/web/test_pages.py", "tests/web/test_problems.py"),
    ),
    Fault(
        "cookie_for_scripts",
        "A session's cookie is out of reach of scripts and other sites.",
        "kqueue/web/cookie.py",
        "httponly=True, **where",
        'httponly=False, **where | {"samesite": "none"}',
        ("tests/web/test_sessions.py",),
    ),
    Fault(
        "body_unbounded",
        "No body is read beyond its limit.",
        "kqueue/http/app.py",
        "            if received > most:",
        "            if received > 99 * most:",
        ("tests/http/test_attacks.py", "tests/http/test_v1.py"),
    ),
    Fault(
        "flower_open",
        "Flower asks for a password.",
        "kqueue/flower.py",
        "        if request.path != self._health and not self._is_known(",
        "        if request.path == '/' and not self._is_known(",
        ("tests/security/test_access.py",),
    ),
    Fault(
        "flower_any_host",
        "Flower answers under its own names only.",
        "kqueue/flower.py",
        "        if not self._is_host(request.host):",
        "        if not request.host:",
        ("tests/security/test_access.py",),
    ),
    Fault(
        "broken_body",
        "A body that breaks off logs no traceback.",
        "kqueue/http/server.py",
        "            cycle.disconnected = True\n",
        "",
        ("tests/web/test_broken_bodies.py",),
    ),
    Fault(
        "receipt_reformatted",
        "A receipt with changed bytes does not verify.",
        "kqueue/receipts.py",
        '        elif _canonical(document) + b"\\n" != content:',
        "        elif False:",
        ("tests/receipts/test_receipts.py",),
    ),
    Fault(
        "receipt_by_anyone",
        "The key of a receipt is compared with the given ones.",
        "kqueue/receipts.py",
        "    listed = None if known is None else public in known",
        "    listed = None if known is None else True",
        ("tests/receipts/test_receipts.py",),
    ),
    # What becomes of a model's answer -------------------------------------------------------------------
    Fault(
        "draft_judged",
        "A draft in reasoning is not judged.",
        "kqueue/integrations/extraction.py",
        "(?i:(?:seed:)?(?:think(?:ing)?|thought|reasoning))",
        "(?i:(?:seed:)?(?:thinking|thought))",
        ("tests/integrations/test_answers.py",),
    ),
    # Commands -------------------------------------------------------------------------------------------
    Fault(
        "sigterm_kills",
        "SIGTERM ends a command as Ctrl-C does.",
        "kqueue/signals.py",
        "            signal.signal(number, signal.default_int_handler)",
        "            pass",
        ("tests/cli/test_submit.py",),
    ),
    Fault(
        "mcp_silent",
        "MCP answers a line that is not JSON.",
        "kqueue/mcp/serving.py",
        "                        await answers.send(SessionMessage(_not_json(item)))",
        "                        pass",
        ("tests/mcp/test_stdio.py",),
    ),
)
