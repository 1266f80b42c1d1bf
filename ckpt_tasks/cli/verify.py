"""`ckpt verify`, `restore-drill`, `verify-resume`, `chaos`, `bisect`: prove what is stored, and what trains it."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.arguments import (
    CheckpointArgument,
    JsonOption,
    RunArgument,
    RunOrCheckpointArgument,
    argument,
    option,
    parse_target,
)
from ckpt_tasks.cli.output import Column, Output, column, first, listing, output, reading, row_facts, title
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.report.words import age, count, drill_words, size, span
from ckpt_tasks.storage.port import WatchedStore

if TYPE_CHECKING:
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.proving.proof import Proof
    from ckpt_tasks.reading.reading import Run
    from ckpt_tasks.upkeep.upkeep import RunFaults

_FAULTS_SHOWN = 8
_DIFFERENCES_SHOWN = 5

HistoryOption = Annotated[bool, typer.Option("--history", help="on a server, read every ledger entry")]


def verify(target: RunOrCheckpointArgument, history: HistoryOption = False, as_json: JsonOption = False) -> None:
    """Read DIR or DIR@STEP back, and list what is damaged.

    Exits with 1 if anything is. Checks sizes, headers and the digests of all bytes, and that the stored regions make
    whole tensors; of a run also the evaluations and the ledger: on a server the entries that the checkpoints rest on,
    with --history, and in a directory, all. Orphaned objects are listed, and are not a fault.
    """
    with output(as_json) as out:
        parsed = parse_target(target)
        run = parsed.open()
        only = None if parsed.which is None else run.find(parsed.which)
        began = time.monotonic()
        faults, size_bytes = _read(out, run, only, history or None)
        took_s = time.monotonic() - began
        facts = {
            "run_key": run.run_key,
            "checkpoint_dir": run.history.store.url,
            "good": faults.good,
            "checkpoints": row_facts(_COLUMNS, faults.checkpoints.values()),
            "damaged": list(faults.damaged),
            "orphans": list(faults.orphans),
            "unread_entries": faults.unread,
            "read_bytes": size_bytes,
            "took_s": round(took_s, 3),
        }
        out.answer(facts, _parts(run, faults, f"{size(size_bytes)} read in {span(took_s)}"))
        out.fail(not faults.good)


def _read(out: Output, run: Run, only: Checkpoint | None, whole: bool | None) -> tuple[RunFaults, int]:
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
            return verify_run_directory(History(store), whole=whole), done[0]
        checkpoints = {only.manifest_digest: (only, tuple(verify_checkpoint(store, only)))}
        return RunFaults(checkpoints, (), ()), done[0]


def _result(row: tuple[Checkpoint, tuple[str, ...]]) -> str:
    place = row[0].manifest.rpartition("/")[0] + "/"
    return "\n".join(first([fault.replace(place, "") for fault in row[1]], _FAULTS_SHOWN)) or "good"


_COLUMNS = (
    Column("step", "step", lambda row: row[0].step, numbers=True),
    Column("manifest_digest", None, lambda row: row[0].manifest_digest),
    Column("good", None, lambda row: not row[1]),
    Column("faults", None, lambda row: list(row[1])),
    column("saved", lambda row: row[0].saved_at, age),
    column("size", lambda row: row[0].size_bytes, size, numbers=True),
    column("result", _result),
)


def _parts(run: Run, faults: RunFaults, work: str) -> Iterator[Any]:
    yield title(run)
    yield listing(_COLUMNS, faults.checkpoints.values(), lambda row: "red" if row[1] else "")
    for names, what, style in (
        (faults.damaged, "Damaged beside the checkpoints", "red"),
        (faults.orphans, "Orphaned, the next owner deletes them", "dim"),
    ):
        if names:
            yield f"{what}: {count(len(names), 'object')}", style
            yield from ((f"  {name}", style) for name in first(names, _FAULTS_SHOWN))
    if faults.unread:
        older = count(faults.unread, "older ledger entry", "older ledger entries")
        yield f"Not read without --history: {older}", "dim"
    bad, checked = sum(1 for _, wrong in faults.checkpoints.values() if wrong), len(faults.checkpoints)
    if faults.good:
        yield [("Good", "bold green"), f": {count(checked, 'checkpoint')}, {work}."]
    elif bad:
        then = " A restore passes over them." if bad < checked else " There is none that could be restored."
        yield [("Damaged", "bold red"), f": {bad} of {count(checked, 'checkpoint')}, {work}.{then}"]
    else:
        yield [("Damaged", "bold red"), f": the checkpoints are good, the run's records are not, {work}."]


# ── restore-drill ────────────────────────────────────────────────────────────────────────────────────────────────


def restore_drill(
    target: CheckpointArgument,
    program: Annotated[
        str | None, option("--program", "MODULE:PROGRAM", "the program [default: the run's]", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Restore DIR into its program in a fresh process.

    The process is one of this host, and the run keeps the result. Restored is the newest checkpoint, or the one that
    @STEP names. Exits with 1 if this host cannot restore it: damage, a program that cannot be built or does not fit.
    `ckpt ls` and `ckpt doctor` show the last good drill. It takes nothing from a process that trains the run, and needs
    as much memory as the program's state. It runs the program's code.
    """
    from ckpt_tasks.session.drill import drill_run
    from ckpt_tasks.storage.locations import Location

    with output(as_json) as out:
        parsed = parse_target(target)
        run = parsed.open()
        drill = drill_run(Location(parsed.checkpoint_dir), program, which=parsed.which or "latest")
        facts = {"run_key": run.run_key, "checkpoint_dir": run.history.store.url, "good": drill.fault is None}
        out.answer({**facts, **asdict(drill)}, [title(run), (drill_words(drill), "red" if drill.fault else "green")])
        out.fail(drill.fault is not None)


# ── verify-resume ────────────────────────────────────────────────────────────────────────────────────────────────


def verify_resume(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="MODULE:PROGRAM | -- COMMAND…", help="a program, as `ckpt train` takes it; or a command"
        ),
    ],
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="how many steps to train a program [default: 12]")
    ] = None,
    params: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="a parameter of the program; the value as JSON has it"),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="train a program on as many processes of this host [default: 1]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a program twice, kill and resume one, compare.

    One of the two trains without a break. The other is killed (SIGKILL) and resumed twice, each time in a new process.
    After every step the state, the metrics and the random streams are compared, value by value, and at the end the
    evaluation "quick". Exits with 1 if something differs, and names the first such value and the likely cause.

    A command, `ckpt verify-resume -- python train.py --dir {run}`, is a script of your own with a Checkpointer. It is
    told where its run is to be by {run} among its words, or by the environment variable CKPT_RUN. Compared are the
    metrics of every step and the whole last checkpoint.
    """
    with output(as_json) as out:
        proof = _proof(program, steps, params or [], ranks)
        out.answer({"good": proof.good, **asdict(proof)}, _words(proof, program))
        out.fail(proof.difference is not None)


# ── chaos ────────────────────────────────────────────────────────────────────────────────────────────────────────


def chaos(
    command: Annotated[list[str], argument("-- COMMAND…", "a script of your own with a Checkpointer")],
    rounds: Annotated[int, option("--rounds", "N", "how many faults")] = 6,
    seed: Annotated[int | None, option("--seed", "N", "draw the same faults again [default: at random]")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a script through faults, compare its end.

    The other end is that of a run without any. It runs in scratch directories, told as for `ckpt verify-resume`: by
    {run} among its words, or by CKPT_RUN. Once it runs without a break; once it is killed, told to end (SIGTERM),
    paused, and has a full disk, each at a random time after a commit, and is started again when it has ended. Exits
    with 1 if the metrics of a step or the last checkpoint differ, or if something is damaged. Slow and failing servers
    and clocks that jump are not tried.
    """
    import random

    from ckpt_tasks.proving.chaos import Hit, Verdict
    from ckpt_tasks.proving.chaos import chaos as run_through

    def tell(hit: Hit) -> None:
        then = "it went on" if hit.status is None else f"it ended with {hit.status}, and was started again"
        out.print(f"{hit.fault} after step {hit.step}: {then}")

    with output(as_json) as out:
        drawn = random.randrange(1 << 16) if seed is None else seed
        verdict: Verdict = run_through(command, seed=drawn, rounds=rounds, on_hit=tell)
        out.answer({"good": verdict.good, **asdict(verdict)}, _verdict(verdict))
        out.fail(not verdict.good)


def _verdict(verdict: Any) -> Iterator[Any]:
    again = f"--seed {verdict.seed} draws the same faults."
    if verdict.damaged:
        yield "Damaged: " + "; ".join(first(verdict.damaged, _FAULTS_SHOWN)), "bold red"
    if (one := verdict.proof.difference) is not None:
        yield f"Different from step {one.step} on: {', '.join(one.what[:_DIFFERENCES_SHOWN])}. {again}", "bold red"
        yield f"Likely cause: {one.cause}."
    elif not verdict.damaged:
        faults = count(len(verdict.hits), "fault")
        yield f"Equal bit for bit after {faults}: {verdict.proof.values} values, {verdict.proof.steps} steps. {again}"


# ── bisect ───────────────────────────────────────────────────────────────────────────────────────────────────────


def bisect(
    directory: RunArgument,
    command: Annotated[list[str] | None, argument("-- COMMAND…", "a test: status 0 passes, 1 to 124 fail")] = None,
    *,
    test: Annotated[
        str | None,
        option("--test", "MODULE:FUNCTION", "a test in Python instead of a command: program → True or False"),
    ] = None,
    program: Annotated[
        str | None, option("--program", "MODULE:PROGRAM", "the program [default: the run's]", show_default=False)
    ] = None,
    params: Annotated[list[str] | None, option("--set", "NAME=VALUE", "a parameter of the program")] = None,
    replay: Annotated[
        bool,
        option("--replay", None, "train the steps after the last good checkpoint again, and name the first that fails"),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the first checkpoint at which a test fails.

    The oldest checkpoint has to pass and the newest to fail; between them the search halves. In the command,
    {checkpoint} is replaced by DIR@STEP, and {export} by the path of a safetensors file of the weights. No prune takes
    a checkpoint while it is tried. --replay trains a scratch copy from the last good checkpoint on, with a checkpoint
    for each step.
    """
    from ckpt_tasks.proving.bisect import Bisection, bisect_run, command_test, function_test, program_of
    from ckpt_tasks.proving.bisect import replay as replayed

    with output(as_json) as out:
        if (test is None) == (not command):
            raise ConfigError("a test is wanted, and only one", hint="Give --test MODULE:FUNCTION, or -- COMMAND.")
        run = parse_target(directory).open()
        built = program_of(run, program, dict(map(_parsed, params or []))) if test is not None or replay else None
        passes = function_test(test, built) if test is not None and built else command_test(command or [])

        def tell(step: int, good: bool) -> None:
            out.print((f"step {step}: {'passes' if good else 'fails'}", "green" if good else "red"))

        between: Bisection = bisect_run(run, passes, tell)
        tests = between.tried
        if replay and built and not between.exact:
            out.print(f"Training steps {between.good_step + 1} to {between.bad_step} again.")
            between = replayed(run, between, built, passes, tell)
            tests += between.tried
        more = "" if between.exact else " --replay names the step between them."
        words = f"The test passes at step {between.good_step} and fails at step {between.bad_step}.{more}"
        tried = [{"step": step, "passes": good} for step, good in tests]
        facts = {"good_step": between.good_step, "bad_step": between.bad_step, "exact": between.exact, "tests": tried}
        out.answer({"run_key": run.run_key, "checkpoint_dir": run.history.store.url, **facts}, [words])


def _words(proof: Proof, program: list[str]) -> Iterator[str]:
    of_program, killed = _is_program(program), " and ".join(map(str, proof.killed_within))
    when = "killed within steps" if of_program else "killed after the commits of steps"
    yield f"{shlex.join(program)}: {proof.steps} steps, {when} {killed}, resumed twice."
    if proof.difference is None:
        what = "Every step is" if of_program else "Metrics of all steps and the last checkpoint are"
        streams = "all streams" if of_program else "torch's streams"
        yield f"{what} equal bit for bit: {proof.values} values of state and metrics, and {streams}."
        if proof.outside:
            changed = f"Not in the state, and changed by a resume: {', '.join(proof.outside)}. "
            yield f"{changed}If an evaluation, a later step or the end reads it, put it into the state."
        return
    one = proof.difference
    more = f" and {len(one.what) - _DIFFERENCES_SHOWN} more" if len(one.what) > _DIFFERENCES_SHOWN else ""
    when = ("before any kill", "after the first resume", "after the second resume")[one.after_kills]
    yield f"Different from step {one.step} on, {when}: {', '.join(one.what[:_DIFFERENCES_SHOWN])}{more}."
    yield f"Likely cause: {one.cause}."


def _proof(program: list[str], steps: int | None, params: list[str], ranks: int | None) -> Proof:
    if _is_program(program):
        from ckpt_tasks.proving.proof import verify_resume as prove

        given = {"steps": steps, "ranks": ranks}
        return prove(program[0], dict(map(_parsed, params)), **{k: n for k, n in given.items() if n is not None})
    if steps is not None or ranks is not None or params:
        raise ConfigError(
            "--steps, --set and --ranks are for a program", hint="Give a command its own options, after the --."
        )
    from ckpt_tasks.proving.script import verify_script

    return verify_script(program)


def _is_program(words: list[str]) -> bool:
    """Return True for MODULE:PROGRAM; a command has several words or names a file."""
    return len(words) == 1 and shutil.which(words[0]) is None


def _parsed(change: str) -> tuple[str, Any]:
    name, equals, text = change.partition("=")
    if not (equals and name.isidentifier()):
        raise ConfigError(f"{change!r:.100} sets no parameter", hint="Write --set lr=1e-4, a plain name.")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text
