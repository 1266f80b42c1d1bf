"""Write the tables of a new database of Prefect: `python -m tools.prefect_database`.

Call it with the oldest Prefect that we support: `ckpt_tasks.flows.prefect.embedded` begins new databases with these
tables, and a newer Prefect migrates them, as it migrates those of its users.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from ckpt_tasks.flows.prefect import embedded


def migrated(home: Path) -> str:
    """Return the SQL of the database in a Prefect home, after all migrations of the installed Prefect."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    upgrade = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
    subprocess.run(
        upgrade, env={**environment, "PREFECT_HOME": str(home)}, check=True, capture_output=True, timeout=300
    )
    with closing(sqlite3.connect(home / "prefect.db")) as database:
        return "\n".join(database.iterdump())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        text = migrated(Path(place))
    head = f"-- Prefect {version('prefect')}, by python -m tools.prefect_database"
    Path(embedded.__file__).with_name(embedded.TABLES).write_text(f"{head}\n{text}\n", encoding="utf-8")
