"""A thousand ranks with a million regions: what the committer does with their parts, and how that grows.

The ranks are simulated, their parts are not: each is made by the code of a rank's save, from tensors of which the rank
has a slice, and reaches the committer as the bytes that travel. The committer's half is the code of a save, from these
bytes to the ledger entry, and what a restore opens afterwards, in a process of its own on one core.

As a program, `python -m benchmarks.scale DIRECTORY`, it commits the parts that lie there and prints what it took.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist

from benchmarks.apart import summary
from benchmarks.peers import OURS
from ckpt_tasks.checkpoint.memory.samples import Samples, take_samples
from ckpt_tasks.checkpoint.memory.snapshot import ImageSet, plan_snapshot
from ckpt_tasks.checkpoint.ranks.exchange import StoreExchange
from ckpt_tasks.checkpoint.save.commit import Committer
from ckpt_tasks.checkpoint.save.parts import (
    RankPart,
    Saving,
    digest_image,
    encode_groups,
    joined,
    new_attempt,
    same_step,
)
from ckpt_tasks.checkpoint.save.prepared import compared_values
from ckpt_tasks.checkpoint.save.pruning import Pruner
from ckpt_tasks.checkpoint.save.tenure import Line
from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.layout.index import Index
from ckpt_tasks.format.policy.retention import RetentionPolicy
from ckpt_tasks.format.tree import TensorRef
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.ownership import acquire, identify
from ckpt_tasks.run.opening import open_checkpoint
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.kinds.group_parts import Captured, GroupState
from ckpt_tasks.state.tensors.device import Devices
from ckpt_tasks.state.tensors.placements import World
from ckpt_tasks.storage.local import LocalStore

__all__ = ["Simulation", "check_moved", "commit", "measure", "moved"]

_PARTS = (
    "words are fetched",
    "parts are read",
    "checks, index and manifest, sizes and puts",
    "ledger entry",
    "opened again",
)
_RANKS = 1000
_WIDTH = 64
_NORMS = 1000  # replicated tensors, of which every save samples some
_STEP = 7
_CHECKOUT = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 600.0


class Simulation:
    """What the ranks of one world hand in for one step: `tensors` tensors, of which each rank has a slice along `axis`.

    A quarter of the tensors are a model's, the others an optimizer's; every rank has random streams of its own.
    """

    def __init__(self, directory: Path, *, ranks: int, tensors: int, axis: int):
        self.directory = directory
        self._ranks = ranks
        self._axis = axis
        self.history = History(LocalStore(directory))
        self.history.create("scale")
        self.owner = acquire(self.history, identify(None), take_over=False, timeout_s=60)
        self.attempt = new_attempt(_STEP, self.owner, 1)
        self._keys = [f"model/layers.{n}.weight" for n in range(-(-tensors // 4))]
        self._keys += [f"optimizer/state/{n}/exp_avg" for n in range(tensors - len(self._keys))]
        self._norm = torch.ones(4096)
        slices = torch.zeros((tensors, *self._of_rank(_WIDTH, 1)))
        self._slices = slices
        self._tensors = dict(zip(self._keys, slices.unbind(), strict=True))

    def _of_rank(self, whole: int, part: int) -> tuple[int, int]:
        return (part, whole) if self._axis == 0 else (whole, part)

    def captured(self, rank: int) -> Captured:
        """Return a rank's state; its slices hold its number."""
        self._slices.fill_(rank)
        own = capture({"step": _STEP}, world=World(rank, self._ranks))
        model, optimizer = ([key for key in self._keys if key.startswith(group)] for group in ("model/", "optimizer/"))
        groups = {
            "model": GroupState("module", {key.removeprefix("model/"): TensorRef(key) for key in model}),
            "optimizer": GroupState("stateful", {"state": [{"exp_avg": TensorRef(key)} for key in optimizer]}),
        }
        place = self._of_rank(_WIDTH, self._ranks), self._of_rank(0, rank)
        places = {**own.places, **dict.fromkeys(self._keys, place)}
        return Captured(groups | own.groups, self._tensors | own.tensors, own.frozen, places)

    def part(self, rank: int) -> bytes:
        """Return the word of a rank, and make its objects: of the right size, and without room on the disk."""
        captured = self.captured(rank)
        plan = plan_snapshot(captured.tensors, rank=rank, world_size=self._ranks, places=captured.places)
        images = ImageSet(plan, {name: memoryview(bytearray(size)) for name, size in plan.sizes.items()})
        images.fill(captured.tensors, Devices())
        parts = [digest_image(self.attempt, image, lambda: False, rank) for image in images.images]
        norms = {f"model/norms.{n}.weight": (self._norm, (0,)) for n in range(_NORMS)}
        groups = encode_groups(captured)
        same = compared_values(groups, Samples(), take_samples(norms, 1, Devices()))
        part = joined(parts, rank).with_groups(_STEP, groups, same)
        for record in part.objects:
            path = self.directory / record.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.truncate(record.size_bytes)
        return part.to_bytes()

    def saving(self) -> Saving:
        """Return what rank 0 knows of the save."""
        return _saving(self.history, encode_groups(self.captured(0)), self._ranks)


def _saving(history: History, groups: Mapping[str, Mapping[str, object]], ranks: int) -> Saving:
    owner = history.head().state.owner
    assert owner is not None
    return Saving(
        attempt=new_attempt(_STEP, owner, 1),
        run_key="scale",
        owner=owner,
        groups=groups,
        metrics={"loss": 0.5},
        world_size=ranks,
        number=1,
    )


def moved(word: bytes, key: str, axis: int) -> bytes:
    """Return a rank's word with its slice of one tensor moved by one element."""
    part = RankPart.from_bytes(word)
    rows = [*part.index.rows]
    at = next(n for n, row in enumerate(rows) if row.full_key == key)
    offset = [*rows[at].box.offset]
    offset[axis] += 1
    rows[at] = rows[at]._replace(box=rows[at].box._replace(offset=tuple(offset)))
    return replace(part, index=Index.of(rows)).to_bytes()


def commit(history: History, saving: Saving, words: Sequence[bytes]) -> dict[str, float]:
    """Commit what ranks hand in, and open it as a restart does; return the seconds of processor time of each part.

    Raises IntegrityError where the parts do not make a checkpoint.
    """
    pruner = Pruner(history, RetentionPolicy(max_num_checkpoints=2))
    committer = Committer(history, saving.owner, pruner, Line(), owner_timeout_s=60.0)
    exchange = handed_in(words)
    at = [time.process_time()]
    words = fetched(exchange, words[0])
    at.append(time.process_time())
    parts = same_step([*map(RankPart.from_bytes, words)])
    at.append(time.process_time())
    entry, _ = committer.commit(
        committer.admit(), saving, parts, observed={}, check=lambda prepared: at.append(time.process_time())
    )
    at.append(time.process_time())
    del parts, words, exchange  # A restart is another process.
    open_checkpoint(history.store, entry.state.live[-1])
    at.append(time.process_time())
    return {name: after - before for name, (before, after) in zip(_PARTS, pairwise(at), strict=True)}


def handed_in(words: Sequence[bytes]) -> StoreExchange:
    """Put the words of all ranks but rank 0 into a c10d store of this process; return rank 0's exchange."""
    c10d: Any = dist  # it does not export its stores to a type checker
    exchange = StoreExchange(c10d.TCPStore("127.0.0.1", 0, is_master=True), 0, len(words), "scale")
    for rank, word in enumerate(words[1:], start=1):
        exchange._put(f"scale/parts/{rank}", b"=" + word)
    return exchange


def fetched(exchange: StoreExchange, word: bytes) -> list[bytes]:
    """Return the words of all ranks, which rank 0 reads and answers."""
    found: list[bytes] = []

    def decide(words: list[bytes]) -> bytes:
        found.extend(words)
        return b""

    exchange.agree("parts", word, decide, _TIMEOUT_S)
    return found


def measure(directory: Path, *, tiny: bool, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Commit 10⁵, 3·10⁵ and 10⁶ regions of 1,000 ranks, cut along the first dimension and along the second.

    Seconds of processor time of a process with one core, of which the last row has the parts for 10⁶. `ratios`: what a
    region costs among 10⁶, over what it costs among 10⁵; and the peak of the process's memory in GiB, of which Python,
    torch and Arrow take about a third. In the end one slice is moved by one element, and must be named.
    """
    ranks, counts = (10, (10, 20)) if tiny else (_RANKS, (100, 300, 1000))
    rows: dict[str, dict[str, dict[str, float]]] = {}
    ratios: dict[str, float] = {}
    for axis, cut in enumerate(("first", "second")):
        a_region: list[float] = []
        for tensors in counts:
            place = directory / f"{axis}-{tensors}"
            regions = _make(place, ranks, tensors, axis)
            reports = [_ask(place) for _ in range(rounds)]
            total = [sum(report[part] for part in _PARTS) for report in reports]
            rows[f"{regions:,} regions, cut along the {cut} dimension"] = {OURS: summary(total)}
            a_region.append(median(total) / regions)
            if tensors == counts[-1]:
                for part in _PARTS:
                    rows[f"{regions:,} regions, {cut} dimension: {part}"] = {OURS: summary([r[part] for r in reports])}
                ratios[f"peak memory in GiB, {cut} dimension"] = max(r["peak_bytes"] for r in reports) / 2**30
                check_moved(place, axis)
            shutil.rmtree(place)
        ratios[f"a region among the most over one among the fewest, {cut} dimension"] = a_region[-1] / a_region[0]
    return {"size_bytes": 0, "rounds": rounds, "device": device, "rows": rows, "ratios": ratios}


def check_moved(place: Path, axis: int) -> None:
    """Move one of a rank's slices by one element; raise AssertionError unless the committer names it."""
    key = "model/layers.1.weight"
    history, saving, words = _made(place)
    words[len(words) // 2] = moved(words[len(words) // 2], key, axis)
    try:
        commit(history, saving, words)
    except IntegrityError as error:
        assert key in str(error), error  # noqa: PT017 (a benchmark)
    else:
        raise AssertionError("a slice that has moved by one element was not seen")


def _make(place: Path, ranks: int, tensors: int, axis: int) -> int:
    """Make the parts of all ranks, and what rank 0 knows beside them; return how many regions there are."""
    simulation = Simulation(place / "run", ranks=ranks, tensors=tensors, axis=axis)
    (place / "words").mkdir()
    regions = 0
    for rank in range(ranks):
        word = simulation.part(rank)
        (place / "words" / f"{rank:05d}").write_bytes(word)
        regions += len(RankPart.from_bytes(word).index)
    (place / "groups.json").write_text(json.dumps(simulation.saving().groups))
    return regions


def _made(place: Path) -> tuple[History, Saving, list[bytes]]:
    history = History(LocalStore(place / "run"))
    words = [path.read_bytes() for path in sorted((place / "words").iterdir())]
    return history, _saving(history, json.loads((place / "groups.json").read_text()), len(words)), words


def _ask(place: Path) -> dict[str, float]:
    """Commit in a new process with one core; take away afterwards what that has written."""
    before = {*(place / "run").rglob("*")}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", str(place.resolve())],
        capture_output=True,
        text=True,
        check=False,
        cwd=_CHECKOUT,
        timeout=_TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for path in {*(place / "run").rglob("*")} - before:
        path.unlink()
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Commit the parts in a directory, on one core; print the seconds of each part, and the peak of the memory."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    found = commit(*_made(Path(sys.argv[1])))
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    sys.stdout.write(json.dumps({**found, "peak_bytes": int(peak[1]) << 10}) + "\n")


if __name__ == "__main__":
    main()
