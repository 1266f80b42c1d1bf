"""Take a run directory in rank 0; afterwards all ranks have the ownership, or no rank has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from ckpt_tasks.checkpoint.extension import Extensions
from ckpt_tasks.checkpoint.memory.cache import SnapshotCache
from ckpt_tasks.checkpoint.ranks.exchange import Exchange, all_or_none, from_first
from ckpt_tasks.checkpoint.save.commit import Committer
from ckpt_tasks.checkpoint.save.pruning import Pruner
from ckpt_tasks.checkpoint.save.tenure import Line, Tenure
from ckpt_tasks.errors import ObjectNotFoundError, StoreError
from ckpt_tasks.format.parsing import typed
from ckpt_tasks.format.records import Owner
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.ownership import acquire, damage, identify
from ckpt_tasks.storage.locations import await_first_answer
from ckpt_tasks.storage.port import Store

_FIRST_ANSWER_S = 30.0


def await_store_of(config: CheckpointConfig) -> None:
    """Wait for the first answer of a run's store, as `take_run` does; raise StoreError or ConfigError."""
    store = config.location.open(config.run_key)
    await_store(store, SnapshotCache(store, config.memory_dir, Extensions.of(config, History(store))))


def await_store(store: Store, cache: SnapshotCache) -> None:
    """Wait half a minute for a store's first answer, if no process of this host has had one; raise StoreError then."""
    if not (store.near or cache.was_used()):
        await_first_answer(store, _FIRST_ANSWER_S)


def share_tenure(
    ranks: Exchange, topic: str, take: Callable[[], Tenure], line: Line, cache: SnapshotCache, *, deadline_s: float
) -> Tenure:
    """Take a run directory in rank 0, tell the other ranks, and open each rank's memory for the run's key.

    Raises the error of any rank in all ranks; the directory is not held then.
    """
    taken: list[Tenure] = []

    def own() -> bytes:
        taken.append(take())
        return json.dumps({"run_key": taken[0].run_key, "owner": asdict(taken[0].owner)}).encode()

    try:
        answer = json.loads(from_first(ranks, topic, own, deadline_s))
        tenure = taken[0] if taken else Tenure(typed(answer["owner"], Owner), answer["run_key"], line, ranks.size)
        with all_or_none(ranks, f"{topic}/memory", deadline_s) as confirm:
            try:
                cache.open(tenure.run_key)
            except ObjectNotFoundError as error:
                why = "this rank does not find the run that rank 0 has taken"
                raise StoreError(why, hint="Give all ranks one directory that they share.") from error
            confirm()
    except BaseException:
        for held in taken:
            held.quiet()
            held.release()  # Otherwise the next owner would wait for the timeout.
        raise
    return tenure


def take_run(
    history: History,
    config: CheckpointConfig,
    cache: SnapshotCache,
    pruner: Pruner,
    line: Line,
    *,
    single_writer: bool,
    take_over: bool,
    flow_run_id: str | None,
    world_size: int = 1,
) -> Tenure:
    """Take a run directory; make the heartbeat and the committer of its owner, and write the run's key.

    `single_writer`: the store cannot refuse a second writer. Raises OwnedError, RunMismatchError, NoGoodCheckpointError
    or StoreError; the directory is not held then.
    """
    cache.check()
    await_store(history.store, cache)
    key = config.run_key or history.store.url.rstrip("/").rpartition("/")[2]
    history.create(key, single_writer=single_writer)
    key = history.check(config.run_key) or key
    damaged = damage(history)
    me, best = identify(flow_run_id), (config.best_metric, config.best_mode)
    timeout_s = config.owner_timeout_s
    owner = acquire(history, me, take_over=take_over, timeout_s=timeout_s, best=best)
    committer = Committer(history, owner, pruner, line, owner_timeout_s=timeout_s)
    tenure = Tenure(owner, key, line, world_size, committer, damaged)
    try:
        history.store.keep_room()
        pruner.new_owner()
        tenure.beat()
    except BaseException:
        tenure.release()
        raise
    return tenure
