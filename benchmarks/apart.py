"""Contenders in processes of their own: no one's threads, caches or imports are another's, and a first save is a first.

A module that measures so is a program too: `python -m MODULE DIRECTORY CONTENDER… [--tiny] [--device cuda]` measures
each contender once and prints the reports, lists of seconds by what was timed, as its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.peers import PEERS, is_installed

__all__ = ["Absent", "Report", "Reports", "answer", "ask", "by_row", "collect", "summary"]

Report = dict[str, list[float]]  # what was timed → seconds
Reports = dict[str, Report]  # contender → report
Absent = dict[str, str]  # contender → why it has no report

_CHECKOUT = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 900.0


def collect(
    module: str, contenders: Sequence[str], directory: Path, *, tiny: bool, rounds: int, device: str
) -> tuple[Reports, Absent]:
    """Measure every contender `rounds` times in shuffled order; a peer that is not installed or fails has no report.

    A failure of ours or of a limit is raised. Tiny: one process for all contenders, which checks that they work and
    measures nothing; every failure is raised.
    """
    absent = {name: "not installed" for name in contenders if name in PEERS and not is_installed(PEERS[name])}
    found: Reports = {}
    with _progress() as progress:
        task = progress.add_task("", total=rounds * (1 if tiny else len(contenders) - len(absent)))
        for _ in range(rounds):
            present = [name for name in contenders if name not in absent]
            random.shuffle(present)
            for names in [present] if tiny else [[name] for name in present]:
                progress.update(task, description=f"{module.rpartition('.')[2]}: {', '.join(names)}")
                try:
                    reports = ask(module, names, directory, tiny=tiny, device=device)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    if tiny or names[0] not in PEERS:
                        raise
                    found.pop(names[0], None)
                    absent[names[0]] = f"failed: {str(error).strip().splitlines()[-1]}"
                    continue
                progress.advance(task)
                for name, report in reports.items():
                    for timed, seconds in report.items():
                        found.setdefault(name, {}).setdefault(timed, []).extend(seconds)
    return found, absent


def _progress() -> Progress:
    """Show in a terminal what is measured, and when it will be done: a contender may take a minute."""
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(
        *columns, console=Console(stderr=True), transient=True, refresh_per_second=1, disable=not sys.stderr.isatty()
    )


def ask(module: str, contenders: Sequence[str], directory: Path, *, tiny: bool, device: str) -> Reports:
    """Run a module for some contenders, nothing else being written; raise RuntimeError where it fails."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    os.sync()
    command = [sys.executable, "-m", module, str(directory.resolve()), *contenders, "--device", device]
    done = subprocess.run(
        [*command, *(["--tiny"] if tiny else [])],
        capture_output=True,
        text=True,
        check=False,
        cwd=_CHECKOUT,
        timeout=_TIMEOUT_S,
    )
    shutil.rmtree(directory, ignore_errors=True)
    if done.returncode != 0:
        raise RuntimeError(f"{', '.join(contenders)} ended with status {done.returncode}:\n{done.stderr}")
    reports: Reports = json.loads(done.stdout.splitlines()[-1])
    return reports


def answer(measure: Callable[[str, Path, bool, str], Report]) -> None:
    """Be the process: measure the contenders that the command line names (name, directory, tiny, device)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("contenders", nargs="+")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # DCP's, at every call, that nothing is distributed here
    reports: Reports = {}
    for number, name in enumerate(options.contenders):
        place = options.directory / str(number)
        place.mkdir()
        reports[name] = measure(name, place, options.tiny, options.device)
        shutil.rmtree(place)
    sys.stdout.write("\n" + json.dumps(reports) + "\n")


def by_row(
    reports: Reports, rows: Mapping[str, str], label: Callable[[str, str], str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Arrange reports as tables: `rows` maps what was timed to a row's name; `label` names a contender within it."""
    return {
        row: {label(name, timed): summary(report[timed]) for name, report in reports.items() if timed in report}
        for timed, row in rows.items()
    }


def summary(times: Sequence[float]) -> dict[str, float]:
    """Say the least, the middle and the most of some seconds."""
    return {"min_s": min(times), "median_s": median(times), "max_s": max(times)}
