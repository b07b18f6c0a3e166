"""A sample of the evidence of outcomes, with all its fields, in the database's JSON form."""

from __future__ import annotations

from typing import Any

from kqueue.evidence import Evidence
from workers.judge.sandbox.level import MEASURES

SHUFFLED = "the reference's values in another order as output 0"
#: Rows of judges before these models, in the database's JSON form.
STORED: dict[str, Any] = {
    "findings": [{"rule": "seed", "severity": "note", "line": None, "evidence": "", "by": "kqueue", "meaning": "m"}],
    "build": {"where": "candidate", "libraries": 0, "seconds": 1.5, "peak_bytes": 7, "skipped": "no GPU"},
    "program": "0" * 64,
    "trees": [{"of": "kernel", "hash": "0" * 64, "files": 1, "named": ["a b.py"]}],
    "inputs": [{"shape": [4, 8], "dtype": "float32"}],
    "checks": 9,
    "checks_asked": 5,
    "comparison": {
        "max_abs_error": 1e-06, "max_rel_error": "Infinity", "relative_norm": 1e-07, "error_ratio": None,
        "precision_downgrade": False, "strict_correct": True, "kernelbench_correct": None,
    },
    "tolerance": {"atol": 1e-3, "rtol": 0.0, "by": "settings"},
    "tolerances": [None, {"atol": 1e-3, "rtol": 0.0, "by": "problem"}],
    "calls": 2,
    "checker": {"bound": 0.01, "accepts": [SHUFFLED]},
    "reference_is_constant": False,
    "constant_outputs": [],
    "verified_calls": 16, "unvaried": "it draws nothing", "sizes": ["n: 31 instead of 32"], "untimed": "no GPU",
    "gradients": ["inputs[0]", "weight linear.weight"],
    "passes": [{
        "name": "forward", "runtime_ms": 1.0, "baseline_ms": 2.0, "speedup": 2.0, "speedup_interval": [1.5, 2.5],
    }],
    "timed_variants": {"count": 4, "ratio": 1.25},
    "baseline_taken": "in_turn",
    "judge_speedup": 1.5,
    "floor": {"bytes_in": 8, "bytes_out": 4, "bandwidth_gbs": 4000.0, "floor_ms": 0.1, "floor_out_ms": 0.05},
    "provenance": {
        "own_share": 0.9, "own": ["add"], "library": [{"name": "nvjet", "share": 0.1}], "unclear_share": 0.0,
        "unclear": [], "copies_share": 0.0, "decoy": False, "why": "90.0% kernels of its own source",
        "basis": "the candidate's own profile",
    },
    "provenance_error": "nothing was recorded",
    "tests": {"words": '{"at": "renew"}'},
    "sanitized": [{
        "tool": "memcheck", "errors": 6, "error": None, "seconds": 7.5,
        "findings": [{
            "kind": "Invalid __global__ read of size 16 bytes", "kernel": "k", "file": "kernel.py", "line": 8,
            "block": [0, 0, 0], "thread": [122, 0, 0], "address": "0x7f819a800fa0", "size_bytes": 16,
            "allocation_bytes": 4000, "distance_bytes": 1, "detail": "in k", "count": 6,
        }],
    }],
    "profile": {
        "by": "ncu", "peak_gbs": 4000.0, "peak_gflops": 60000.0, "error": None, "seconds": 3.0,
        "kernels": [{
            "name": "k", "launches": 1, "duration_ms": 0.5, "grid": [2, 1, 1], "block": [128, 1, 1], "registers": 18,
            "shared_bytes": 0, "spills": 0, "occupancy": 0.5, "occupancy_limit": "warps", "dram_bytes": 1e9,
            "dram_gbs": 2000.0, "dram_share": 0.5, "compute_share": 0.25, "tensor_share": 0.0, "gflops": 500.0,
            "l2_hits": 0.5, "stalls": [{"reason": "long_scoreboard", "share": 0.75}],
            "lines": [{"file": "kernel.py", "line": 16, "share": 0.9, "text": "v = tl.sin(v)"}],
        }],
    },
    "compiled_baseline": {"error": "it raised"},
    "setup_ms": 3.5, "reference_setup_ms": 2.5,
    "reference_draws": True, "training_modules": ["BatchNorm2d"], "parameters": "they are created in another order",
    "profiles": [{"name": "kernelbench", "passed": False, "why": "output 0 differs"}],
    "shapes": {
        "rows": [{
            "name": "large", "held_out": False, "weight": 2.0, "category": "passed", "runtime_ms": 0.5,
            "baseline_ms": 1.0, "speedup": 2.0, "speedup_interval": [1.9, 2.1], "timing_basis": "cpu_clock",
            "checks": 8, "hidden_variants": 3, "seconds": 1.5, "runtime_samples_ms": [0.5], "baseline_samples_ms": None,
        }],
        "worst": "large", "worst_speedup": 2.0, "spread": 1.0,
    },
    "baseline_drift": {"was_ms": 1.0, "is_ms": 2.0},
    "self_test": "right in 22.1 ms",
    "leaked_bytes": 0,
    "foreign_processes": [{"pid": 7, "name": "python", "memory_bytes": None, "active": None}],
    "isolation": {"level": "strong", "view": "host", "torch": "2.11"}
    | dict.fromkeys(MEASURES, True)
    | {"tcp": "needs Linux 6.7"},
    "gpu_memory": {
        "inputs_bytes": 1 << 30, "outputs_bytes": 1 << 30, "weights_bytes": 0, "judge_bytes": 4 << 30,
        "reference_bytes": 5 << 30, "candidate_bytes": 8 << 30, "used_bytes": 7 << 30,
    },
    "tf32": False,
    "reference": {"kept": True, "uses": 3, "replaced": "its answer has changed"},
    "slots_on_device": 4,
    "waited_for": ["process 812 (python -m workers.fleet), started by process 800 (kqueue up)"],
    "durations_s": {"check": 0.125},
    "begun_s": {"check": 0.0625},
    "cpu_s": {"judge": 0.25, "reference": 0.5, "candidate": 1.5},
    "peak_bytes": 1,
    "output_bytes": 2,
    "cleanup": "it did not answer",
    "alone": True,
    "attempts": [{
        "number": 1, "worker": "gpu0-0@here", "device": "GPU-1", "category": "worker_lost", "message": "killed",
        "seconds": 0.5, "handed_back": True,
    }],
    "traceback": "Traceback",
    "emptied_at": "2026-01-31T00:00:00Z",
}  # fmt: skip


#: A value for each field of the evidence. A new figure is a number.
EVERY: dict[str, Any] = dict.fromkeys(Evidence.model_fields, 1) | STORED
