"""Run the benchmarks: `python -m benchmarks [--tiny] [--rounds N] [--only NAME …] [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import (
    cadence,
    dcp,
    frameworks,
    gang,
    hooks,
    ledger,
    loop,
    many,
    ranks,
    resumes,
    reuse,
    save_restore,
    scale,
    stall,
    tables,
)
from benchmarks.peers import OURS

__all__ = ["main", "reference"]

_CONSOLE = Console()


_TABLES = {
    "save_restore": save_restore,
    "stall": stall,
    "loop": loop,
    "resumes": resumes,
    "reuse": reuse,
    "many": many,
    "ledger": ledger,
    "ranks": ranks,
    "dcp": dcp,
    "frameworks": frameworks,
    "hooks": hooks,
    "scale": scale,
    "tables": tables,
}
_NAMES = [*_TABLES, "gang", "cadence", "prefect"]
_CHOICES = [*_NAMES, "s3"]  # needs a server: `make bench-s3`


def main(argv: list[str] | None = None) -> None:
    """Measure what was asked for, print it, and write it as JSON where a file is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a state of some KiB: checks that the benchmarks run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", help="where the state lives: cpu or cuda")
    parser.add_argument("--only", choices=_CHOICES, nargs="+", default=_NAMES, help="some benchmarks instead of all")
    parser.add_argument("--dir", type=Path, help="where to write (default: a temporary directory here)")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args(argv)
    figures: dict[str, Any] = {"machine": _machine()}
    with tempfile.TemporaryDirectory(dir=options.dir or Path.cwd(), prefix=".bench-") as directory:
        for name in options.only:
            figures[name] = _measure(name, Path(directory) / name, options)
            _show(name, figures[name])
    _CONSOLE.print(", ".join(f"{name} {value}" for name, value in figures["machine"].items()), style="dim")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def reference(names: Iterable[str]) -> str | None:
    """Name the contender that others are ratios to: ours, and none of its variants, which have a comma in their names.

    Contenders stand in the order in which chance has put them.
    """
    return next((name for name in names if name.startswith(OURS) and not name.startswith(f"{OURS},")), None)


def _measure(name: str, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    if name == "s3":
        from benchmarks import s3  # brings the clients that we are compared with

        return s3.measure(directory, tiny=options.tiny, rounds=options.rounds, device=options.device)
    if name in _TABLES:
        measure: Callable[..., dict[str, Any]] = _TABLES[name].measure
        return measure(directory, tiny=options.tiny, rounds=options.rounds, device=options.device)
    if name == "gang":
        return gang.measure(directory, tiny=options.tiny, rounds=options.rounds)
    if name == "cadence":
        return cadence.measure(tiny=options.tiny)
    from benchmarks import prefect_overhead  # not on a machine that has no Prefect

    return prefect_overhead.measure(directory, tiny=options.tiny, rounds=options.rounds)


def _show(name: str, found: dict[str, Any]) -> None:
    if name in _TABLES or name == "s3":
        for row, cells in found["rows"].items():
            _table(row, cells, found)
        for contender, share in found.get("written", {}).items():
            _CONSOLE.print(f"{contender} writes {share:.2%} of the state; {found['changing']:.2%} of it can change")
        for what, ratio in found.get("ratios", {}).items():
            _CONSOLE.print(f"{what}: {ratio:.3f}")
        for contender, why in found.get("absent", {}).items():
            _CONSOLE.print(f"{contender}: {why}", style="dim")
    elif name == "gang":
        for what, value in found.items():
            _CONSOLE.print(f"{what}: {value if isinstance(value, dict) else f'{value:.4f}'}")
    elif name == "cadence":
        _CONSOLE.print(f"cadence auto falls at most {100 * found['worst']:.2f} % short of the best fixed interval")
    else:
        for cut in found.values():
            _CONSOLE.print(
                f"Prefect against the bare loop, {cut['batches']} batches of {cut['batch_s']} s with a save each: "
                f"{100 * cut['overhead']:+.2f} % wall time ({1000 * cut['per_batch_s']:.1f} ms a batch)"
            )


def _table(row: str, cells: dict[str, dict[str, float]], found: dict[str, Any]) -> None:
    named = reference(cells)
    ours = cells[named]["median_s"] if named is not None else None
    size = f"{found['size_bytes'] / 2**20:.0f} MiB, " if found["size_bytes"] else ""
    table = Table(
        title=f"{row}: {size}{found['rounds']} rounds, {found['device']}",
        title_justify="left",
    )
    for name, justify in (("", "left"), ("median", "right"), ("min – max", "right"), ("× ckpt-tasks", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, times in sorted(cells.items(), key=lambda cell: cell[1]["median_s"]):
        ratio = f"{times['median_s'] / ours:.2f}" if ours and ours > 0 else ""
        table.add_row(name, f"{times['median_s']:.4f} s", f"{times['min_s']:.4f} – {times['max_s']:.4f}", ratio)
    _CONSOLE.print(table)


def _machine() -> dict[str, str]:
    return {
        "cpus": str(os.cpu_count()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


if __name__ == "__main__":
    main()
