"""`ckpt sync` and `ckpt fork`: a copy of a run, and a new run from a checkpoint of another one."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from ckpt_tasks.cli.arguments import (
    CheckpointArgument,
    DryOption,
    JsonOption,
    KeyOption,
    RunOrCheckpointArgument,
    SingleOption,
    argument,
    ckpt_command,
    name_and_text,
    option,
    parse_target,
    written,
)
from ckpt_tasks.cli.output import Column, Output, column, from_here, grid, listing, output, reading, row_facts, title
from ckpt_tasks.errors import ConfigError, OwnedError
from ckpt_tasks.run.report.words import age, count, fine_span, size

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.restore.reading import Run
    from ckpt_tasks.checkpoint.transfer.fork import ForkPlan
    from ckpt_tasks.checkpoint.transfer.syncing import SyncReport
    from ckpt_tasks.checkpoint.transfer.transfer import Moved
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.storage.port import Store

CopyArgument = Annotated[str, argument("TO", "the target run directory: a new one, or a copy of this run")]
ForkArgument = Annotated[str, argument("TO", "the new run directory")]
ChangeOption = Annotated[
    list[str] | None,
    option("--param", "NAME=VALUE", "a parameter of the program to change; the value as JSON has it"),
]


def sync(
    checkpoint: RunOrCheckpointArgument,
    to: CopyArgument,
    *,
    single_writer: SingleOption = False,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy DIR, or DIR@STEP alone, to TO; list what was copied.

    Without @STEP, copies all live checkpoints, with evaluations and pins. Verifies every byte on the way. Does not copy
    objects that TO has: repeat the command after an interruption, or to copy new checkpoints. Removes nothing from TO,
    and does not bring back what was pruned there. Exits with 1 if anything could not be copied.
    """
    from ckpt_tasks.storage.locations import Location

    with output(as_json) as out:
        parsed = parse_target(checkpoint)
        run = parsed.open()
        only = None if parsed.which is None else run.find(parsed.which)
        place = Location(to).resolve()
        copy_run(out, run, place.open(), only, single_writer=single_writer or place.single_writer, dry_run=dry_run)


def copy_run(
    out: Output,
    run: Run,
    target: Store,
    only: Checkpoint | None = None,
    *,
    single_writer: bool = False,
    dry_run: bool = False,
) -> None:
    """Copy a run or `only` one checkpoint; print the result."""
    began = time.monotonic()
    if dry_run:
        _say_sync(out, run, only, target)
        return
    report = _copy(out, run, only, target, single_writer=single_writer)
    took_s = time.monotonic() - began
    good = not report.faults and (only is None or report.rows[0].outcome in ("copied", "there already"))
    facts = {
        "run_key": run.run_key,
        "from": run.history.store.url,
        "to": target.url,
        "good": good,
        "checkpoints": row_facts(_COLUMNS, report.rows),
        "evaluations": report.evaluations,
        "pins": report.pins,
        "faults": list(report.faults),
        "took_s": round(took_s, 3),
        "leased": not run.read_only,
    }
    out.answer(facts, _parts(run, target, report, took_s))
    out.fail(not good)


def _say_sync(out: Output, run: Run, only: Checkpoint | None, target: Store) -> None:
    from ckpt_tasks.checkpoint.transfer.syncing import plan_sync

    plan = plan_sync(run, target, only)
    steps = [one.step for one in plan.chosen if one.manifest_digest in plan.diff.missing]
    words = f"{count(len(steps), 'checkpoint')} would be copied, at most {size(plan.size_bytes)}."
    facts = {"run_key": run.run_key, "from": run.history.store.url, "to": target.url, "steps": steps}
    out.answer({"dry_run": True, **facts, "size_bytes": plan.size_bytes}, [words])


def _copy(out: Output, run: Run, only: Checkpoint | None, target: Store, *, single_writer: bool) -> SyncReport:
    from ckpt_tasks.checkpoint.transfer.syncing import plan_sync, run_sync

    plan = plan_sync(run, target, only)
    with reading(out, "copying", plan.size_bytes) as on_progress:
        try:
            return run_sync(run, target, plan, single_writer=single_writer, on_progress=on_progress)
        except OwnedError as error:
            error.hint = "Nothing is copied to a run that is training: stop it there, or copy to another directory."
            raise


_STYLES = {"copied": "", "damaged": "red", "refused": "red"}
_COLUMNS = (
    Column("step", "step", lambda row: row.checkpoint.step, numbers=True),
    Column("manifest_digest", None, lambda row: row.checkpoint.manifest_digest),
    column("saved", "checkpoint.saved_at", age),
    column("size", "checkpoint.size_bytes", size, numbers=True),
    Column("outcome", None, lambda row: row.outcome),
    Column("copied_bytes", "copied", lambda row: row.copied_bytes, lambda n: size(n) if n else "", numbers=True),
    Column("found_bytes", None, lambda row: row.found_bytes),
    Column("fault", None, lambda row: row.fault),
    column("result", lambda row: row.outcome + (f", {size(row.found_bytes)} lay there" if row.found_bytes else "")),
)


def _parts(run: Run, target: Store, report: SyncReport, took_s: float) -> Iterator[Any]:
    yield [*title(run), ("  →  ", "dim"), (target.url, "dim")]
    if report.rows:
        yield listing(_COLUMNS, reversed(report.rows), lambda row: _STYLES.get(row.outcome, "dim"))
    yield from ((fault, "red") for fault in report.faults)
    copied = [row for row in report.rows if row.outcome == "copied"]
    more = [count(n, what) for n, what in ((report.evaluations, "evaluation"), (report.pins, "pin")) if n]
    if copied or more:
        moved = size(sum(row.copied_bytes for row in copied))
        summary = ", ".join([f"{count(len(copied), 'checkpoint')} of {len(report.rows)}", *more, moved])
        yield [("Copied", "bold green"), f": {summary} in {fine_span(took_s)}, every byte verified."]
    elif not report.faults:
        yield "There is nothing to copy."
    if report.faults:
        yield [("Not everything", "bold red"), " could be copied. See what is damaged: ckpt verify"]
    yield from _unleased(run)


def _unleased(source: Run) -> Iterator[tuple[str, str]]:
    """Warn if the source could not be written, and so was read without a lease."""
    if source.read_only:
        words = "The source cannot be written: it was read without a lease, so its owner could prune what was read."
        yield words, "yellow"


# ── fork ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def fork(
    checkpoint: CheckpointArgument,
    to: ForkArgument,
    *,
    changes: ChangeOption = None,
    run_key: KeyOption = None,
    single_writer: SingleOption = False,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Begin the run TO with the checkpoint DIR@STEP.

    In one file system nothing is copied: the new run gets hard links. In one S3 store the server copies. Otherwise
    sends and verifies every byte. Afterwards the runs are independent: you may prune or delete either run. After an
    interruption, give the same command again.
    """
    with output(as_json) as out:
        changed, wanted = parse_changes(changes or []), parse_target(checkpoint)
        run = wanted.open()
        _check_changes(run, changed)
        from ckpt_tasks.checkpoint.transfer.fork import find_source, plan_fork, run_fork
        from ckpt_tasks.storage.locations import Location

        place = Location(to).resolve(run_key)
        target, began = place.open(), time.monotonic()
        chosen = find_source(run, wanted.which, target)
        planned = plan_fork(run, chosen, target, changed, run_key)
        if dry_run:
            words = f"{planned.run_key} would begin in {target.url} at step {chosen.step}, {size(chosen.size_bytes)}."
            facts = {"to": target.url, "run_key": planned.run_key, "step": chosen.step, "set": changed}
            out.answer({"dry_run": True, **facts, "size_bytes": chosen.size_bytes}, [words])
            return
        single = single_writer or place.single_writer
        with reading(out, "copying", chosen.size_bytes) as on_progress:
            moved = run_fork(run, target, planned, single_writer=single, on_progress=on_progress)
        took_s = time.monotonic() - began
        origin = planned.origin
        facts = {
            "from": origin.url,
            "from_run_key": origin.run_key,
            "to": target.url,
            "run_key": planned.run_key,
            "step": planned.checkpoint.step,
            "manifest_digest": planned.checkpoint.manifest_digest,
            "set": dict(origin.set),
            "params": None if planned.params is None else dict(planned.params),
            "size_bytes": planned.checkpoint.size_bytes,
            **moved._asdict(),
            "took_s": round(took_s, 3),
            "leased": not run.read_only,
        }
        out.answer(facts, _fork_parts(planned, target, moved, took_s))
        from ckpt_tasks.run.opening import ranks_of

        ranks = ranks_of(target, planned.checkpoint)
        out.print_next(*_next_steps(planned, target.url, run.head().state.program, ranks))
        out.print(*_unleased(run))


def _check_changes(run: Run, changed: Mapping[str, Any]) -> None:
    """Raise ConfigError for changes to a run of a plain loop: the loop would not apply them after a restore."""
    state = run.head().state
    if changed and state.program is None and state.params is None:
        raise ConfigError(
            "--param changes parameters of a program, and no flow has recorded one for this run",
            hint="Fork without --param and change the values in your own loop, after its restore.",
        )


def parse_changes(changes: Sequence[str]) -> dict[str, Any]:
    """Read NAME=VALUE texts; a value that is not JSON is a string.

    Raises ConfigError for a bad name, a repeated name, and a value such as True or .5, which JSON writes differently:
    it would become a string, and the user would notice that late.
    """
    parsed: dict[str, Any] = {}
    for change in changes:
        name, text = name_and_text("--param", change)
        if name in parsed:
            raise ConfigError(f"the parameter {name!r} is set twice")
        parsed[name] = _value(name, text)
    return parsed


def _value(name: str, text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, allow_nan=False)  # Refuse 1e999, which json.loads reads as infinity.
    except (ValueError, RecursionError):
        if text in ("True", "False", "None") or _is_number(text):
            hint = "Write 0.1, 1000, true, false or null; a text that looks like one in quotes: name='\"True\"'."
            raise ConfigError(f"{name}={text!r:.80} is not a value that JSON knows", hint=hint) from None
        return text
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _fork_parts(planned: ForkPlan, target: Store, moved: Moved, took_s: float) -> Iterator[Any]:
    origin = planned.origin
    ways = (
        (moved.linked_bytes, "in files of both runs"),
        (moved.copied_bytes, "copied by the store: `ckpt verify` reads them"),
        (moved.sent_bytes, "sent, every byte verified"),
        (moved.found_bytes, "lay there already"),
    )
    lines = [
        ("from", f"{origin.run_key}  {origin.url}"),
        ("to", f"{planned.run_key}  {target.url}"),
        ("step", str(origin.step)),
        ("bytes", ", ".join(f"{size(size_bytes)} {way}" for size_bytes, way in ways if size_bytes) or "none"),
        ("took", fine_span(took_s)),
    ]
    before = origin.params or {}
    for name, value in origin.set.items():
        lines.append(
            ("set", f"{name} = {written(value)}" + (f" (was {written(before[name])})" if name in before else ""))
        )
    yield grid(lines)
    yield ""
    done = "There already" if planned.done else "Forked"
    yield [(done, "bold green"), ". The two runs stand alone now: either may be deleted."]


def _next_steps(planned: ForkPlan, url: str, program: str | None, ranks: int) -> tuple[str, ...]:
    """Return the commands that train and show the new run; `program` is None if a plain loop trains it."""
    many = ["--ranks", str(ranks)] if ranks > 1 else []
    place = from_here(url)
    chosen = [] if place == f"runs/{planned.run_key}" else ["--checkpoint-dir", place]
    steps = str(2 * planned.checkpoint.step)  # The default of --steps may be less than the run's step.
    training = [ckpt_command(), "train", program or "", "--steps", steps, "--run-key", planned.run_key, *chosen, *many]
    loop = f"your loop, with CheckpointConfig(checkpoint_dir={place!r})"
    return (shlex.join(training) if program else loop, shlex.join([ckpt_command(), "show", place]))
