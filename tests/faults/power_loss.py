"""Saves on ext4, the disks that a loss of power leaves of them, and what a new process finds there.

`unshare --mount --propagation private python -m tests.faults.power_loss DIRECTORY` answers requests: one line of JSON
on stdin for `lose_power`, one line with the moments on stdout. Everything is mounted in a mount namespace of its own,
on a memory file system of its own, and the loop devices let go by themselves: with the last process all of it is gone,
however that ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from ckpt_tasks.errors import CkptError
from ckpt_tasks.format.ledger import lineage
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage.local import LocalStore
from tests.support import runs
from tests.support.block_log import KEEPS, Keep, Replay, die_with_parent, logged_disk, read_log
from tests.support.calls import WatchedCalls

LeavesOut = Literal["nothing", "directories", "ledger", "data", "newest data"]  # which fsyncs do nothing and say 0

_DISK_BYTES = 32 << 20
# Small, so that it wraps around; the tables are written by mkfs and not by a thread of the kernel meanwhile.
_MKFS = [
    "mkfs.ext4", "-q", "-F", "-b", "4096", "-J", "size=4",
    "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard",
]  # fmt: skip
_MOUNT_OPTIONS = "loop,noatime,commit=900"  # nothing becomes durable because some seconds have passed


@dataclass(frozen=True)
class Moment:
    """One loss of power: when it came, which step had been acknowledged by then, and what a new process found.

    `faults` are (kind, text): "lost" what was acknowledged, "torn" what is visible and not whole, "passed over" a
    checkpoint that restore left aside, "refused" an error of ours, "unmountable" a disk that the kernel refuses,
    "wrong" bits that were never saved, "stuck" a run that did not continue as it should.
    """

    where: str
    acked: int
    restored: int | None
    faults: tuple[tuple[str, str], ...]


# ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────


def life_state(step: int) -> dict[str, Any]:
    """Return a state of 4 MiB that follows from the step: small values, a tensor that moves, and one that does not."""
    moving = torch.rand(500_000, generator=torch.Generator().manual_seed(step))
    frozen = torch.rand(500_000, generator=torch.Generator().manual_seed(step // runs.UNTOUCHED))
    return {**runs.state_of(step), "moving": {"values": moving}, "frozen": {"values": frozen}}


def print_of(state: dict[str, Any]) -> str:
    """Digest every bit of a state."""
    large = [hashlib.sha256(state[name]["values"].numpy()).hexdigest() for name in ("moving", "frozen")]
    return " ".join([runs.fingerprint(state), *large])


@lru_cache(maxsize=64)
def expected(step: int) -> str:
    return print_of(life_state(step))


class VictimCalls(WatchedCalls):
    """Leave some fsyncs out."""

    def __init__(self, leaves_out: LeavesOut, last_step: int):
        super().__init__()
        self._leaves_out, self._last_step = leaves_out, last_step

    def fsync(self, fd: int) -> None:
        if not self._is_left_out(self.paths[fd]):
            super().fsync(fd)

    def _is_left_out(self, path: str) -> bool:
        of_file = not os.path.isdir(path)
        match self._leaves_out:
            case "nothing":
                return False
            case "directories":
                return not of_file
            case "ledger":
                return of_file and "/ledger/" in path
            case "data":
                return of_file and "/checkpoint_" in path
            case "newest data":
                return of_file and f"/checkpoint_{self._last_step:012d}/" in path


def live(root: Path, steps: int, leaves_out: LeavesOut, ack: Callable[[int], None]) -> None:
    """Restore and save step after step, two of which are kept; `ack` is called as soon as one is saved."""
    calls = VictimCalls(leaves_out, steps)
    with runs.opened(root, calls=calls) as ckpt:
        first = ckpt.restore(life_state(runs.UNTOUCHED)) + 1
        for step in range(first, first + steps):
            ckpt.save(step, life_state(step))
            ack(step)


def in_a_process(work: Callable[[], None]) -> None:
    """Run something in a process that is gone afterwards, as the owner of a run is after a loss of power."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            die_with_parent()
            work()
            status = 0
        except BaseException:  # noqa: BLE001 (the process ends here)
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise RuntimeError(f"the process that saves ended with status {status}")


# ── after the loss ───────────────────────────────────────────────────────────────────────────────────────────────


def examine(root: Path, acked: int, faults: list[tuple[str, str]]) -> int:
    """Look at a run directory as it was found and go on there; add what is wrong to `faults`, return the step restored.

    The newest checkpoint is the one acknowledged or the one under way, and the one before it is kept.
    """
    head = History(LocalStore(root)).head()
    steps = [checkpoint.step for checkpoint in lineage(head.state.live)]
    newest = steps[0] if steps else 0
    damaged = runs.faults_of(root)
    faults += [("torn", f"ledger entry {name}") for name in head.damaged]
    faults += [("torn", f"step {step}: {found[0]}") for step, found in damaged.items()]
    if not acked <= newest <= acked + 1:
        faults.append(("lost" if newest < acked else "wrong", f"the newest is {newest}, {acked} was acknowledged"))
    faults += [("lost", f"step {step}") for step in (newest, newest - 1) if step > 0 and step not in steps]
    restored = _go_on(root, [step for step in steps[1:] if step not in damaged], faults)
    if not faults:
        _look_again(root, restored + 1, faults)
    return restored


def _go_on(root: Path, older: list[int], faults: list[tuple[str, str]]) -> int:
    with runs.opened(root) as ckpt:
        for step in older:
            state = life_state(runs.UNTOUCHED)
            ckpt.restore(state, step=step)
            if print_of(state) != expected(step):
                faults.append(("wrong", f"step {step}, restored by number"))
        state, committed = life_state(runs.UNTOUCHED), ckpt.checkpoints()
        restored = ckpt.restore(state)
        if print_of(state) != expected(restored if committed else runs.UNTOUCHED):
            faults.append(("wrong", f"step {restored}"))
        report = ckpt.last_restore
        faults += [("passed over", f"step {step}: {why}") for step, why in (report.skipped if report else ())]
        ckpt.save(restored + 1, life_state(restored + 1))
    return restored


def _look_again(root: Path, step: int, faults: list[tuple[str, str]]) -> None:
    state = life_state(runs.UNTOUCHED)
    with runs.opened(root) as ckpt:
        restored = ckpt.restore(state)
    if restored != step or print_of(state) != expected(step) or runs.faults_of(root) != {}:
        faults.append(("stuck", f"step {restored} was restored after step {step} was saved"))
    if left := runs.unnamed(root):
        faults.append(("stuck", f"nobody sweeps {sorted(left)}"))


def examine_disk(image: Path, where: str, acked: int) -> Moment:
    """Mount a disk as a host that starts again does, and look."""
    at = image.with_name("found")
    at.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-o", _MOUNT_OPTIONS, image, at], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        return Moment(where, acked, None, (("unmountable", mounted.stderr.strip()),))
    faults = list[tuple[str, str]]()
    restored = None
    try:
        restored = examine(at / "run", acked, faults)
    except CkptError as error:
        faults.append(("refused", f"{type(error).__name__}: {error}"))
    finally:
        subprocess.run(["umount", at], check=True)
    return Moment(where, acked, restored, tuple(faults))


# ── power is lost ───────────────────────────────────────────────────────────────────────────────────


@contextmanager
def mounted_disk(image: Path) -> Iterator[Path]:
    at = image.with_name("disk.mounted")
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", _MOUNT_OPTIONS, image, at], check=True)
    try:
        yield at / "run"
    finally:
        subprocess.run(["umount", at], check=True)


def lose_reordered(
    work: Path, *, leaves_out: LeavesOut, saves: int, lives: int, moments: int, lies: int, seed: int
) -> list[Moment]:
    """Log every write and flush; lose power after every save and at random, with any part of what was not flushed.

    With several `lives` the next process goes on from a disk that was left so, and power is lost again. The disk lies
    about the last `lies` flushes.
    """
    choose, found = random.Random(seed), list[Moment]()
    base, known = (work / "new").read_bytes(), 0
    for n in range(lives):
        replay, acks = _logged_life(work, base, saves, leaves_out, lies)
        chosen = sorted((*_at_acks(replay, acks), *_anywhere(replay, moments, choose)))
        goes_on, before = choose.randrange(len(chosen)), known
        for m, (moment, keep) in enumerate(chosen):
            left = replay.disk(moment, keep, choose)
            past = bisect_right(acks, replay.log_bytes(moment), key=lambda one: one[0])
            acked = acks[past - 1][1] if past else before
            (work / "left").write_bytes(left)
            where = f"life {n}, event {moment} of {len(replay.events)}, {keep} of what was not flushed"
            found.append(examine_disk(work / "left", where, acked))
            if m == goes_on:  # a save that was under way and is there may not go any more
                base, known = bytes(left), found[-1].restored or acked
    return found


def _logged_life(
    work: Path, base: bytes, saves: int, leaves_out: LeavesOut, lies: int
) -> tuple[Replay, list[tuple[int, int]]]:
    """Run one process; return what it did to the disk, and for each saved step the size of the log by then."""
    image, log, acks = work / "served", work / "log", work / "acks"
    image.write_bytes(base)
    log.unlink(missing_ok=True)
    acks.write_text("")

    def ack(step: int) -> None:
        with acks.open("a") as file:
            file.write(f"{log.stat().st_size} {step}\n")

    with logged_disk(image, log, work / "disk"), mounted_disk(work / "disk") as root:
        in_a_process(lambda: live(root, saves, leaves_out, ack))
    events = read_log(log)
    assert Replay(base, events).disk(len(events), "all", random.Random()) == image.read_bytes()
    lines = [line.split() for line in acks.read_text().splitlines()]
    return Replay(base, events, lies=lies), [(int(size_bytes), int(step)) for size_bytes, step in lines]


def _at_acks(replay: Replay, acks: list[tuple[int, int]]) -> Iterator[tuple[int, Keep]]:
    # Nothing that is not flushed may be needed once a save has returned, nor hurt it.
    keeps: tuple[Keep, ...] = ("none", "all", "small writes")
    yield from ((replay.moment(size_bytes), keep) for size_bytes, _ in acks for keep in keeps)


def _anywhere(replay: Replay, moments: int, choose: random.Random) -> Iterator[tuple[int, Keep]]:
    for _ in range(moments):
        yield choose.randint(0, len(replay.events)), choose.choice(KEEPS)


def damage_inodes(work: Path) -> list[Moment]:
    """Damage the inode of a small and of a large object of the newest of two saves, its checksum or its extents."""
    image = work / "disk"
    shutil.copyfile(work / "new", image)
    with mounted_disk(image) as root:
        in_a_process(lambda: live(root, 2, "nothing", lambda step: None))
        objects = [root / one.manifest for one in runs.head_of(root).live if one.step == 2]
        objects += objects[0].parent.glob("moving-*")
        names = [path.relative_to(root.parent) for path in objects]
    moments = []
    for name, field in product(names, ("checksum 0x1234", "block[0] 0x9999")):
        shutil.copyfile(image, work / "damaged")
        command = ["debugfs", "-w", "-R", f"set_inode_field /{name} {field}", str(work / "damaged")]
        subprocess.run(command, check=True, capture_output=True)
        moments.append(examine_disk(work / "damaged", f"{name.name}: {field}", 2))
    return moments


def lose_power(work: Path, *, how: str, **options: Any) -> list[Moment]:
    """Make a new disk and lose power, or find "inodes" damaged; return what was found."""
    for path in work.iterdir():
        if path.is_file():
            path.unlink()
    with (work / "new").open("wb") as file:
        file.truncate(_DISK_BYTES)
    subprocess.run([*_MKFS, work / "new"], check=True)
    return damage_inodes(work) if how == "inodes" else lose_reordered(work, **options)


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    at = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", at], check=True)
    work = at / at.name  # so that a loop device says whose it is, also to who does not see the mount
    work.mkdir()
    for line in sys.stdin:
        moments = lose_power(work, **json.loads(line))
        print(json.dumps([asdict(moment) for moment in moments]), flush=True)  # noqa: T201 (the answer)


if __name__ == "__main__":
    main()
