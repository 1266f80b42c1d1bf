"""Lightning's own checkpoints in our store: committed whole or not at all, verified when read, without pickle.

Each path that Lightning names is a run with one checkpoint. Checkpoints of a run of `CkptCallback` can be read, too:
the named parameters of an optimizer then get Lightning's numbers.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import distributed

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.pausing import say_nothing
from ckpt_tasks.checkpoint.restore.reading import Run, open_run
from ckpt_tasks.checkpoint.restore.values import Values, read_values
from ckpt_tasks.checkpoint.transfer.publishing import new_directory
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError, StateError
from ckpt_tasks.format.keys import LEDGER_PREFIX, is_run_key
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.targets import split_target
from ckpt_tasks.run.opening import open_checkpoint
from ckpt_tasks.state.kinds.optimizers import numbered

_MODEL, _OPTIMIZERS, _REST = "model", "optimizers", "lightning"  # CkptCallback gives its groups these names.


class CkptCheckpointIO(TorchCheckpointIO):
    """Let ModelCheckpoint, `trainer.save_checkpoint` and `ckpt_path=` write and read verified checkpoints.

    ::

        trainer = Trainer(plugins=[CkptCheckpointIO()], callbacks=[ModelCheckpoint(monitor="val_loss")])

    A path is a run directory with one checkpoint. `ckpt_path` may also name a run of CkptCallback, "runs/first", or one
    of its checkpoints, "runs/first@500" or "runs/first@best". Files that Lightning wrote itself are read as before.

    With many ranks the first rank saves, as Lightning does for `strategy="ddp"`.

    Saving raises UnsupportedStateError, with its key, for a value that is neither a tensor nor plain; ConfigError for
    `storage_options`; StateError if the path has a later step; and what `Checkpointer.save` raises. Loading raises
    CheckpointNotFoundError, IntegrityError and StoreError.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # AsyncCheckpointIO saves in one thread and removes in another.

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Commit a checkpoint at a path, in place of an existing one."""
        if storage_options is not None:
            raise ConfigError("storage_options are not taken", hint="Give the store's credentials by the environment.")
        step = int(checkpoint.get("global_step", 0))
        with self._lock, _alone() as group, _place_of(path) as (directory, key):
            config = CheckpointConfig(checkpoint_dir=directory, run_key=key, max_num_checkpoints=1, memory_dir=None)
            ckpt = Checkpointer(config, process_group=group)
            say_nothing(ckpt)  # It writes a file in the middle of a training.
            try:
                # A save must know which checkpoint it follows.
                newest_step = ckpt.restore({_REST: _Group({})}, only=[_REST])
                if newest_step > step:
                    raise StateError(
                        f"{path} has step {newest_step}, and step {step} would come after it",
                        hint="Save to another path, or remove that one first.",
                    )
                ckpt.save(step, _groups(checkpoint))
            finally:
                ckpt.close()

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint as Lightning made it, with tensors on the CPU; a fit then sets up its data again."""
        _set_up_after_restore()
        if os.path.isfile(path):
            return super().load_checkpoint(path, map_location, weights_only)
        directory, which = split_target(os.fspath(path))
        run = open_run(directory)
        return _checkpoint(read_values(run.history.store, run.find("latest" if which is None else which)))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint that `save_checkpoint` made; do nothing if the path is missing, as Lightning does.

        Raises ConfigError for any other run.
        """
        if os.path.isfile(path):
            super().remove_checkpoint(path)
            return
        with self._lock:
            try:
                run = open_run(path)
            except CheckpointNotFoundError:
                return
            _refuse_other(run)
            store = run.history.store
            # Delete top-down: without its ledger the checkpoint does not exist.
            names = store.names("")
            for name in sorted(names, key=lambda name: (name.startswith(LEDGER_PREFIX), name), reverse=True):
                store.delete(name)
            shutil.rmtree(path, ignore_errors=not store.near)


def _set_up_after_restore() -> None:
    """Make the Trainer that reads a checkpoint (found on the stack) set up its data again once loops are restored."""
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    if frame is None or (trainer := frame.f_locals["self"]).state.fn != TrainerFn.FITTING:
        return
    loop = trainer.fit_loop
    restore = loop.on_load_checkpoint

    def restored(state: dict[str, Any]) -> None:
        del loop.on_load_checkpoint
        restore(state)
        set_up_again(trainer)

    loop.on_load_checkpoint = restored


def set_up_again(trainer: Trainer) -> None:
    """Let a restored trainer set up its data again, if some code had set it up before the restore.

    `estimated_stepping_batches` in configure_optimizers begins the first epoch's batches, and Lightning sets loaders to
    a restored position only when it sets the data up.
    """
    if (fetcher := trainer.fit_loop._data_fetcher) is not None:
        fetcher.teardown()
        trainer.fit_loop._combined_loader = None


@contextmanager
def _place_of(path: str | Path) -> Iterator[tuple[str | Path, str | None]]:
    """Yield the directory to save in, and its name: a new path has another one until its checkpoint is committed.

    Lightning resumes from any path that exists. On an object store a kill may leave a path without a checkpoint.
    """
    if "://" in str(path) or os.path.lexists(path):
        yield path, None
    else:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).name)
        with new_directory(Path(path)) as directory:
            yield directory, name if is_run_key(name) else None


@contextmanager
def _alone() -> Iterator[distributed.ProcessGroup | None]:
    """Yield a process group of this rank alone: if all ranks share a state, Lightning lets the first rank save."""
    if not (distributed.is_available() and distributed.is_initialized()):
        yield None
        return
    ranks = [distributed.get_rank()]
    group = distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
    try:
        yield group
    finally:
        distributed.destroy_process_group(group)


class _Group:
    """A part of Lightning's checkpoint, stored unchanged as a stateful object."""

    def __init__(self, value: Mapping[str, Any]):
        self._value = value

    def state_dict(self) -> Mapping[str, Any]:
        return self._value

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._value = state


def _groups(checkpoint: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    groups: dict[str, Any] = {_REST: _Group(rest)}
    if "state_dict" in checkpoint:
        groups[_MODEL] = _Group(checkpoint["state_dict"])
    if "optimizer_states" in checkpoint:
        rest["optimizer_states"] = len(checkpoint["optimizer_states"])
        groups[_OPTIMIZERS] = [_Group(state) for state in checkpoint["optimizer_states"]]
    return groups


def _checkpoint(groups: Mapping[str, Values]) -> dict[str, Any]:
    if _REST not in groups:
        raise ConfigError(
            f"the run is not one of Lightning: it holds {', '.join(groups)}",
            hint="Name one that CkptCallback or CkptCheckpointIO has written.",
        )
    checkpoint = dict(groups[_REST].value)
    if _MODEL in groups:
        checkpoint.setdefault("state_dict", groups[_MODEL].value)
    optimizers = {name: group for name, group in groups.items() if name.startswith(f"{_OPTIMIZERS}_")}
    if optimizers or "optimizer_states" in checkpoint:
        ordered = (optimizers[f"{_OPTIMIZERS}_{n}"] for n in range(len(optimizers)))
        checkpoint["optimizer_states"] = [
            numbered(one.value) if one.kind == "optimizer" else one.value for one in ordered
        ]
    return checkpoint


def _refuse_other(run: Run) -> None:
    for checkpoint in run.checkpoints():
        groups = open_checkpoint(run.history.store, checkpoint).groups
        if _REST not in groups or (_MODEL in groups and groups[_MODEL].kind != "stateful"):
            raise ConfigError(f"{run.history.store.url} was not saved by CkptCheckpointIO", hint="Remove it by hand.")
