"""Measure `kqueue export`: `python benchmarks/dataset.py [--evaluations N] [--home DIR] [--out FILE]`.

It starts embedded Postgres in a temporary home, or in `--home`, and fills an empty database like `pages.py`. Then it
exports all evaluations in a separate process, kills this process after its first file, and exports again to the end.
It checks that each evaluation is in the files once, and prints the time and the peak of resident memory as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow.parquet
from pages import fill
from sqlalchemy import text

from kqueue.local.servers import Postgres
from kqueue.store import schema
from kqueue.store.engine import connect


def export(folder: Path, url: str, rows: int, *, until_first_file: bool = False) -> dict[str, Any]:
    """Export in a separate process. Return its seconds and its peak of resident memory in MiB."""
    command = [sys.executable, "-m", "kqueue", "export", str(folder), "--rows", str(rows)]
    begun = time.perf_counter()
    process = subprocess.Popen(command, env=os.environ | {"KQUEUE_DATABASE_URL": url}, stdout=subprocess.DEVNULL)
    while until_first_file and not (folder / "data" / "train-00000.parquet").exists():
        time.sleep(0.01)
    if until_first_file:
        process.kill()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode and not until_first_file:
        raise SystemExit(f"`kqueue export` ended with status {process.returncode}")
    return {"seconds": round(time.perf_counter() - begun, 1), "peak_mib": round(used.ru_maxrss / 1024, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=200_000, help="finished evaluations in the database")
    parser.add_argument("--rows", type=int, default=50_000, help="rows of a file")
    parser.add_argument("--home", type=Path, help="folder of the database, which is filled if it is empty")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args()
    if not 0 < options.rows < options.evaluations:
        parser.error("more evaluations than rows of a file are needed")
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        postgres = stack.enter_context(Postgres((options.home or temporary).absolute() / "postgres", durable=False))
        schema.upgrade(postgres.url)
        engine = connect(postgres.url, application="benchmark", pool_size=1)
        stack.callback(engine.dispose)
        with engine.connect() as connection:
            is_filled = connection.scalars(text("SELECT EXISTS (SELECT FROM verdicts)")).one()
        if not is_filled:
            fill(engine, options.evaluations, 250, runs=100)
        few = export(temporary / "few", postgres.url, options.rows, until_first_file=True)
        rest = export(temporary / "few", postgres.url, options.rows)
        table = pyarrow.parquet.read_table(temporary / "few" / "data", columns=["evaluation_id"])
        with engine.connect() as connection:
            number = connection.scalars(text("SELECT count(*) FROM verdicts")).one()
        if not len(set(table.column(0).to_pylist())) == table.num_rows == number:
            raise SystemExit(f"{table.num_rows} rows for {number} evaluations")
        size = sum(file.stat().st_size for file in (temporary / "few" / "data").iterdir())
    result = {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "evaluations": number,
        "rows_a_file": options.rows,
        "killed": few,
        "resumed": rest,
        "mib": round(size / 2**20, 1),
    }
    print(json.dumps(result, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
