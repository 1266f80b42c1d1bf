"""Run the benchmarks and print one table: `python -m benchmarks [--tiny] [--rounds N] [--only NAME] [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import save_restore

__all__ = ["main"]


def main(argv: list[str] | None = None) -> None:
    """Measure what was asked for, print it, and write it as JSON where a file is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a state of some KiB: checks that the benchmarks run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", help="where the state lives: cpu or cuda")
    parser.add_argument("--only", choices=["save_restore", "prefect"], help="one benchmark instead of all")
    parser.add_argument("--dir", type=Path, help="where to write (default: a temporary directory here)")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args(argv)
    figures: dict[str, Any] = {"machine": _machine()}
    with tempfile.TemporaryDirectory(dir=options.dir or Path.cwd(), prefix=".bench-") as directory:
        if options.only != "prefect":
            figures["save_restore"] = save_restore.measure(
                Path(directory) / "run", tiny=options.tiny, rounds=options.rounds, device=options.device
            )
        if options.only != "save_restore":
            from benchmarks import prefect_overhead  # not on a machine that has no Prefect

            figures["prefect"] = prefect_overhead.measure(
                Path(directory) / "flow", batch_s=0.05 if options.tiny else 2.0, rounds=2 if options.tiny else 5
            )
    _show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def _show(figures: dict[str, Any]) -> None:
    console = Console()
    machine = ", ".join(f"{name} {value}" for name, value in figures["machine"].items())
    if "save_restore" in figures:
        found = figures["save_restore"]
        for row, cells in found["rows"].items():
            ours = next(times["median_s"] for name, times in cells.items() if name.startswith("ckpt-tasks"))
            table = Table(
                title=f"{row}: {found['size_bytes'] / 2**20:.0f} MiB, {found['rounds']} rounds, {found['device']}",
                title_justify="left",
            )
            for name, justify in (("", "left"), ("median", "right"), ("min – max", "right"), ("× ckpt-tasks", "right")):
                table.add_column(name, justify=justify)  # type: ignore[arg-type]
            for name, times in sorted(cells.items(), key=lambda cell: cell[1]["median_s"]):
                table.add_row(
                    name,
                    f"{times['median_s']:.3f} s",
                    f"{times['min_s']:.3f} – {times['max_s']:.3f}",
                    f"{times['median_s'] / ours:.2f}",
                )
            console.print(table)
    if "prefect" in figures:
        found = figures["prefect"]
        console.print(
            f"Prefect against the bare loop, {found['batches']} batches of {found['batch_s']} s with a save each: "
            f"{100 * found['overhead']:+.2f} % wall time ({1000 * found['per_batch_s']:.1f} ms a batch)"
        )
    console.print(machine, style="dim")


def _machine() -> dict[str, str]:
    return {
        "cpus": str(os.cpu_count()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


if __name__ == "__main__":
    main()
