"""`make audit`: look up every installed package in an advisory database with pip-audit.

The exit status is 0 without advisories, 1 with some, which are printed, and 2 if the database could not be reached.
With --if-reachable it is 0 in the last case too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

#: Seconds after which the database counts as unreachable.
_PATIENCE_S = 600


def main(arguments: list[str]) -> int:
    """Run the audit and print the result. All arguments except --if-reachable are passed to pip-audit."""
    lenient = "--if-reachable" in arguments
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--skip-editable", "--progress-spinner", "off"]
    command += [argument for argument in arguments if argument != "--if-reachable"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        answer, errors = done.stdout, done.stderr.strip()
    except subprocess.TimeoutExpired:
        answer, errors = "", f"no answer within {_PATIENCE_S} s"
    try:
        packages: list[dict[str, Any]] = json.loads(answer)["dependencies"]
    except (ValueError, KeyError, TypeError):
        reason = errors.splitlines()[-1][:300] if errors else "it printed nothing"
        print(f"audit: NOT DONE, the advisory database could not be reached: {reason}", file=sys.stderr)
        # A wrong argument or a broken installation is not the network's fault.
        unreachable = "requests.exceptions." in errors or "ConnectionError" in errors or errors.startswith("no answer")
        return 0 if lenient and unreachable else 2
    for package in packages:
        for advisory in package.get("vulns", ()):
            fixed = ", ".join(advisory["fix_versions"]) or "no version yet"
            print(f"{package['name']} {package['version']}: {advisory['id']}, fixed in {fixed}")
    unknown = [f"{package['name']} ({package['skip_reason']})" for package in packages if "skip_reason" in package]
    if unknown:
        print(f"not in the database: {'; '.join(unknown)}")
    if len(unknown) == len(packages):
        print("audit: NOT DONE, the advisory database has none of the packages", file=sys.stderr)
        return 0 if lenient else 2
    found = sum(len(package.get("vulns", ())) for package in packages)
    print(f"audit: {len(packages) - len(unknown)} packages, {found} advisories")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
