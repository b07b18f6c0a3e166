"""`make env`: create `.env` from `.env.example` and fill in missing secrets. Uses only the standard library.

It keeps existing values, so run it again after an upgrade that needs another secret. To rotate a secret, empty it in
`.env`, run this, then `docker compose up -d`.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECRET = re.compile(r"^(?P<name>[A-Z_]+_PASSWORD|FLOWER_AUTH)=(?P<value>.*)$")


def main(folder: Path = ROOT) -> int:
    """Write `.env` in ``folder``. Print the names of new secrets, but no secret."""
    file, example = folder / ".env", (folder / ".env.example").read_text().splitlines()
    lines = file.read_text().splitlines() if file.exists() else example
    known = {found["name"] for line in lines if (found := SECRET.match(line))}
    lines += [line for line in example if (found := SECRET.match(line)) and found["name"] not in known]
    made: list[str] = []
    for i, line in enumerate(lines):
        if (found := SECRET.match(line)) and not found["value"].strip():
            # Only letters and digits, because passwords become parts of URLs.
            secret = secrets.token_hex(24)
            lines[i] = f"{found['name']}={'admin:' if found['name'] == 'FLOWER_AUTH' else ''}{secret}"
            made.append(found["name"])
    if made:
        fresh = file.with_name(".env.new")
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write("\n".join(lines) + "\n")
        fresh.replace(file)
    print(f"{file}: " + (f"made {', '.join(made)}" if made else "nothing is missing"))
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
