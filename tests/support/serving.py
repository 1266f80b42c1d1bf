"""The page of `ckpt serve`, served from this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_tasks.cli.serving.run_table import RunTable
from ckpt_tasks.cli.serving.server import PageServer
from ckpt_tasks.storage.local import LocalStore

# An expression: the names in the table.
ROWS = "[...document.querySelectorAll('#table tbody tr .name')].map(cell => cell.textContent)"


@contextmanager
def served(root: Path) -> Iterator[str]:
    """Serve the page of a directory, and yield its address."""
    table = RunTable(LocalStore(root))
    with PageServer(table, "127.0.0.1", 0, None) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        table.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def drawn_of(*names: str) -> str:
    """An expression: the first chart has values of these runs."""
    return " && ".join(f"document.querySelector('.chart-canvas').ariaLabel.includes('{one} ends')" for one in names)
