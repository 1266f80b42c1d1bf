"""Other tools that save a training state, each behind the same few calls, so that a benchmark treats all alike.

Those that the `bench` extra leaves out (torchsnapshot, torch_checkpointing, Orbax with JAX) are heavy and bring much of
their own: install them beside the project, never into its own environment, and run the benchmarks from there:

    python3 -m venv ../peers
    ../peers/bin/pip install -c constraints.txt -r benchmarks/requirements-peers.txt -e '.[bench]'
    ../peers/bin/python -m benchmarks

Without them their rows say "not installed".
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.save.listening import Listener

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "CONTENDERS",
    "OURS",
    "PEERS",
    "Contender",
    "State",
    "differing",
    "flat",
    "is_installed",
    "states",
]

State = Mapping[str, Any]  # name → model, optimizer or whatever else has state_dict and load_state_dict


class Contender(ABC):
    """One way to save. It is made before the model, as a training script does, and one save is under way at a time.

    `package` is what it needs installed; `synced` says whether the files are fsynced when `wait` returns.
    """

    package: ClassVar[str] = "torch"
    synced: ClassVar[bool] = True

    def __init__(self, directory: Path, device: str):
        self.directory = directory
        self.device = device
        self._pending: Any = None  # the tool's future of the save under way, where it gives one

    @abstractmethod
    def save_async(self, state: State, path: Path) -> None:
        """Start a save to `path`, which is new; return when the tool does. An earlier save is waited for first."""

    def updating(self) -> AbstractContextManager[object]:
        """Surround the optimizer's step: the block waits until the state may change, or a hook of that step does."""
        return nullcontext()

    def wait(self) -> None:
        """Return when the save is complete, as the tool understands it."""
        if self._pending is not None:
            self._pending.result()

    @abstractmethod
    def load(self, path: Path, into: State) -> None:
        """Read what was saved last, at `path`, into live objects of the same structure."""

    def close(self) -> None:
        """End what the tool has started."""
        self.wait()


class CkptTasks(Contender):
    """This project: the run directory is its own, it keeps the newest two and removes older ones within the save."""

    def __init__(self, directory: Path, device: str):
        super().__init__(directory, device)
        self._run = str(directory / "ckpt-tasks")
        self._step = 0
        config = CheckpointConfig(checkpoint_dir=self._run, run_key="bench", step_interval=1, max_num_checkpoints=2)
        self._ckpt = Checkpointer(config)
        self.commits: list[object] = []
        self._ckpt.listen(Listener(committed=self.commits.append))

    def save_async(self, state: State, path: Path) -> None:
        self.wait()
        self._step += 1
        self._ckpt.step(self._step, dict(state))

    def wait(self) -> None:
        self._ckpt.wait()
        if len(self.commits) != self._step:  # a newer one took its place: it has cost too little
            raise RuntimeError(f"{len(self.commits)} of {self._step} saves were committed")

    def load(self, path: Path, into: State) -> None:
        run = open_run(self._run)
        run.restore(run.find("latest"), dict(into))

    def close(self) -> None:
        self._ckpt.close()


class TorchSave(Contender):
    """torch.save of the state_dicts."""

    synced = False

    def save_async(self, state: State, path: Path) -> None:
        torch.save(states(state), path)

    def load(self, path: Path, into: State) -> None:
        loaded = torch.load(path, weights_only=True)
        for name, part in into.items():
            part.load_state_dict(loaded[name])


class Safetensors(Contender):
    """safetensors' save_file: tensors only; learning rates and the like are left out."""

    package = "safetensors"
    synced = False

    def save_async(self, state: State, path: Path) -> None:
        save_file(flat(states(state)), path)

    def load(self, path: Path, into: State) -> None:
        _copy_into(into, load_file(path))


class DcpSave(Contender):
    """torch.distributed.checkpoint.save in one process; its writer fsyncs every file."""

    def __init__(self, directory: Path, device: str):
        super().__init__(directory, device)
        self._dcp: Any = import_module("torch.distributed.checkpoint")

    def save_async(self, state: State, path: Path) -> None:
        self._dcp.save(states(state), checkpoint_id=path, no_dist=True)

    def load(self, path: Path, into: State) -> None:
        self._dcp.load(states(into), checkpoint_id=path, no_dist=True)  # into the tensors themselves


class DcpAsync(DcpSave):
    """DCP's async_save as it comes: it copies into new memory while the caller waits, then writes in a thread."""

    def __init__(self, directory: Path, device: str):
        super().__init__(directory, device)
        self._options: dict[str, Any] = {"no_dist": True}

    def save_async(self, state: State, path: Path) -> None:
        self.wait()  # as its tutorial says: one save at a time, or the copies add up
        self._pending = self._dcp.async_save(states(state), checkpoint_id=path, **self._options)


class DcpAsyncProcess(DcpAsync):
    """The same, written by a process of its own; that one needs a process group here and makes another there."""

    def __init__(self, directory: Path, device: str):
        super().__init__(directory, device)
        self._dist: Any = import_module("torch.distributed")
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # else the process looks for this one under the host's own name
        self._dist.init_process_group(
            "cpu:gloo", store=self._dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
        )
        kinds = import_module("torch.distributed.checkpoint.state_dict_saver").AsyncCheckpointerType
        self._options = {"async_checkpointer_type": kinds.PROCESS}

    def close(self) -> None:
        super().close()
        self._dist.destroy_process_group()


class DcpAsyncCached(DcpAsync):
    """DCP's async_save with a DefaultStager that is kept: the copy goes into shared memory that is there already."""

    in_thread: ClassVar[bool] = False

    def __init__(self, directory: Path, device: str):
        super().__init__(directory, device)
        staging = import_module("torch.distributed.checkpoint.staging")
        cuda = device != "cpu"  # its pinned memory and its stream are for accelerators
        self._stager = staging.DefaultStager(
            staging.StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=True,
                use_async_staging=self.in_thread,
                use_non_blocking_copy=cuda,
            )
        )
        self._options["async_stager"] = self._stager

    def close(self) -> None:
        super().close()
        self._stager.close()


class DcpAsyncStaging(DcpAsyncCached):
    """The same, and the copy is made in a thread too: the caller must wait for it before the state changes."""

    in_thread = True

    @contextmanager
    def updating(self) -> Iterator[None]:
        if self._pending is not None:
            self._pending.staging_completion.result()
        yield

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.upload_completion.result()


class TorchCheckpointing(Contender):
    """torch_checkpointing: copies in a thread, writes in a process; the caller locks whatever changes the state.

    O_DIRECT is switched off: 0.1.1 writes the unaligned end of a file with it, which ext4 refuses (EINVAL).
    """

    package = "torch_checkpointing"
    synced = False

    def __init__(self, directory: Path, device: str):
        super().__init__(directory, device)
        manager = import_module(self.package).CheckpointManager
        storage = import_module(f"{self.package}.storage.filesystem")
        self._manager = manager(
            manager.Config(storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False))
        )

    def save_async(self, state: State, path: Path) -> None:
        self._pending = self._manager.save(str(path), states(state))

    def updating(self) -> AbstractContextManager[object]:
        locked: AbstractContextManager[object] = self._manager.lock()
        return locked

    def load(self, path: Path, into: State) -> None:
        _copy_into(into, flat(self._manager.load(str(path), into=states(into))))

    def close(self) -> None:
        super().close()
        self._manager.close()


class TorchsnapshotTake(Contender):
    """torchsnapshot's Snapshot.take."""

    package = "torchsnapshot"
    synced = False

    def __init__(self, directory: Path, device: str):
        super().__init__(directory, device)
        self._snapshot: Any = import_module(self.package).Snapshot

    def save_async(self, state: State, path: Path) -> None:
        self._snapshot.take(str(path), dict(state))

    def load(self, path: Path, into: State) -> None:
        self._snapshot(str(path)).restore(dict(into))


class TorchsnapshotAsyncTake(TorchsnapshotTake):
    """torchsnapshot's Snapshot.async_take: it returns when everything has been copied."""

    def save_async(self, state: State, path: Path) -> None:
        self.wait()
        self._pending = self._snapshot.async_take(str(path), dict(state))

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()


class Orbax(Contender):
    """Orbax's Checkpointer over NumPy views of the tensors; tensorstore below it fsyncs every file."""

    package = "orbax.checkpoint"
    kind: ClassVar[str] = "Checkpointer"

    def __init__(self, directory: Path, device: str):
        super().__init__(directory, device)
        orbax = import_module(self.package)
        self._checkpointer = getattr(orbax, self.kind)(orbax.PyTreeCheckpointHandler())

    def save_async(self, state: State, path: Path) -> None:
        self._checkpointer.save(path, _as_numpy(states(state)))

    def load(self, path: Path, into: State) -> None:
        _copy_into(into, flat(self._checkpointer.restore(path)))

    def close(self) -> None:
        super().close()
        self._checkpointer.close()


class OrbaxAsync(Orbax):
    """Orbax's AsyncCheckpointer: NumPy arrays are copied before it returns."""

    kind = "AsyncCheckpointer"

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()


OURS = "ckpt-tasks"
PEERS: dict[str, type[Contender]] = {
    "torch.save": TorchSave,
    "safetensors save_file": Safetensors,
    "DCP save": DcpSave,
    "DCP async_save, thread": DcpAsync,
    "DCP async_save, process": DcpAsyncProcess,
    "DCP async_save, cached DefaultStager": DcpAsyncCached,
    "DCP async_save, DefaultStager in a thread": DcpAsyncStaging,
    "torch_checkpointing": TorchCheckpointing,
    "torchsnapshot take": TorchsnapshotTake,
    "torchsnapshot async_take": TorchsnapshotAsyncTake,
    "Orbax": Orbax,
    "Orbax, async": OrbaxAsync,
}
CONTENDERS: dict[str, type[Contender]] = {OURS: CkptTasks, **PEERS}


def is_installed(contender: type[Contender]) -> bool:
    """Say whether the package that a contender needs can be imported, without importing it."""
    try:
        return find_spec(contender.package) is not None
    except ModuleNotFoundError:  # not even the package that it lies in
        return False


def states(state: State) -> dict[str, Any]:
    """Return the state_dicts, as torch's own tools save them."""
    return {name: part.state_dict() for name, part in state.items()}


def flat(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return every tensor (and NumPy array) of a tree of dicts and lists by its path."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    if isinstance(tree, np.ndarray | np.generic):
        return {prefix: torch.from_numpy(np.asarray(tree))}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    found: dict[str, torch.Tensor] = {}
    for name, value in items:
        found |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found


def differing(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> list[str]:
    """Name the tensors whose bits are not the expected ones, and those that one side lacks."""
    odd = expected.keys() ^ found.keys()
    return sorted(odd | {name for name in expected.keys() - odd if not _same_bits(expected[name], found[name])})


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _copy_into(into: State, loaded: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in flat(states(into)).items():
            tensor.copy_(loaded[name])


def _as_numpy(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().numpy()
    if isinstance(tree, Mapping):
        return {str(name): _as_numpy(value) for name, value in tree.items()}
    return [_as_numpy(value) for value in tree] if isinstance(tree, list | tuple) else tree
