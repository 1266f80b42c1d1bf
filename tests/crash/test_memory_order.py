"""Which of two snapshots in memory is the newer one, whatever has become of their way to storage."""

from __future__ import annotations

import logging
import os
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import Checkpointer
from ckpt_tasks.errors import StoreError
from ckpt_tasks.format.records import Seal
from ckpt_tasks.saving import rank_saver
from ckpt_tasks.saving.parts import digest_image
from ckpt_tasks.snapshot import memory as shared_memory
from ckpt_tasks.testing import die, seal, settle, under_way
from tests.crash.memory_loop import state_of, step_of
from tests.support.cli_runs import flip
from tests.support.interpreters import Python
from tests.support.pipelines import Gate, Refusing, committed, give_calls, opened
from tests.support.syncs import state_of as frozen_state
from tests.support.waiting import until

SIZE = 1 << 14


def _start(run_dir: Path, memory: Path, calls: object = os, **options: Any) -> Checkpointer:
    return opened(run_dir, calls, memory_dir=str(memory), on_flush_failure="warn", **options)


def _died(run_dir: Path, memory: Path, good: int, bad: int) -> None:
    """Commit the steps up to `good`, and die after those up to `bad`, which have reached memory alone."""
    ckpt = _start(run_dir, memory)
    ckpt.restore(state_of(0, SIZE))
    for step in range(1, good + 1):
        ckpt.save(step, state_of(step, SIZE))
    give_calls(ckpt, Refusing())
    for step in range(good + 1, bad + 1):
        ckpt.step(step, state_of(step, SIZE))
        settle(ckpt)  # it has failed before the next one is taken
    die(ckpt)


@pytest.mark.parametrize("last", [3, 4, 5])
def test_of_two_that_could_not_be_written_the_newer_one_is_restored(run_dir: Path, memory: Path, last: int) -> None:
    """P28, P44: after saves that failed one by one, the next process goes on from the last of them."""
    _died(run_dir, memory, 1, last)
    assert committed(run_dir) == [1]
    with _start(run_dir, memory) as ckpt:
        state = state_of(0, SIZE)
        assert ckpt.restore(state) == last
        assert step_of(state) == last
    assert committed(run_dir) == [1, last]


@pytest.mark.parametrize("last", [3, 4])
def test_what_was_restored_is_not_the_first_to_be_written_over(
    run_dir: Path, memory: Path, gate: Gate, last: int
) -> None:
    """P44: where the newest snapshot is damaged, the other one stays until what follows it is complete."""
    _died(run_dir, memory, 1, last)
    for image in _slot_of(memory, last).glob("*.safetensors"):
        flip(image, -1)
    ckpt = _start(run_dir, memory, gate)
    state = state_of(0, SIZE)
    assert ckpt.restore(state) == last - 1
    assert step_of(state) == last - 1
    # What storage lacked goes there from the slot of the damaged one; the other one is filled only once that is sealed.
    assert {one.checkpoint.step for one in _seals(memory).values()} == {last - 1}
    gate.opened.set()
    ckpt.close()


@pytest.mark.parametrize("last", [4, 5])
def test_of_two_that_are_committed_the_newer_one_stays(run_dir: Path, memory: Path, last: int) -> None:
    """P44: a second restart on the same host finds in memory what the first one was restored from."""
    _died(run_dir, memory, last, last)
    before = _slot_of(memory, last)
    ckpt = _start(run_dir, memory)
    assert ckpt.restore(state_of(0, SIZE)) == last
    assert under_way(ckpt).next_slot != before.name
    ckpt.close()


def test_the_last_snapshot_is_sealed_before_memory_is_let_go(
    run_dir: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P44: where the store refuses at once, the end of the block waits until what it refused is whole in memory."""

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.1)
        return digest_image(*arguments)

    monkeypatch.setattr(rank_saver, "digest_image", slowly)
    ckpt = _start(run_dir, memory)
    state = {f"part{n}": torch.zeros(1 << 18) for n in range(4)}
    for step in (1, 2, 3):
        for part in state.values():
            part.fill_(step)
        if step == 3:
            give_calls(ckpt, Refusing())
            ckpt.step(step, state)
        else:
            ckpt.save(step, state)
    with pytest.raises(StoreError):
        ckpt.close()
    assert _slot_of(memory, 3)


def test_a_new_structure_does_not_forget_what_is_on_its_way(run_dir: Path, memory: Path, gate: Gate) -> None:
    """P44: a snapshot of another structure, taken while the store is stuck, may follow what lands after all."""
    ckpt = _start(run_dir, memory, gate, flush_timeout_s=0.5)
    ckpt.step(1, state_of(1, SIZE))
    assert gate.reached.wait(30)
    until(lambda: under_way(ckpt).stuck)
    before = _last_seal(ckpt, memory)
    ckpt.step(2, state_of(2, 2 * SIZE))
    assert _last_seal(ckpt, memory).in_flight == before.checkpoint.manifest
    gate.opened.set()
    until(lambda: not under_way(ckpt).stuck)
    ckpt.close()


@pytest.mark.parametrize("lost", [False, True], ids=["committed", "one more in memory"])
def test_a_snapshot_is_its_checkpoint_though_that_reuses_an_object(
    run_dir: Path, memory: Path, caplog: pytest.LogCaptureFixture, lost: bool
) -> None:
    """P44: memory has the whole of a step of which storage has a part under an older name; the run goes on from it."""
    ckpt = _start(run_dir, memory)
    ckpt.save(1, frozen_state(1))
    reused = ckpt.save(2, frozen_state(2))
    assert reused.reuses
    assert _last_seal(ckpt, memory).checkpoint.manifest_digest != reused.manifest_digest
    if lost:
        give_calls(ckpt, Refusing())
        ckpt.step(3, frozen_state(3))
        settle(ckpt)
    die(ckpt)
    with _start(run_dir, memory) as ckpt, caplog.at_level(logging.INFO, "ckpt_tasks"):
        state = frozen_state(0)
        assert ckpt.restore(state) == state["seen"][0] == 2 + lost
        assert state["model"]["adapter"][0].item() == 2.0 + lost
        assert f"Restored step {2 + lost} from memory" in caplog.text
        assert ckpt.save(4, frozen_state(4)).reuses
    chain = {c.manifest_digest: c.parent for c in ckpt.checkpoints()}
    assert [*chain.values()] == [*[*chain][1:], None]  # each one follows the one before it


def _last_seal(ckpt: Checkpointer, memory: Path) -> Seal:
    seal(ckpt)
    return max(_seals(memory).values(), key=lambda one: one.checkpoint.step)


def _seals(memory: Path) -> dict[Path, Seal]:
    return {path.parent: Seal.from_bytes(path.read_bytes()) for path in memory.rglob("seal.json")}


def _slot_of(memory: Path, step: int) -> Path:
    """Return the slot that has the snapshot of a step."""
    [slot] = [slot for slot, one in _seals(memory).items() if one.checkpoint.step == step]
    return slot


def test_without_shared_memory_it_is_said_what_is_lost(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A host that has no shared memory, or none that is free, is told that a crash goes back to storage."""
    monkeypatch.setattr(shared_memory, "_SHARED_MEMORY", tmp_path / "missing")
    with caplog.at_level(logging.WARNING, "ckpt_tasks"), opened(run_dir, memory_dir="auto") as ckpt:
        ckpt.save(1, state_of(1, SIZE))
        ckpt.save(2, state_of(2, SIZE))
        ckpt.close()
        ckpt.save(3, state_of(3, SIZE))
    assert caplog.text.count("after a crash, training goes on from storage") == 1
    caplog.clear()
    with opened(run_dir, memory_dir="auto") as ckpt:
        ckpt.acquire()
        ckpt.prune()  # who saves nothing has nothing to lose
    assert caplog.text == ""
    assert not (tmp_path / "missing").exists()
    assert committed(run_dir) == [1, 2, 3]


def test_sigterm_does_not_wait_for_a_store_for_ever(run_dir: Path, memory: Path) -> None:
    """P43: at SIGTERM a store that hangs is given `flush_timeout_s`; the step is in memory, and restored from there."""
    script = f"""
        import itertools, time
        from pathlib import Path
        from tests.crash.memory_loop import state_of
        from tests.support.pipelines import Gate, opened
        options = dict(memory_dir={str(memory)!r}, flush_timeout_s=1.0)
        with opened(Path({str(run_dir)!r}), Gate(), **options) as ckpt:
            for step in itertools.count(1):
                ckpt.step(step, state_of(step, {SIZE}))
                print(step, flush=True)
                time.sleep(0.05)
    """
    with Python("-c", textwrap.dedent(script)) as child:
        until = next(int(line) for line in child.stdout if int(line) == 3)
        child.send(signal.SIGTERM)
        assert child.ends(30).returncode == -signal.SIGTERM  # the gate lets a write go after 60 s
    assert committed(run_dir) == []
    with _start(run_dir, memory) as ckpt:
        state = state_of(0, SIZE)
        assert ckpt.restore(state) >= until
        assert step_of(state) == ckpt.position
