"""Rows of PITFALLS.md that show only in a whole Checkpointer: resources over many saves, maps, equal resumes."""

from __future__ import annotations

import json
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableSampler
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.layout.index import Index, write_index
from ckpt_tasks.testing import settle
from tests.support.calls import WatchedCalls
from tests.support.indexes import read_as_committed
from tests.support.ledgers import resealed
from tests.support.resources import held
from tests.support.roundtrip import assert_same
from tests.support.runs import opened, state_of


def config(directory: Path, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(checkpoint_dir=str(directory), **more)


# ── write ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_that_was_written_is_renamed_or_written_again(run_dir: Path) -> None:
    """P34: over saves of one step, pruning and a release only the heartbeat is replaced, and no name is made twice."""
    calls = WatchedCalls()
    with opened(run_dir, calls=calls, max_num_checkpoints=1) as ckpt:
        for step in (1, 2, 2, 3):
            ckpt.save(step, state_of(step))
    replaced = {Path(path).parent.name for name, path in calls.log if name == "replace"}
    assert replaced == {"heartbeat"}
    objects = [path for name, path in calls.log if name == "pwrite" and "/checkpoint_" in path]
    linked = [path for name, path in calls.log if name == "link"]
    assert len(linked) == len({*linked})
    attempts = [path for name, path in calls.log if name == "mkdir" and "/e000001-" in path]
    assert len(attempts) == len({*attempts}) == 4
    assert {str(Path(path).parent) for path in objects} == {*attempts}


def test_a_state_that_lies_in_a_mapped_checkpoint_can_be_saved(run_dir: Path) -> None:
    """P36: a model whose memory is a checkpoint's file is saved as the same step, and both checkpoints are whole."""
    model = nn.Linear(4, 3, bias=False)
    with Checkpointer(config(run_dir)) as ckpt:
        ckpt.save(1, {"model": model})
    (file,) = run_dir.rglob("model-*.safetensors")
    before = file.read_bytes()
    mapped = torch.from_file(str(file), shared=True, size=len(before), dtype=torch.uint8)[-48:].view(torch.float32)
    model.weight = nn.Parameter(mapped.view(3, 4))
    with Checkpointer(config(run_dir)) as ckpt:
        ckpt.restore({"model": model})
        ckpt.save(1, {"model": model})
        assert file.read_bytes() == before
        with torch.no_grad():
            model.weight.add_(1)  # the user's own write into the file: the new checkpoint does not share it
        target = nn.Linear(4, 3, bias=False)
        assert ckpt.restore({"model": target}) == 1
        assert ckpt.last_restore is not None
        assert not ckpt.last_restore.skipped
    assert torch.equal(target.weight + 1, model.weight)


# ── restore ──────────────────────────────────────────────────────────────────────────────────────────────────


def without_a_region(root: Path) -> None:
    """Make the newest checkpoint what a faulty writer would have committed: digests that fit, and a region missing."""
    (index,), (path,) = root.glob("checkpoint_*2/*/index.arrow"), root.glob("checkpoint_*2/*/manifest.json")
    rows = read_as_committed(index.read_bytes()).rows
    index.write_bytes(write_index(Index.of([row for row in rows if not any(row.box.offset)])))
    old = path.read_bytes()
    body = json.loads(old)
    size_bytes, digest = index.stat().st_size, digest_hex(index.read_bytes())
    body["index"] = [body["index"][0], size_bytes, digest, size_bytes]
    path.write_bytes(json.dumps(body).encode())
    entry = min(root.glob("ledger/*"))
    named = entry.read_bytes().replace(digest_hex(old).encode(), digest_hex(path.read_bytes()).encode())
    entry.write_bytes(resealed(named, lambda body: None))


def test_a_hole_that_was_committed_is_not_restored(fast_dir: Path) -> None:
    """P47: a region that is nowhere, though every digest fits, sends the restore to the older one, with its name."""
    root = fast_dir / "hole"
    with opened(root) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"x": torch.full((9 << 20,), step, dtype=torch.int16)})  # 18 MiB: two regions
    without_a_region(root)
    target = {"x": torch.zeros(9 << 20, dtype=torch.int16)}
    with opened(root) as ckpt:
        assert ckpt.restore(target) == 1
        assert ckpt.last_restore is not None
        ((step, reason),) = ckpt.last_restore.skipped
    assert step == 2
    assert "x/value: " in reason
    assert target["x"].eq(1).all()


# ── many saves ───────────────────────────────────────────────────────────────────────────────────────────────


def resources(memory: Path | None = None) -> tuple[int, ...]:
    """Count open files, threads, buffers (memory without a file), maps and files in memory, and their bytes."""
    now = held(memory)
    return now.files, threading.active_count(), now.buffers, now.buffer_bytes, now.maps, now.stored, now.stored_bytes


def test_many_saves_and_restores_take_no_more_than_a_few(fast_dir: Path) -> None:
    """P45: after 40 more saves and restores there are no more files, threads, buffers and images than after five."""
    state, start, memory = state_of(0), resources(), fast_dir / "memory"
    memory.mkdir()
    with opened(fast_dir / "many", max_num_checkpoints=2, memory_dir=memory) as ckpt:
        for step in range(5):
            ckpt.save(step, state)
            ckpt.restore(state)
        settle(ckpt)
        before = resources(memory)
        assert before[4]  # the images of both slots
        for step in range(5, 45):
            ckpt.save(step, state)
            ckpt.restore(state)
        settle(ckpt)
        # Not ==: a thread that another test left may have ended meanwhile.
        assert all(now <= then for now, then in zip(resources(memory), before, strict=True))
    assert all(now <= then for now, then in zip(resources()[:2], start[:2], strict=True))  # the heartbeat has ended


# ── retention, signals ───────────────────────────────────────────────────────────────────────────────────────


# ── resume ───────────────────────────────────────────────────────────────────────────────────────────────────


class Training:
    """Shuffled data, dropout, 16-bit arithmetic with a scaler, two micro-steps a step: all that makes a resume hard."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 6)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.sampler = ResumableSampler(24, 4, seed=1)
        self.seen: list[int] = []
        self.data = torch.linspace(-1, 1, 72).view(24, 3)

    @property
    def state(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler", "sampler", "seen")
        return {name: getattr(self, name) for name in names}

    def step(self) -> None:
        for _ in range(2):
            ids = next(iter(self.sampler))
            self.sampler.advance()
            self.seen += ids
            with torch.autocast("cpu", torch.bfloat16):
                loss = (self.model(self.data[ids]) - random.random()).square().mean()
            self.scaler.scale(loss / 2).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()


@pytest.mark.parametrize("stop", [0, 3, 6])
def test_a_resume_at_any_step_is_as_if_nothing_had_happened(stop: int, run_dir: Path) -> None:
    """P73: stopped at the start, early, at an epoch's edge or at the end: all values and the next numbers are equal."""
    torch.manual_seed(1)
    plain = Training()
    with Checkpointer(config(run_dir)) as ckpt:
        for step in range(6):
            if step == stop:
                ckpt.save(stop, plain.state)
            plain.step()
        if stop == 6:
            ckpt.save(6, plain.state)
    plain_next = (random.random(), torch.rand(2).tolist())
    torch.manual_seed(99)
    random.seed(99)
    torn = Training()
    with Checkpointer(config(run_dir)) as ckpt:
        assert ckpt.restore(torn.state) == stop
    for _ in range(stop, 6):
        torn.step()
    assert (random.random(), torch.rand(2).tolist()) == plain_next
    assert torn.seen == plain.seen
    assert sorted(torn.seen[:24]) == [*range(24)]
    for name in ("model", "optimizer", "scheduler", "scaler", "sampler"):
        assert_same(dict(torn.state[name].state_dict()), dict(plain.state[name].state_dict()), name)


def test_a_handler_that_another_library_has_set_stays(run_dir: Path) -> None:
    """P69: whoever takes SIGTERM over after us keeps it when the run ends."""
    before, called = signal.getsignal(signal.SIGTERM), []

    def theirs(*_: Any) -> None:
        called.append("theirs")

    try:
        with Checkpointer(config(run_dir)) as ckpt:
            signal.signal(signal.SIGTERM, theirs)
            ckpt.save(1, {"x": 1})
        assert signal.getsignal(signal.SIGTERM) is theirs
        signal.raise_signal(signal.SIGTERM)
        assert called == ["theirs"]
    finally:
        signal.signal(signal.SIGTERM, before)
