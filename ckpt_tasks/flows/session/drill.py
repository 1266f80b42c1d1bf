"""A restore drill: restore a run's checkpoint into its program, in fresh processes of this host, and record the result.

A drill has one process for each rank that saved the checkpoint. It is a reader: it leases the checkpoint, and does not
disturb a process that trains. A process's command is `python -m ckpt_tasks.flows.session.drill ORDER RANK ANSWER`:
ORDER is a file with the order, ANSWER a file for the answer (both JSON).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_tasks import errors
from ckpt_tasks.checkpoint.ranks.connection import open_store
from ckpt_tasks.checkpoint.ranks.exchange import all_or_none, find_exchange
from ckpt_tasks.checkpoint.restore.leasing import leased
from ckpt_tasks.checkpoint.restore.reading import Run, open_run
from ckpt_tasks.errors import CkptError, ConfigError, IntegrityError, ObjectNotFoundError, StoreError
from ckpt_tasks.flows.session.local_session import build_from_seed, find_program
from ckpt_tasks.flows.session.parameters import effective_params
from ckpt_tasks.format.records import Checkpoint, RunCheck
from ckpt_tasks.run.opening import open_checkpoint
from ckpt_tasks.run.upkeep.verifying import record_check
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.system import now_iso, system

_LONGEST_FAULT = 2000
_HOST = "127.0.0.1"
_LOOK_S = 0.05
_END_S = 10.0  # Before a rank ends, it waits this long for the other ranks to read its answers.
_JOIN_S = 300.0
_DEADLINE_S = 3600.0  # Ranks may wait this long for the slowest one's restore.


def drill_run(
    location: Location, program: str | None = None, *, run_key: str | None = None, which: int | str = "latest"
) -> RunCheck:
    """Restore a checkpoint into a program ("module:Factory"; None: the run's own) in fresh processes; record it.

    The `fault` of the drill says why this host cannot restore it: damage, a program that cannot be built or does not
    fit, a killed process. Raises ConfigError without a program, CheckpointNotFoundError, StoreError if the store does
    not answer, and ProgramError if `program` cannot be built; nothing is recorded then.
    """
    run = open_run(location, run_key)
    checkpoint, recorded = run.find(which), run.head().state.program
    if program is None and recorded is None:
        raise ConfigError("the run does not name its program", hint="Name it: --program MODULE:PROGRAM.")
    named = {"program": recorded if program is None else program, "given": program is not None}
    order = {"location": vars(location), "identity": checkpoint.manifest_digest, **named}
    ranks = _ranks_of(run, checkpoint)
    at, host = now_iso(), system().host()
    with leased(run, checkpoint, f"restore drill on {host}"):
        seconds, fault = _answer(order, ranks)
        figures = {"step": checkpoint.step, "ranks": ranks, **seconds}
        drill = RunCheck(kind="drill", at=at, host=host, fault=fault, figures=figures)
        record_check(run.history, drill)
    return drill


def _ranks_of(run: Run, checkpoint: Checkpoint) -> int:
    """Return how many ranks have saved a checkpoint; 1 if it is damaged, which the restore then reports."""
    try:
        return open_checkpoint(run.history.store, checkpoint).manifest.world_size
    except (IntegrityError, ObjectNotFoundError):
        return 1


def _answer(order: Mapping[str, Any], ranks: int) -> tuple[dict[str, float], str | None]:
    """Have ranks carry out an order; return the slowest rank's seconds, or the first fault. Raises a rank's error."""
    with tempfile.TemporaryDirectory(prefix="ckpt-drill-") as place, socket.socket() as listening:
        listening.bind((_HOST, 0))  # Torch's own store would listen on every interface.
        listening.listen()
        given, port = Path(place, "order"), listening.getsockname()[1]
        meeting = {"ranks": ranks, "port": port, "listening": listening.fileno()}
        given.write_text(json.dumps({**order, **meeting}), encoding="utf-8")
        children = [_Rank(Path(place), rank, ranks, listening.fileno()) for rank in range(ranks)]
        answers = [child.answer() for child in _ended(children)]
    first = answers[0]
    if "error" in first:
        kind, message, hint = first["error"]
        raise getattr(errors, kind)(message, hint=hint)
    if "fault" in first:
        return {}, first["fault"]
    return {name: max(answer[name] for answer in answers) for name in first}, None


class _Rank:
    """The process of one rank."""

    def __init__(self, place: Path, rank: int, ranks: int, listening: int):
        self._answer, self._said = place / f"answer-{rank}", place / f"said-{rank}"
        # The child can import whatever this process can.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
        if ranks > 1:
            of_gang = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            environment |= {name: str(value) for name, value in of_gang.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
        command = [
            sys.executable,
            "-m",
            "ckpt_tasks.flows.session.drill",
            str(place / "order"),
            str(rank),
            str(self._answer),
        ]
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=said, pass_fds=[listening]
            )

    def has_ended(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the process to end; return True if it has ended."""
        try:
            return self.process.wait(timeout_s) is not None
        except subprocess.TimeoutExpired:
            return False

    @property
    def is_good(self) -> bool:
        """True if the rank has restored its part."""
        return "restore_s" in self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the answer; without one, a fault that says how the process has ended."""
        if not self._answer.exists():
            said = self._said.read_text(errors="replace").strip().splitlines()
            ended = f"the process ended with {self.process.returncode}: {said[-1] if said else ''}"
            return {"fault": ended[:_LONGEST_FAULT]}
        answered: dict[str, Any] = json.loads(self._answer.read_text(encoding="utf-8"))
        return answered


def _ended(children: list[_Rank]) -> list[_Rank]:
    """Wait for ranks and return them; once one has failed, kill those that may wait for it, and return it first."""
    running, ended = [*children], list[_Rank]()
    try:
        while running:
            ended += [child for child in running if child.has_ended(_LOOK_S)]
            running = [child for child in running if child not in ended]
            if not all(child.is_good for child in ended):
                ended.sort(key=lambda child: child.is_good)
                return ended
    finally:
        for child in running:
            child.process.kill()
            child.process.wait()
    return ended


def _restored(run: Run, checkpoint: Checkpoint, order: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Build the program and restore all of its state, or this rank's part of it; return how long it took."""
    from ckpt_tasks.checkpoint.restore.restore import restore_one

    name = order["program"]
    if order["ranks"] > 1:
        _join(rank, order["ranks"], order["port"], order["listening"])
    program = build_from_seed(name, effective_params(find_program(name), run.head().state.params, None))
    start_s, ranks = system().age_s(), find_exchange(None, _DEADLINE_S)
    with all_or_none(ranks, "drill", _DEADLINE_S) as together:
        report = restore_one(run.history.store, checkpoint, program.state, together=together)
        together()
    ranks.drain(_END_S)
    return {"start_s": round(start_s, 6), "restore_s": round(report.seconds, 6)}


def _join(rank: int, ranks: int, port: int, listening: int) -> None:
    """Join the process group of the drill's ranks: NCCL if each of them has a device, else Gloo."""
    import torch
    import torch.distributed as dist

    has_devices = torch.cuda.device_count() >= ranks
    if has_devices:
        torch.cuda.set_device(rank)
    fd = listening if rank == 0 else None
    store = open_store(_HOST, port, ranks, holds=rank == 0, join_s=_JOIN_S, listening_fd=fd)
    backend = "cuda:nccl,cpu:gloo" if has_devices else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def main(given: str, rank: str, answer: str) -> None:
    """Carry out an order as one of its ranks, and write the answer."""
    order = json.loads(Path(given).read_text(encoding="utf-8"))
    try:
        run = open_run(Location(**order["location"]))
        checkpoint = next(c for c in run.checkpoints() if c.manifest_digest == order["identity"])
        answered = _restored(run, checkpoint, order, int(rank))
    except Exception as error:  # noqa: BLE001 (the parent raises or records the error)
        outage = isinstance(error, StoreError) and not isinstance(error, ObjectNotFoundError)
        mistake = order["given"] and isinstance(error, ConfigError)  # The user may have misspelled the name.
        if isinstance(error, CkptError) and (outage or mistake):
            answered = {"error": [type(error).__name__, error.message, error.hint]}
        else:
            answered = {"fault": f"{type(error).__name__}: {error}"[:_LONGEST_FAULT]}
    Path(answer).write_text(json.dumps(answered), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
