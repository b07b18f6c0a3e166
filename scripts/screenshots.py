"""Take the documents' pictures of the fleet's pages: `python scripts/screenshots.py`.

It starts a fleet in a temporary folder, judges some of the gallery's kernels, and writes docs/pictures/*.png with the
installed browser. The pictures show times of the machine on which it runs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from examples.gallery import entries  # noqa: E402
from kqueue import Client  # noqa: E402
from kqueue.config import load  # noqa: E402
from kqueue.local.fleet import LocalFleet  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
#: Kernels of the lane `cpu` that are judged in a second or two.
JUDGED = ("good/torch/row_sum", "good/triton/row_sum", "bad/segfault", "bad/wrong_shape", "bad/nan", "bad/zeros")
KERNEL = """import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
"""
#: Other kernels for the problem of the first one, with the results of their `forward`. Some are wrong.
OTHERS = {
    "einsum": 'torch.einsum("rc->r", x)',
    "matmul": "x @ x.new_ones(x.shape[1])",
    "in halves": "sum(half.sum(1) for half in x.chunk(2, 1))",
    "in doubles": "x.double().sum(1).float()",
    "bfloat16": "x.bfloat16().sum(1).float()",
    "mean": "x.mean(1)",
}
#: Heights of the pictures in pixels.
HEIGHTS = {"fleet": 450, "right": 800, "wrong": 800, "problem": 930}


def main() -> int:
    """Take the pictures. Return the exit status."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium is installed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="kqueue-pictures-") as name:
        top = Path(name)
        top.chmod(0o711)  # candidates' users must reach their directories below it
        config = load(home=top / "home", scratch=top / "scratch", gpus="none", cpu_slots=1, http_port=0, probe_share=0)
        with LocalFleet(config, http=True, durable=False) as fleet, Client(fleet.config) as client:
            chosen = [entry.request("cpu") for entry in entries("cpu") if entry.name in JUDGED]
            first = next(one for one in chosen if one.kernel_label == JUDGED[0])
            for name, answer in OTHERS.items():
                kernel = f"{KERNEL}        return {answer}\n"
                chosen.append(first.model_copy(update={"kernel": kernel, "kernel_label": name}))
            verdicts = client.evaluate_batch(chosen)
            right = next(one.evaluation_id for one in verdicts if one.passed and one.speedup)
            problem = first.problem_hash
            wrong = next(one.evaluation_id for one in verdicts if not one.passed and one.facts.wrong)
            command = [sys.executable, "-m", "kqueue", "open", "--no-browser"]
            link = subprocess.run(command, env=config.environment(), capture_output=True, text=True, check=True).stdout
            shoot(
                browser,
                link.split()[-1],
                {
                    "fleet": "/",
                    "right": f"/evaluations/{right}",
                    "wrong": f"/evaluations/{wrong}",
                    "problem": f"/problems/{problem}",
                },
            )
    return 0


def shoot(browser: str, link: str, pages: dict[str, str]) -> None:
    """Log in by a link, and write a picture of the top of each page."""
    PICTURES.mkdir(exist_ok=True)
    with sync_playwright() as tool:
        window = tool.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page()
        window.goto(link)
        address = link.split("/login")[0].rstrip("/")
        for name, path in pages.items():
            window.set_viewport_size({"width": 1200, "height": HEIGHTS[name]})
            window.goto(address + path, wait_until="networkidle")
            # Charts are loaded only when they come into view.
            window.wait_for_function("[...document.images].every(one => one.complete || one.y > innerHeight)")
            window.screenshot(path=PICTURES / f"{name}.png")


if __name__ == "__main__":
    sys.exit(main())
