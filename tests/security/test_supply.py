"""The bill of materials and the audit with their real tools and an invented advisory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path

import pytest

from tests.receiver import Answer, receiver
from tests.security.house import ROOT
from tests.services import free_port

# Every installed package is listed and looked up.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

pytest.importorskip("pip_audit")
pytest.importorskip("cyclonedx_py")


def advisories(bad: str) -> AbstractContextManager[str]:
    """Serve an advisory database on loopback with one vulnerability, in the package ``bad``."""

    def answer(_: object, body: bytes) -> Answer:
        asked = json.loads(body)
        package = {"name": asked["package"]["name"], "ecosystem": "PyPI"}
        ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.1"}]}]
        affected = [{"package": package, "ranges": ranges, "versions": [asked["version"]]}]
        hole = {"id": "MADE-UP-1", "summary": "a hole", "affected": affected}
        return 200, {}, json.dumps({"vulns": [hole]} if package["name"] == bad else {}).encode()

    return receiver(answer)


def audit(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the audit against the database at ``url``, without access to another one."""
    command = [sys.executable, str(ROOT / "scripts" / "audit.py"), *arguments]
    environment = os.environ | {"NO_PROXY": "127.0.0.1", "HTTPS_PROXY": "http://127.0.0.1:9"}
    return subprocess.run([*command, "-s", "osv", "--osv-url", url], env=environment, capture_output=True, text=True)


def test_a_known_hole_fails_the_audit() -> None:
    """The audit names package, version, advisory and fixed version, and succeeds without the vulnerability."""
    with advisories("celery") as url:
        done = audit(f"{url}/v1/query", "--if-reachable")
        assert f"celery {metadata.version('celery')}: MADE-UP-1, fixed in 99.1" in done.stdout, done.stderr
        assert done.returncode == 1
    with advisories("nothing") as url:
        done = audit(f"{url}/v1/query")
        assert (done.returncode, "0 advisories" in done.stdout) == (0, True), done.stderr


def test_an_audit_that_could_not_be_made_says_so() -> None:
    """The audit fails without an advisory database, unless an option permits that, and is never silent."""
    nowhere = f"http://127.0.0.1:{free_port()}/v1/query"
    for arguments, status in (((), 2), (("--if-reachable",), 0)):
        done = audit(nowhere, *arguments)
        assert "NOT DONE" in done.stderr
        assert "advisories" not in done.stdout
        assert done.returncode == status
    assert audit(nowhere, "--if-reachable", "--no-such-option").returncode == 2


def test_the_bill_of_materials_names_what_is_installed(tmp_path: Path) -> None:
    """The bill is CycloneDX with kqueue as its subject and each package with its version."""
    file = tmp_path / "sbom.json"
    done = subprocess.run(["make", "-o", "venv", "sbom", f"SBOM={file}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    bill = json.loads(file.read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "kqueue"
    versions = {component["name"].lower(): component["version"] for component in bill["components"]}
    for name in ("celery", "kombu", "redis", "psycopg", "sqlalchemy"):
        assert versions[name] == metadata.version(name)
