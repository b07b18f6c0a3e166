"""A producer without database credentials, which submits a small named batch over HTTP.

    python examples/remote_client.py                          # uses the fleet of `kqueue up` on this machine
    python examples/remote_client.py http://gpu-host:18188    # takes a token from KQUEUE_TOKEN

The exit status is 1 if a verdict is not as expected.
"""

import sys
from uuid import uuid4

from kqueue import InvalidRequest, KqueueError, RemoteClient

PROBLEM = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(64, 1000)]


def get_init_inputs():
    return []
"""

KERNEL = """
import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return {}
"""

KERNELS = {
    "right": ("x.clamp(min=0) * 2.0", "passed"),
    "wrong": ("x.clamp(min=0) * 2.5", "wrong_values"),
    "breaks": ("x.nothing()", "runtime_error"),
}

batch = f"remote-{uuid4().hex[:8]}"
entries = [
    {
        "problem": PROBLEM,
        "kernel": KERNEL.format(expression),
        "backend": "torch",
        "kernel_label": label,
        "batch": batch,
        # Submitting twice with this key gives one evaluation, even after a restart of this program.
        "idempotency_key": f"{batch}/{label}",
    }
    for label, (expression, _) in KERNELS.items()
]
# A bad entry does not affect the rest.
entries.append({"problem": PROBLEM, "kernel": "", "backend": "torch", "kernel_label": "empty"})

try:
    with RemoteClient(sys.argv[1] if len(sys.argv) > 1 else None) as kq:
        *verdicts, refused = kq.evaluate_batch(entries, timeout=600)
        found = kq.batch(batch)
except KqueueError as error:  # no server answers, for instance
    sys.exit(f"{error}")

for verdict in verdicts:
    time = "" if verdict.runtime_ms is None else f", {verdict.runtime_ms:.4f} ms"
    print(f"{verdict.kernel_label}: {verdict.category}{time} {verdict.message}")
print(f"refused: {refused}")
print(f"{len(found)} evaluations in the batch {batch}")

as_expected = [str(verdict.category) for verdict in verdicts] == [expected for _, expected in KERNELS.values()]
sys.exit(0 if as_expected and isinstance(refused, InvalidRequest) and len(found) == len(KERNELS) else 1)
