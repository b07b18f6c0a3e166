"""What the forms of other evaluation servers refuse."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from kqueue.contract import MAX_SOURCE_BYTES

pytestmark = pytest.mark.nightly

EVAL = {"original_model_src": "secret", "custom_model_src": "k", "backend": "torch"}
JOB = {"problem_id": 1, "sample_id": 0, "level": 1, "custom_cuda": "k", "ref_arch_src": "secret", "backend": "torch"}
TASK = {"task_id": "t", "reference_code": "secret", "kernel_code": "k", "backend": "torch"}
HUGE, TRIALS = "#" * (MAX_SOURCE_BYTES + 1), {"num_correct_trials": (0, 1.5), "num_perf_trials": (10_001,)}
#: Forms, a body that each takes, and values of its fields that are refused with 422 and the field's name.
FORMS: list[tuple[list[str], dict[str, Any], dict[str, tuple[Any, ...]]]] = [
    (
        ["/eval"],
        EVAL,
        TRIALS
        | {"seed_num": ("many", -1), "measure_performance": ("perhaps",), "original_model_src": (None,)}
        | {"preferred_device": ("first",)},
    ),
    (
        ["/evaluate", "/evaluate_sync"],
        JOB,
        TRIALS
        | {"problem_id": (None, 1.5, "../19"), "sample_id": ("a b", [0]), "level": ("x" * 81,), "ref_arch_src": (7,)}
        | {"timeout": (0, 3601, "soon")},
    ),
    (
        ["/evaluate"],
        TASK,
        TRIALS
        | {"task_id": ("", "x" * 101, 7), "reference_code": (None,), "entry_point": ("a b",), "timeout": (0,)}
        | {"priority": ("urgent",), "reference_backend": ("onnx",), "device_preference": ("gpu0",)},
    ),
]
#: Changes of a body, and what is said of each, with its status.
OTHERS: list[tuple[dict[str, Any], dict[str, Any], int, str]] = [
    *((form, {"backend": "hip"}, 422, "cuda, triton, torch, cpp, cupy") for form in (EVAL, JOB, TASK)),
    *((form, {"backend": "cuda"}, 503, "no live worker serves gpu") for form in (EVAL, JOB, TASK)),
    *((EVAL, {"custom_model_src": source}, 422, says) for source, says in (("x\0", "NUL"), ("\ud800", "UTF-8"))),
    (EVAL, {"custom_model_src": HUGE}, 422, str(MAX_SOURCE_BYTES)),
    (EVAL, {"original_model_src": "  "}, 422, "empty"),
    (EVAL, {"preferred_device": 0}, 400, "has no GPU"),
    (JOB, {"problem_id": 10**3000}, 422, "problem_label"),
    *((JOB, {"custom_cuda": source}, 422, says) for source, says in (("", "empty"), ("x\0", "NUL"))),
    (JOB, {"custom_cuda": HUGE}, 422, str(MAX_SOURCE_BYTES)),
    (TASK, {"kernel_code": ""}, 422, "empty"),
    (TASK, {"workflow": "kernel_simple"}, 422, "send reference_code, and 'kernelbench' here"),
    (TASK, {"device_preference": "cuda:3"}, 400, "no device 3"),
]


def test_bad_input_is_refused_with_what_to_do(http: httpx.Client, engine: Engine) -> None:
    """Each is a problem whose `detail` names the field; nothing is accepted, and nothing of a source repeated."""
    cases = [
        (path, form | {name: value}, 422, name)
        for paths, form, wrong in FORMS
        for path in paths
        for name, values in wrong.items()
        for value in values
    ]
    paths = {id(form): paths for paths, form, _ in FORMS}
    cases += [(path, form | change, *said) for form, change, *said in OTHERS for path in paths[id(form)]]
    for path, body, status, says in cases:
        answer = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
        assert says in answer.json()["detail"]
        assert "secret" not in answer.text
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM evaluations")) == 0


@pytest.mark.parametrize(
    "path",
    [f"/job/{name}" for name in ("1595efc0-c1bb-49b4-9b7c-5f1f996c0c9a", "nonsense", "7", "%00", "..%2Fjobs")]
    + ["/status/nothing", "/results/nothing", "/status/%00", "/results/a/b"],
)
def test_what_is_unknown(http: httpx.Client, path: str) -> None:
    """404, whatever the id looks like."""
    answer = http.get(f"{http.base_url}{path}")
    assert answer.status_code == 404, answer.text
