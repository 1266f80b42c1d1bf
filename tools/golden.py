"""Write the golden runs of this version of the format: `python -m tools.golden`, from the root of a checkout.

A run directory that was checked in is never written again: every later version must read it as it is. Until the first
release the format may still change, and then so may a run: delete `tests/golden/v1/run` (or another), call this again,
and look at the difference. From the first release on a new version of the format gets a directory of its own (`v2/run`,
beside a test that reads both).

Whatever would differ from one machine or moment to the next (host, process, time, random names, seconds waited) is
fixed here, so that two calls with the same versions of Python and torch write the same bytes.
"""

from __future__ import annotations

import platform
import random
import secrets
import shutil
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from functools import partial
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, LookupTable, ReplayBuffer, ResumableSampler, open_run
from ckpt_tasks.checkpoint import acquiring
from ckpt_tasks.checkpoint.save import commit, prepared, writer
from ckpt_tasks.format.keys import Attempt, attempt_prefix, heartbeat_name, ledger_name
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.format.live import cut
from ckpt_tasks.format.parsing import FORMAT_VERSION
from ckpt_tasks.format.records import Checkpoint, Owner, RunCheck
from ckpt_tasks.run.ledger import history
from ckpt_tasks.run.ledger.segments import Segments
from ckpt_tasks.run.upkeep.verifying import record_check, record_verification, verify_run_directory
from ckpt_tasks.state.tables.rules import Adagrad
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.system import System
from tests.golden.kinds import OF_TORCHAO, kinds_at, wrapped

HERE = Path(__file__).parents[1] / "tests" / "golden"
RUN_KEY = "golden"
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
MADE_BY = {
    "torch": torch.__version__,
    "python": platform.python_version(),
    "threads": "1",
    "host": "golden",
    "code": f"git {'0' * 40}",
    "command": "python train.py",
}


def state_at(k: int) -> dict[str, Any]:
    """Return the state of the k-th checkpoint; the test says once more, in its own words, what is in it."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for n, value in enumerate(model.state_dict().values()):
            value.copy_((torch.arange(value.numel()).reshape(value.shape) + n) * k)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for n, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0 * k),
            "exp_avg": torch.full_like(parameter, n + k / 4),
            "exp_avg_sq": torch.full_like(parameter, n + k / 2),
        }
    for _ in range(2 * k):
        optimizer.step()  # no parameter has a gradient: nothing moves
        scheduler.step()
    sampler = ResumableSampler(100, 8, seed=3)
    for _ in range(5 * k):
        sampler.advance()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": sampler,
        "noise": torch.Generator().manual_seed(10 * k),
        "tensors": tensors_at(k),
        "values": values_at(k),
    }


def tensors_at(k: int) -> dict[str, Any]:
    """Return tensors of the kinds that a writer gets wrong first."""
    bf16 = torch.tensor([0.5, -0.0, 1.0, 3.0]).mul(k).to(torch.bfloat16)
    return {
        "bf16": bf16,
        "tied": bf16,
        "complex128": torch.tensor([1 + 2j, -3.5j], dtype=torch.complex128) * k,
        "bool": torch.tensor([[True, False, k == 1]]),
        "rank 0": torch.tensor(-7 * k),
        "empty": torch.empty(0, 3, dtype=torch.float64),
        "fp8": torch.tensor([0.5, 2.0]).mul(k).to(torch.float8_e4m3fn),
        "uint16": torch.tensor([0, 65535 - k]).to(torch.uint16),
        "transposed": torch.arange(6, dtype=torch.int32).reshape(2, 3).mul(k).t(),
        "leaf": torch.tensor([float("nan"), 1.0 * k], requires_grad=True),
        "array": np.array([[1, 2], [3, 4]], dtype=np.int8) * np.int8(k),
    }


def values_at(k: int) -> dict[str, Any]:
    """Return a value for every entry of the tree's vocabulary."""
    return {
        "plain": [None, True, False, 0, -(10**30) * k, 0.1, "ü\n", ""],
        "floats": [float("nan"), float("inf"), float("-inf"), -0.0],
        "keys": {"0": "text", 0: "number", None: k, (1, "a"): []},
        "~tilde": {"~tensor": "no tensor"},
        "tuple": (1, (2, ())),
        "sets": [{3, 1, 2}, frozenset({"a", ("b", k)})],
        "deque": deque([1, 2, 3], maxlen=3 + k),
        "ordered": OrderedDict([("b", 1), ("a", k)]),
        "counter": Counter({"x": 2, "y": k}),
        "complex": complex(1, float("inf")),
        "bytes": b"\0\xff" * k,
        "times": [
            datetime(2024, 2, 29, 12, 30, 1, 5),  # noqa: DTZ001 (a time without a zone has to come back without one)
            datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=5, minutes=30))),
            date(1970, 1, k),
            timedelta(days=-1, microseconds=k),
        ],
        "torch": [torch.bfloat16, torch.device("cpu"), torch.Size([2, 0, k])],
        "numpy": [np.float32(0.1), np.int64(-k), np.bool_(True)],
    }


def make(directory: Path) -> None:
    """Write the run: step 9, step 10, a pin, a note, an evaluation, a drill, a verification, and a release."""
    config = CheckpointConfig(
        checkpoint_dir=str(directory), run_key=RUN_KEY, max_num_checkpoints=None, best_metric="loss"
    )
    with fixed(), Checkpointer(config) as ckpt:
        for k, loss in ((1, float("nan")), (2, 0.25)):
            random.seed(k)
            np.random.seed(k)  # noqa: NPY002 (NumPy's global generator is part of the state)
            state = state_at(k)
            torch.manual_seed(k)  # after building the model, which draws
            ckpt.save(8 + k, state, metrics={"loss": loss}, epoch=k)
        ckpt.pin(9, "golden")
        ckpt.note("made", by="tests/golden/make.py")
        run = open_run(str(directory), RUN_KEY)
        run.record_evaluation(run.find(10), "quick", {"accuracy": 0.75, "loss": float("inf")})
        drilled = {"step": 10, "ranks": 1}
        record_check(
            run.history, RunCheck(kind="drill", at=NOON.isoformat(), host="golden", fault="killed", figures=drilled)
        )
        record_verification(run.history, verify_run_directory(run.history))
    (directory / heartbeat_name(1)).unlink()  # a sign of life is not part of what a run is
    (directory / heartbeat_name(1)).parent.rmdir()
    shutil.rmtree(directory / ".ckpt-reserve")  # nor is the room that its owner keeps


@contextmanager
def _begun(directory: Path) -> Iterator[Checkpointer]:
    """Begin a run, and leave in it at the end only what is part of what a run is."""
    with fixed(), Checkpointer(CheckpointConfig(checkpoint_dir=str(directory), run_key=RUN_KEY)) as ckpt:
        yield ckpt
    for name in (".ckpt-reserve", "heartbeat"):
        shutil.rmtree(directory / name)


def _seed(k: int) -> None:
    random.seed(k)
    np.random.seed(k)  # noqa: NPY002
    torch.manual_seed(k)


def make_kinds(directory: Path) -> None:
    """Write a run with a value of each kind that has parts."""
    with _begun(directory) as ckpt:
        for k in (1, 2):
            _seed(k)
            ckpt.save(k, {"values": kinds_at(k)})


def make_wrappers(directory: Path) -> None:
    """Write a run with tensors made of others; it needs torchao."""
    _make_values(directory, lambda: [wrapped(bits, 1) for bits in OF_TORCHAO])


def make_buffers(directory: Path) -> None:
    """Write a run with an `io.BytesIO`."""
    _make_values(directory, lambda: [BytesIO(b"golden"), BytesIO()])


def _make_values(directory: Path, values: Callable[[], list[Any]]) -> None:
    with _begun(directory) as ckpt:
        _seed(1)
        ckpt.save(1, {"values": values()})


def make_tables(directory: Path) -> None:
    """Write a run with a lookup table, with a base and a delta."""
    users = LookupTable(2, slots=Adagrad(lr=0.5), seed=7)
    with _begun(directory) as ckpt:
        for k, ids in ((1, range(6)), (2, range(1))):
            _seed(k)
            users(torch.tensor(ids)).sum().backward()
            users.step()
            users.delete(torch.tensor([k]))
            ckpt.save(k, {"users": users})


def make_replay(directory: Path) -> None:
    """Write a run with a replay buffer, whose newest checkpoint has a file with overwritten rows."""
    replay = ReplayBuffer(5, at=(torch.float32, (2,)), action=torch.int64, done=bool)
    with _begun(directory) as ckpt:
        for k, rows in ((1, range(3)), (2, range(3, 4)), (3, range(4, 7))):
            _seed(k)
            for n in rows:
                replay.append(at=[n, n / 2], action=-n, done=n % 2 == 1)
            ckpt.save(k, {"replay": replay})


def make_many(directory: Path) -> None:
    """Write a ledger with 150 live checkpoints, whose objects are not there: segments, and a tail."""
    with fixed():
        store = LocalStore(directory)
        history.History(store).create(RUN_KEY)
        live = tuple(_checkpoint(n) for n in range(1, 151))
        entry = replace(_commit(201, live), segments=cut(live, ()))
        Segments(store).put(entry.segments)
        store.put_if_absent(ledger_name(201), entry.to_bytes()[0])
        ledger = history.History(store)
        for n in (202, 203):
            ledger.append({"kind": "commit", "step": n}, partial(_with, _checkpoint(n)), owner=None)


def _with(checkpoint: Checkpoint, state: State, n: int) -> State:
    return state.with_checkpoint(replace(checkpoint, n=n), frozenset())


def _checkpoint(n: int) -> Checkpoint:
    attempt = Attempt(n, 1, f"{n:016x}")
    return Checkpoint(
        step=n,
        attempt=attempt.name,
        manifest=f"{attempt_prefix(attempt)}manifest.json",
        manifest_digest=f"{n:032x}",
        parent=f"{n - 1:032x}",
        n=n,
        metrics={"loss": float("nan") if n % 50 == 0 else 1 / n},
        size_bytes=1000 + n,
        objects=3,
        saved_at="2026-11-20T12:00:00.000+00:00",
        cost_s=0.25,
        abandoned=n % 10 == 3,
    )


def _commit(n: int, live: tuple[Checkpoint, ...]) -> Entry:
    return Entry(
        n=n,
        epoch=0,
        nonce=f"{n:032x}",
        previous=None,
        at="2026-11-20T12:00:00.000+00:00",
        event={"kind": "commit", "step": n - 1},
        state=State(live=live),
    )


@contextmanager
def fixed() -> Iterator[None]:
    """Fix who writes, when, how long it takes, and the random names."""
    numbers = count(1)
    owner = Owner(
        epoch=0,
        id=f"{0:032x}",
        flow_run_id=None,
        host="golden",
        machine_id="",
        boot_id="",
        pid_namespace="",
        pid=1,
        process_start="1",
        taken_at="",
    )

    replaced: list[tuple[Any, str, Any]] = [
        (acquiring, "identify", lambda flow_run_id: owner),
        (prepared, "provenance", lambda: MADE_BY),
        # How long a save takes.
        *((place, "round", lambda seconds, digits: 0.0) for place in (writer, commit, prepared)),
        (System, "time", lambda self: NOON.timestamp()),
        (System, "host", lambda self: "golden"),
        (secrets, "token_hex", lambda size: f"{next(numbers):0{2 * size}x}"),
    ]
    torch.set_num_threads(1)
    with ExitStack() as stack:
        for place, name, value in replaced:
            stack.enter_context(patch.object(place, name, value, create=name == "round"))
        yield


if __name__ == "__main__":
    runs: dict[str, Callable[[Path], None]] = {
        "run": make,
        "many": make_many,
        "kinds": make_kinds,
        "tables": make_tables,
        "replay": make_replay,
        "wrappers": make_wrappers,
        "buffers": make_buffers,
    }
    made = {HERE / f"v{FORMAT_VERSION}" / name: write for name, write in runs.items()}
    missing = {target: write for target, write in made.items() if not target.exists()}
    if not missing:
        raise SystemExit(f"{', '.join(map(str, made))} exist: see this module's first lines")
    for target, write in missing.items():
        try:
            write(target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
