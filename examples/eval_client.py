"""A typical client of `simple_eval_server`. For `kqueue serve` it only needs another address and a token.

    python examples/eval_client.py                          # uses the fleet of `kqueue up` on this machine
    python examples/eval_client.py http://gpu-host:18188    # takes a token from KQUEUE_TOKEN

It prints the results of a correct kernel, a wrong one, and one that crashes. The exit status is 1 if a result is not
as expected.
"""

import sys

import httpx

from kqueue.config import http_url, load

PROBLEM = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(8, 1000)]


def get_init_inputs():
    return []
"""

KERNEL = """
import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def double_relu(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, tl.maximum(x, 0.0) * 2.0, mask=mask)


class ModelNew(nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        double_relu[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
        return out
"""

KERNELS = {
    "right": KERNEL,
    "wrong": KERNEL.replace("* 2.0, mask", "* 2.5, mask"),
    "crashes": "import os\n" + KERNEL.replace("out = torch", "os.abort(); out = torch"),
}
EXPECTED = {"right": (True, True), "wrong": (True, False), "crashes": (True, False)}


def address() -> str:
    """Return the address in the arguments, or the one of the user's running `kqueue up`."""
    return sys.argv[1] if len(sys.argv) > 1 else http_url(load())


def authorization(url: str) -> dict[str, str]:
    """Return the header with the token from KQUEUE_TOKEN, or from the user's running `kqueue up`."""
    token = load(url=url).token
    return {"Authorization": f"Bearer {token.get_secret_value()}"} if token else {}


def error_message(error: httpx.HTTPError) -> str:
    """Return a message for a server that does not answer, or refuses."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"{error.response.status_code} {error.response.json()['detail']}"
    return f"no server answers ({error}): start a fleet with `kqueue up`, or give the address of one"


def main() -> int:
    """Evaluate the three kernels and print their results."""
    url = address()
    headers = authorization(url)
    found = {}
    with httpx.Client(base_url=url, headers=headers, timeout=600) as server:
        server.get("/backend_info").raise_for_status()  # `/health` needs no token
        health = server.get("/health").raise_for_status().json()
        print(f"{health['status']}, {health['total_gpu_devices']} GPUs, {health['queued']} evaluations queued")
        for name, kernel in KERNELS.items():
            answer = server.post(
                "/eval",
                json={
                    "original_model_src": PROBLEM,
                    "custom_model_src": kernel,
                    "seed_num": 42,
                    "num_correct_trials": 5,
                    "num_perf_trials": 100,
                    "measure_performance": True,
                    "backend": "triton",
                },
            )
            answer.raise_for_status()
            result = answer.json()
            found[name] = (result["compiled"], result["correctness"])
            print(f"{name}: compiled {result['compiled']}, correct {result['correctness']}, {result['runtime']:.4f} ms")
            print(f"  {result['metadata']['category']}: {result['metadata']['message']}")
    return 0 if found == EXPECTED else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except httpx.HTTPError as error:
        sys.exit(error_message(error))
