"""An agent without a language model, which repairs a kernel from the reports of `kqueue mcp`.

    python examples/agent.py                                # starts `kqueue mcp`, which finds the fleet of `kqueue up`
    python examples/agent.py http://127.0.0.1:18189/mcp     # a `kqueue mcp --http`, with the token in KQUEUE_TOKEN
    python examples/agent.py --kernel broken.py             # another kernel for the same problem

It reads the category, the lines of the source and the wrong values in each report, and changes the source accordingly.
The exit status is 1 if the kernel does not pass in the end.
"""

import argparse
import asyncio
import difflib
import os
import re
import sys
from pathlib import Path

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

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

BROKEN = """
import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x)
        y = x.rleu()
        return y * 2.5
"""

METHODS = ["abs", "clamp", "cos", "cumsum", "exp", "log", "matmul", "relu", "sigmoid", "sin", "softmax", "sum", "tanh"]
STEPS = 8


def repaired(kernel: str, category: str, report: str) -> str | None:
    """Return the kernel with the change that the report suggests, or None if this agent knows no such change."""
    lines = kernel.splitlines()
    line = re.search(r"^At line (\d+)", report, re.MULTILINE)
    at = int(line[1]) - 1 if line else None
    if category == "syntax_error" and at is not None and "expected ':'" in report:
        lines[at] += ":"
    elif category == "runtime_error" and at is not None and (missing := re.search(r"no attribute '(\w+)'", report)):
        close = difflib.get_close_matches(missing[1], METHODS, n=1)
        if not close:
            return None
        lines[at] = lines[at].replace(missing[1], close[0])
    elif category == "wrong_values":
        pairs = re.findall(r"expected (-?[\d.e+-]+), got (-?[\d.e+-]+)", report)
        ratios = [float(expected) / float(got) for expected, got in pairs if float(got)]
        if not ratios or max(ratios) - min(ratios) > 1e-3 * abs(ratios[0]):
            return None  # the ratios differ, so the mistake is not a wrong factor

        def scaled(match: re.Match[str]) -> str:
            return f"* {float(match[1]) * ratios[0]:.6g}"

        lines = re.sub(r"\* ([\d.]+)", scaled, "\n".join(lines), count=1).splitlines()
    else:
        return None
    return "\n".join(lines) + "\n"


async def repair(client: Client, kernel: str) -> bool:
    """Judge and change a kernel until it passes. Return False if it never does."""

    async def progress(_seconds: float, _of: float | None, message: str | None) -> None:
        print(f"    {message}")

    for step in range(1, STEPS + 1):
        arguments = {"problem": PROBLEM, "kernel": kernel, "backend": "torch", "timeout_s": 300}
        result = await client.call_tool("judge", arguments, progress_callback=progress)
        if result.is_error or result.structured_content is None:
            print(result.content[0].text)
            return False
        verdict = result.structured_content
        print(f"step {step}: {verdict['category']} (to blame: {verdict['blame']})")
        if verdict["passed"]:
            print(verdict["report"])
            return True
        if verdict["blame"] in {"fleet", "nobody"}:
            continue  # the report does not describe the kernel
        changed = repaired(kernel, verdict["category"], verdict["report"])
        if changed is None or changed == kernel:
            print(f"this agent knows no repair for:\n{verdict['report']}")
            return False
        for line in difflib.unified_diff(kernel.splitlines(), changed.splitlines(), lineterm="", n=0):
            if not line.startswith(("---", "+++", "@@")):
                print(f"    {line}")
        kernel = changed
    return False


async def main() -> int:
    """Run the agent on the command line's kernel. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="address of a `kqueue mcp --http`")
    parser.add_argument("--kernel", type=Path, help="a broken kernel")
    options = parser.parse_args()
    kernel = options.kernel.read_text() if options.kernel else BROKEN
    passed = False
    try:
        if options.url is None:
            settings = {name: value for name, value in os.environ.items() if name.startswith("KQUEUE_")}
            command = StdioServerParameters(command=sys.executable, args=["-m", "kqueue", "mcp"], env=settings)
            async with Client(command) as client:
                passed = await repair(client, kernel)
        else:
            headers = {"Authorization": f"Bearer {os.environ.get('KQUEUE_TOKEN', '')}"}
            # The answer comes with the verdict.
            timeout = httpx2.Timeout(30.0, read=600.0)
            async with httpx2.AsyncClient(headers=headers, timeout=timeout) as http:
                async with Client(streamable_http_client(options.url, http_client=http)) as client:
                    passed = await repair(client, kernel)
    except* (MCPError, httpx2.HTTPError):
        # A server on stdio has already reported the error.
        if options.url is not None:
            print(f"{options.url} does not answer, or refuses this KQUEUE_TOKEN", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
