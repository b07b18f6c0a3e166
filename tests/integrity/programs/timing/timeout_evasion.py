"""Spends its time in small sleeps, ignoring every signal and swallowing every exception.

A deadline that raises something inside the process, or asks it to end, never takes effect. Deadlines are another
process's here, and it kills.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    if threading.current_thread() is threading.main_thread():
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
    until = time.monotonic() + 600
    while time.monotonic() < until:
        with contextlib.suppress(BaseException):
            time.sleep(0.01)
    return F.gelu(x, approximate="tanh")
