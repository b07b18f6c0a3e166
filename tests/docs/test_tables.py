"""Complete tables: commands, targets of make, folders of tests, packages and modules."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.docs import shell

ROOT = Path(__file__).parents[2]
#: Images without a digest from a source that can be trusted.
UNPINNED = {"pytorch/pytorch:2.11.0-cuda12.8-cudnn9-devel"}
#: Packages without an upper bound: their parts that are used have not changed over many major versions.
UNBOUNDED = {"cryptography", "ninja", "nvidia-ml-py", "pyarrow", "setuptools", "structlog", "tzdata"}


def test_generated_parts_are_up_to_date() -> None:
    """Pages and tables that `make docs` generates are up to date."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "docs.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_workflows_call_targets_that_exist() -> None:
    """GitHub's workflows run the gate, the nightly tests and the release by targets of the Makefile."""
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    jobs = [job for file in files for job in yaml.safe_load(file.read_text())["jobs"].values()]
    commands = [step.get("run", "") for job in jobs for step in job["steps"]]
    called = [words for command in commands for words in re.findall(r"\bmake (.+)", command)]
    assert called == ["check", "test", "soak MINUTES=0.5", "nightly", "release"]
    for words in called:
        assert shell.of_make(words.split()) is None


def test_everything_from_elsewhere_has_a_fixed_version() -> None:
    """Actions are named by commit, images by tag and never `latest`, exact versions by digest, packages with bounds."""
    workflows = "".join(file.read_text() for file in (ROOT / ".github" / "workflows").glob("*.yml"))
    used = re.findall(r"uses: (.*)", workflows)
    assert [one for one in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)] == []
    files = [*ROOT.glob("docker-compose*.yml"), *(ROOT / "docker").rglob("Dockerfile")]
    text = "".join(file.read_text() for file in files)
    images = re.findall(r"_IMAGE(?::-|=)([^}\s]+)", text) + re.findall(r"(?m)^FROM ([^$\s]+)|^ *image: ([^$\s]+)", text)
    stages = re.findall(r"(?m)^FROM .* AS (\S+)", text)
    foreign = [name for one in images if not (name := "".join(one)).startswith("kqueue-") and name not in stages]
    assert len(set(foreign)) == 6, foreign
    for image in foreign:
        name, _, digest = image.partition("@")
        tag = name.partition(":")[2]
        assert re.match(r"v?\d", tag), image
        # A tag such as 18 moves to each repaired version, and one such as 3.5.0 does not.
        moves = re.fullmatch(r"\d+(\.\d+)?(-slim)?", tag) or image in UNPINNED
        assert moves or re.fullmatch("sha256:[0-9a-f]{64}", digest), image
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [project["dependencies"], *project["optional-dependencies"].values()]
    loose = {re.split("[^a-z0-9-]", one)[0] for group in needed for one in group if not re.search("<|^kqueue", one)}
    assert loose == UNBOUNDED


def test_the_changelog_has_notes_of_the_version() -> None:
    """CHANGELOG.md has a section for the version, whose headings name their readers."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    command = [sys.executable, ROOT / "scripts" / "notes.py", version]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.startswith("###")) == (0, True), done.stderr


def test_make_help_lists_every_target() -> None:
    """`make help` describes each target of the Makefile."""
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    shown = subprocess.run(["make", "-s", "-C", ROOT, "help"], capture_output=True, text=True, check=True).stdout
    rows = dict(re.findall(r"^make ([a-z-]+) +(\S.*)$", shown, re.MULTILINE))
    assert set(rows) == set(phony[1].split())


@pytest.mark.parametrize("package", ["kqueue", "workers", "workers/judge"])
def test_every_package_and_module_is_described(package: str) -> None:
    """docs/architecture.md describes each package and module of a folder once."""
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Where the code is")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/.]+)`", "".join(re.findall(r"(?m)^- ((?:[^:\n]|\n  )*`): ", table)))
    there = {f"{path.parent.relative_to(ROOT)}/" for path in (ROOT / package).glob("*/__init__.py")}
    there |= {str(path.relative_to(ROOT)) for path in (ROOT / package).glob("[a-z]*.py")}
    assert there - set(named) == set()
    assert sorted(set(named)) == sorted(named)


def test_log_lines_of_the_alarms_exist() -> None:
    """Each log line that docs/operations.md explains is in the code."""
    alarms = (ROOT / "docs" / "operations.md").read_text().partition("| line | means | do |\n")[2].partition("\n\n")[0]
    lines = [line for row in alarms.splitlines()[1:] for line in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(lines) > 10
    code = "\n".join(path.read_text() for name in ("kqueue", "workers") for path in (ROOT / name).rglob("*.py"))
    assert [line for line in lines if line != "passed: false" and line not in code] == []
