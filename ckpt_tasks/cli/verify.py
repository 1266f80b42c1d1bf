"""`ckpt verify`: read everything back; list what is damaged and what is orphaned."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ckpt_tasks.cli.facts import RunOrCheckpointArgument, parse_target
from ckpt_tasks.cli.ls import title
from ckpt_tasks.cli.output import JsonOption, Output, output, reading, table
from ckpt_tasks.report.words import age, count, printable, size, span
from ckpt_tasks.storage.port import WatchedStore

if TYPE_CHECKING:
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.reading.reading import Run
    from ckpt_tasks.upkeep.upkeep import RunFaults

__all__ = ["verify"]

_NAMES_SHOWN = 8


def verify(target: RunOrCheckpointArgument, as_json: JsonOption = False) -> None:
    """Read a run or one checkpoint back and list what is damaged.

    Exits with 1 if anything is. Checks sizes, headers and the digests of all bytes, and that the stored regions make
    whole tensors; of a run also the ledger and the evaluations. Orphaned objects are listed, and are not a fault.
    """
    with output(as_json) as out:
        parsed = parse_target(target)
        run = parsed.open()
        only = None if parsed.which is None else run.find(parsed.which)
        began = time.monotonic()
        faults, size_bytes = _read(out, run, only)
        took_s = time.monotonic() - began
        out.data(_facts(run, faults, size_bytes, took_s))
        if not as_json:
            out.print(title(run), _listing(faults))
            _print_rest(out, run, faults, only)
            _print_verdict(out, faults, f"{size(size_bytes)} read in {span(took_s)}")
        if not faults.good:
            out.fail()


def _read(out: Output, run: Run, only: Checkpoint | None) -> tuple[RunFaults, int]:
    from ckpt_tasks.ledger.history import History
    from ckpt_tasks.upkeep.upkeep import RunFaults, verify_checkpoint, verify_run_directory

    live = [only] if only else run.checkpoints()
    done = [0]
    with reading(out, "verifying", sum(c.size_bytes for c in live)) as on_progress:

        def both(size_bytes: int) -> None:
            done[0] += size_bytes
            on_progress(size_bytes)

        store = WatchedStore(run.history.store, both)
        if only is None:
            return verify_run_directory(History(store)), done[0]
        checkpoints = {only.manifest_digest: (only, tuple(verify_checkpoint(store, only)))}
        return RunFaults(checkpoints, (), ()), done[0]


def _facts(run: Run, faults: RunFaults, size_bytes: int, took_s: float) -> dict[str, Any]:
    return {
        "run_key": run.run_key,
        "checkpoint_dir": run.history.store.url,
        "good": faults.good,
        "checkpoints": [
            {"step": c.step, "manifest_digest": digest, "good": not wrong, "faults": list(wrong)}
            for digest, (c, wrong) in faults.checkpoints.items()
        ],
        "damaged": list(faults.damaged),
        "orphans": list(faults.orphans),
        "read_bytes": size_bytes,
        "took_s": round(took_s, 3),
    }


def _listing(faults: RunFaults) -> Any:
    made = table("step", "saved", "size", "result", right=("step", "size"))
    for checkpoint, wrong in faults.checkpoints.values():
        place = checkpoint.manifest.rpartition("/")[0] + "/"
        result = "\n".join(printable(fault.replace(place, "")) for fault in wrong[:_NAMES_SHOWN])
        if len(wrong) > _NAMES_SHOWN:
            result += f"\n… and {len(wrong) - _NAMES_SHOWN} more (--json)"
        cells = (str(checkpoint.step), age(checkpoint.saved_at), size(checkpoint.size_bytes))
        made.add_row(*cells, result or "good", style="red" if wrong else "")
    return made


def _print_rest(out: Output, run: Run, faults: RunFaults, only: Checkpoint | None) -> None:
    from rich.text import Text

    if faults.damaged:
        out.print(Text(f"Damaged beside the checkpoints: {count(len(faults.damaged), 'object')}", style="red"))
        out.print(*(Text(f"  {name}", style="red") for name in _some(faults.damaged)))
    if faults.orphans:
        out.print(Text(f"Orphaned, the next owner deletes them: {count(len(faults.orphans), 'object')}", style="dim"))
        out.print(*(Text(f"  {name}", style="dim") for name in _some(faults.orphans)))


def _print_verdict(out: Output, faults: RunFaults, work: str) -> None:
    from rich.text import Text

    bad = sum(1 for _, wrong in faults.checkpoints.values() if wrong)
    if faults.good:
        good = count(len(faults.checkpoints), "checkpoint")
        out.print(Text.assemble(("Good", "bold green"), f": {good}, {work}."))
    elif bad:
        verdict = f": {bad} of {count(len(faults.checkpoints), 'checkpoint')}, {work}."
        left = bad < len(faults.checkpoints)
        then = " A restore passes over them." if left else " There is none that could be restored."
        out.print(Text.assemble(("Damaged", "bold red"), verdict, then))
    else:
        out.print(
            Text.assemble(("Damaged", "bold red"), f": the checkpoints are good, the run's records are not, {work}.")
        )


def _some(names: tuple[str, ...]) -> list[str]:
    more = [f"… and {len(names) - _NAMES_SHOWN} more (--json)"] if len(names) > _NAMES_SHOWN else []
    return [*(printable(name) for name in names[:_NAMES_SHOWN]), *more]
