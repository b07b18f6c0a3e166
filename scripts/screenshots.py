"""Take the documents' pictures: `python scripts/screenshots.py`.

It starts a fleet in a temporary folder, judges kernels of the gallery, and writes docs/pictures/*.png
with the installed browser, at widths of 1280 and 390 pixels, and docs/pictures/verdict.svg from the output of
`kqueue judge`. The pictures show times of the machine on which it runs.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from examples.gallery import entries  # noqa: E402
from kqueue import Client, Request  # noqa: E402
from kqueue.config import load  # noqa: E402
from kqueue.local.fleet import LocalFleet  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
#: Kernels of the lane `cpu` that are judged in a second or two, in addition to two batches.
SINGLE = ("good/torch/softmax", "good/triton/softmax", "bad/segfault", "bad/wrong_shape", "bad/nan")
SINGLE = (*SINGLE, "bad/zeros", "bad/wrong_values_torch", "bad/runtime_error")
_AGAIN = """

_Before = ModelNew


class ModelNew(_Before):
    def forward(self, *args):
"""
#: Changes of a right kernel: none, one that makes it wrong, and one that makes it slow.
SAME = ""
OFF = f"{_AGAIN}        return _Before.forward(self, *args) * 0.9\n"
SLOW = f"{_AGAIN}        _Before.forward(self, *args)\n        return _Before.forward(self, *args)\n"
#: Changes of the kernels of two batches, in turn for the problems of the gallery.
FIRST = (SLOW, SAME, OFF, SAME, SAME, SAME, SLOW, SAME)
SECOND = (SAME, SAME, SAME, OFF, SAME, SLOW, SAME, SAME)
#: Pictures: width and height in pixels.
WIDE, PHONE = 1280, 390
SIZES = {
    "fleet": (WIDE, 560),
    "right": (WIDE, 820),
    "wrong": (WIDE, 900),
    "problem": (WIDE, 940),
    "changes": (WIDE, 900),
    "list-phone": (PHONE, 760),
    "wrong-phone": (PHONE, 760),
    "changes-phone": (PHONE, 760),
}
#: Number of colours of a picture, which keeps its file small.
COLOURS = 64
#: Kernels of the terminal's picture.
SHOWN = ("good/torch/softmax", "bad/wrong_values_torch")


def main() -> int:
    """Take the pictures. Return the exit status."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium is installed", file=sys.stderr)
        return 1
    PICTURES.mkdir(exist_ok=True)
    terminal()
    with tempfile.TemporaryDirectory(prefix="kqueue-pictures-") as name:
        top = Path(name)
        top.chmod(0o711)  # candidates' users must reach their directories below it
        config = load(home=top / "home", scratch=top / "scratch", gpus="none", cpu_slots=1, http_port=0, probe_share=0)
        with LocalFleet(config, http=True, durable=False) as fleet, Client(fleet.config) as client:
            single = [entry.request("cpu") for entry in entries("cpu") if entry.name in SINGLE]
            torch = [entry.request("cpu") for entry in entries("cpu") if entry.name.startswith("good/torch/")]
            verdicts = client.evaluate_batch(single)
            for batch, changes in (("model-1", FIRST), ("model-2", SECOND)):
                client.evaluate_batch(
                    [changed(one, batch, changes[number % len(changes)]) for number, one in enumerate(torch)]
                )
            passed = next(one.evaluation_id for one in verdicts if one.passed and one.speedup)
            failed = next(one.evaluation_id for one in verdicts if not one.passed and one.facts.map)
            problem = next(one.problem_hash for one in torch if one.kernel_label == SHOWN[0])
            compared = "/compare?first=model-1&second=model-2"
            command = [sys.executable, "-m", "kqueue", "open", "--no-browser"]
            link = subprocess.run(command, env=config.environment(), capture_output=True, text=True, check=True).stdout
            shoot(
                browser,
                link.split()[-1],
                {
                    "fleet": "/",
                    "right": f"/evaluations/{passed}",
                    "wrong": f"/evaluations/{failed}",
                    "problem": f"/problems/{problem}",
                    "changes": compared,
                    "list-phone": "/evaluations",
                    "wrong-phone": f"/evaluations/{failed}",
                    "changes-phone": compared,
                },
            )
    return 0


def changed(request: Request, batch: str, change: str) -> Request:
    """Return the request of a batch for a changed kernel."""
    return request.model_copy(update={"kernel": request.kernel + change, "batch": batch, "kernel_label": "sample 0"})


def terminal() -> None:
    """Write the picture of a right and a wrong verdict of `kqueue judge`."""
    console = Console(record=True, width=120, file=io.StringIO())
    for entry in (entry for entry in entries("cpu") if entry.name in SHOWN):
        request = entry.request("cpu")
        with tempfile.TemporaryDirectory() as name:
            files = {f"{request.problem_label}.py": request.problem, "kernel.py": request.kernel}
            for file, source in files.items():
                (Path(name) / file).write_text(source)
            words = [sys.executable, "-m", "kqueue", "judge", *files]
            environment = os.environ | {"FORCE_COLOR": "1", "KQUEUE_GPUS": "none"}
            done = subprocess.run(words, cwd=name, env=environment, capture_output=True, text=True, check=False)
        console.print(Text(f"$ kqueue judge {' '.join(files)}", style="bold"))
        console.print(Text.from_ansi(done.stdout))
    drawn = console.export_svg(title="kqueue judge")
    # The fonts would come from another server.
    (PICTURES / "verdict.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))


def shoot(browser: str, link: str, pages: dict[str, str]) -> None:
    """Log in by a link, and write a picture of the top of each page."""
    with sync_playwright() as tool:
        # The page's policy forbids the evaluation of the condition below.
        window = tool.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page(bypass_csp=True)
        window.goto(link)
        address = link.split("/login")[0].rstrip("/")
        for name, path in pages.items():
            width, height = SIZES[name]
            window.set_viewport_size({"width": width, "height": height})
            # Live pages never become idle.
            window.goto(address + path)
            window.wait_for_timeout(1000)
            # Charts are loaded only when they come into view.
            window.wait_for_function("[...document.images].every(one => one.complete || one.y > innerHeight)")
            file = PICTURES / f"{name}.png"
            window.screenshot(path=file)
            Image.open(file).convert("RGB").quantize(COLOURS).save(file, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
