"""A lookup table of a million rows, of which a hundredth changes between two saves; and its restore from nine files.

Before that, steps of training on the table and on torch's sparse embedding, in turns, and what a row takes in memory.
Beside it a replay buffer of a million transitions, to which a thousand are added between two saves.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

from benchmarks.apart import summary
from ckpt_tasks import CheckpointConfig, Checkpointer, LookupTable, ReplayBuffer, open_run
from ckpt_tasks.state.tables.rules import Adam
from ckpt_tasks.state.tables.table_files import Chain

__all__ = ["measure"]

_DIM = 32
_DELTAS = 8
_BATCH = 8192  # ids, drawn from all
_UNTIMED = 3  # The first saves make the memory of the process, and a file with all rows.


def measure(directory: Path, *, tiny: bool, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Time durable saves of all rows and of a hundredth, one after the other, `rounds` times; weigh what they write.

    Rows have 32 numbers and Adam's two slots. Beside them torch.save, durable, writes the same arrays. The restore is
    that of a base and eight deltas, equal to the table bit for bit.
    """
    count, users = 10_000 if tiny else 1_000_000, _table()
    steps = _steps(count, 10 * rounds)
    state: dict[str, Any] = {"users": users}
    users(torch.arange(count))
    users.step()
    times: dict[str, list[float]] = {}
    stalls: dict[str, list[float]] = {}
    sizes: dict[str, list[int]] = {}
    with Checkpointer(
        CheckpointConfig(checkpoint_dir=str(directory / "run"), memory_dir=None, max_num_checkpoints=None)
    ) as ckpt:
        ckpt.restore(state)
        step = 0
        for number in range(rounds):
            for what in ("torch.save, all rows", "ckpt-tasks, all rows", *["ckpt-tasks, 1 % of the rows"] * _DELTAS):
                _change(users, np.random.default_rng(step).choice(count, count // 100, replace=False))
                if what.startswith("torch"):
                    times.setdefault(what, []).append(_torch_save_s(users, directory / "saved.pt"))
                    continue
                if what.endswith("all rows"):
                    users.chain = Chain()
                step += 1
                started = perf_counter()
                saved = ckpt.save(step, state)
                if number or rounds == 1:  # The first round makes the memory of the process.
                    times.setdefault(what, []).append(perf_counter() - started)
                    stalls.setdefault(what, []).append(saved.cost_s)
                    new = directory / "run" / Path(saved.manifest).parent
                    sizes.setdefault(what, []).append(sum(path.stat().st_size for path in new.iterdir()))
    replay = _replay(directory / "replay", count, rounds)
    restores = _restore_s(directory / "run", users, rounds)
    whole, part = "ckpt-tasks, all rows", "ckpt-tasks, 1 % of the rows"
    return {
        "size_bytes": median(sizes[whole]),
        "rounds": rounds,
        "device": device,
        "ratios": {
            **replay.pop("ratios"),
            **steps,
            "1 % of the rows against all, time": median(times[part]) / median(times[whole]),
            "1 % of the rows against all, bytes": median(sizes[part]) / median(sizes[whole]),
            "1 % of the rows, milliseconds that training waited": 1000 * median(stalls[part]),
        },
        "rows": {
            "durable saves of a lookup table": {name: summary(some) for name, some in times.items()},
            "durable saves of a replay buffer": {name: summary(some) for name, some in replay.items()},
            "restore of a base and eight deltas": {"ckpt-tasks": summary(restores)},
        },
    }


def _steps(count: int, steps: int) -> dict[str, float]:
    """Train a table and an Embedding(sparse=True) with SparseAdam on the same ids, in turns, by one thread."""
    threads, random = torch.get_num_threads(), np.random.default_rng(0)
    torch.set_num_threads(1)
    before_bytes, table = _resident_bytes(), _table()
    for begin in range(0, count, _BATCH):
        table(torch.arange(begin, min(begin + _BATCH, count)))
    row_bytes = (_resident_bytes() - before_bytes) / count
    embedding = torch.nn.Embedding(count, _DIM, sparse=True)
    sparse = torch.optim.SparseAdam([*embedding.parameters()], lr=0.01)
    contenders: tuple[tuple[Any, Any], ...] = (table, table), (embedding, sparse)
    took: tuple[list[float], list[float]] = [], []
    for step in range(_UNTIMED + steps):
        ids = torch.from_numpy(random.integers(0, count, _BATCH))
        for (rows, optimizer), times in zip(contenders, took, strict=True):
            started = process_time()
            rows(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= _UNTIMED:
                times.append(process_time() - started)
    torch.set_num_threads(threads)
    return {
        "a step over Embedding(sparse) and SparseAdam, processor time": median(took[0]) / median(took[1]),
        "microseconds of processor time for a drawn id": 1e6 * median(took[0]) / _BATCH,
        f"bytes of memory for a row, over its {12 * _DIM}": row_bytes / (12 * _DIM),
    }


def _resident_bytes() -> int:
    """Return the memory of this process, without what the allocator keeps of arrays that are gone."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _replay(directory: Path, count: int, rounds: int) -> dict[str, Any]:
    """Time durable saves of `count` transitions after a thousandth is new, as a buffer and as arrays of the state."""
    add, vector, random = count // 1000, (torch.float32, (4,)), np.random.default_rng(0)
    buffer = ReplayBuffer(count, x=vector, then=vector, action=torch.int64, reward=torch.float32, done=bool)
    buffer.extend(**{name: random.random((count, *buffer.dtype[name].shape)) > 0.5 for name in buffer.columns})
    arrays = {name: torch.from_numpy(buffer.values[name].copy()) for name in buffer.columns}
    times: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    for what, state in (("buffer", {"replay": buffer}), ("arrays", {"replay": arrays})):
        config = CheckpointConfig(checkpoint_dir=str(directory / what), memory_dir=None, max_num_checkpoints=None)
        stalls, sizes, times[what] = list[float](), list[int](), list[float]()
        with Checkpointer(config) as ckpt:
            ckpt.restore(state)
            for step in range(1, 1 + _UNTIMED + rounds * (32 if what == "buffer" else 1)):
                for name, values in (rows := buffer.sample(add)).items():
                    arrays[name][:add] = values
                buffer.extend(**rows)
                started = perf_counter()
                saved = ckpt.save(step, state)
                if step > _UNTIMED:
                    times[what].append(perf_counter() - started)
                    stalls.append(1000 * saved.cost_s)
                    files = (directory / what / Path(saved.manifest).parent).iterdir()
                    sizes.append(sum(path.stat().st_size for path in files))
        for name, figures in (("milliseconds that training waited", stalls), ("bytes", sizes)):
            ratios |= {f"{what}, {name}, {kind.__name__}": float(kind(figures)) for kind in (median, fmean, max)}
    return {**times, "ratios": ratios}


def _table() -> LookupTable:
    return LookupTable(_DIM, slots=Adam(lr=0.01))


def _change(users: LookupTable, ids: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    users(torch.from_numpy(ids)).sum().backward()
    users.step()


def _torch_save_s(users: LookupTable, path: Path) -> float:
    started = perf_counter()
    with path.open("wb") as file:
        torch.save([torch.from_numpy(one) for one in (users.store.ids, *users.store.values, users.store.steps)], file)
        file.flush()
        os.fsync(file.fileno())
    return perf_counter() - started


def _restore_s(place: Path, users: LookupTable, rounds: int) -> list[float]:
    run, times = open_run(str(place)), []
    for _ in range(rounds):
        again = _table()
        started = perf_counter()
        run.restore(run.checkpoints()[0], {"users": again})
        times.append(perf_counter() - started)
        assert again.store.bytes_by_id() == users.store.bytes_by_id()
    return times
