"""Code that torch.compile has built in a run: restored before the first step, and kept in the run after a commit.

With `compile_cache` torch builds in a directory of this host; each run has its own directory. A pack of this directory
(`format/pack.py`) is an object of the run beside the checkpoints. Only hosts of the same kind read the pack: the same
versions, device and instruction set. A pack is code: a person who can write to the run can run code in every process
that uses `compile_cache`.

Invariants

1. The directory has only files of a verified pack, and files that living processes have built since. Files that a
   killed compiler has left are never used.
2. A failure to read or keep a pack is only a warning: it never fails a restore, a save or a step.
3. A directory is packed only while no process holds a lock of torch and no file changes: so no compiler is writing a
   packed file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import stat
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ckpt_tasks.checkpoint.extension import Extension
from ckpt_tasks.checkpoint.save.pruning import Background
from ckpt_tasks.checkpoint.save.tenure import Tenure
from ckpt_tasks.errors import CkptError, IntegrityError
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.keys import COMPILED_PREFIX, Compiled, compiled_name, parse_compiled
from ckpt_tasks.format.pack import MAX_PACK_BYTES, is_packed_path, pack_files, unpack_files
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.process import close_descriptor, open_descriptor
from ckpt_tasks.storage.held_directory import hold
from ckpt_tasks.system import system

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_MOST_KINDS = 2
_KEPT = ".kept"  # This file names the pack in the directory, and the paths of the pack.
_LOCKS = "locks"  # torch locks a file in this directory for each build.
_log = logging.getLogger("ckpt_tasks")


class CompiledCode(Extension):
    """The compiled code of one run: `owned` restores it, and `committed` keeps new code."""

    def __post_init__(self) -> None:
        assert self.history is not None
        self._store = self.history.store
        self._kind = ""
        self._directory: Path | None = None
        self._tenure: Tenure | None = None
        self._background = Background(self._keep, "ckpt-compiled")
        self._said = ""

    def owned(self, tenure: Tenure) -> None:
        """Let torch.compile build in this run's directory, filled with the code kept for this kind of host."""
        self._tenure = tenure
        if self._directory is not None:
            return
        began_s, base = system().monotonic(), Path(tempfile.gettempdir(), f"ckpt-compiled-{os.getuid()}")
        given = Path(os.environ.get(_VARIABLE) or base / "ours")
        # torch itself may have set the variable, to its default.
        if given.parent != base and not given.name.startswith("torchinductor_"):
            self._warn(f"compile_cache has no effect, because {_VARIABLE} is set: {given}")
            return
        self._kind = kind_of_host()
        directory = base / digest_hex(f"{self._store.url} {self._kind}".encode())
        try:
            hold(directory, self._bring)
        except OSError as error:
            self._warn(f"compile_cache has no effect: {error}")
            return
        self._directory = directory
        os.environ[_VARIABLE] = str(directory)
        if self._kept(directory):
            tenure.resume.brought["compiled_s"] = system().monotonic() - began_s

    def committed(self, checkpoint: Checkpoint) -> None:
        """After a commit, check in the background for new code to keep."""
        if self._directory is not None:
            self._background.request(checkpoint)

    def released(self, limit_s: float) -> None:
        """Wait at most `limit_s` until the code that was new at the last commit is stored in the run."""
        self._background.finish(limit_s)

    def _packs(self) -> list[Compiled]:
        """List the run's packs of compiled code, packs of the newest owner first."""
        return sorted(filter(None, map(parse_compiled, self._store.names(COMPILED_PREFIX))), reverse=True)

    def _bring(self, directory: Path) -> None:
        """Unpack the newest good pack for this kind of host."""
        try:
            packs = [kept for kept in self._packs() if kept.kind == self._kind]
        except CkptError as error:
            packs = []
            self._warn(f"torch.compile builds anew: {error}")
        for kept in packs:
            try:
                data = self._store.get(compiled_name(kept), MAX_PACK_BYTES)
                if digest_hex(data) != kept.digest:
                    raise IntegrityError("the kept code is damaged", key=compiled_name(kept))
                files = dict(unpack_files(data))
                for path, content in files.items():
                    _write(directory / path, content)
                _write(directory / _KEPT, canonical_json([compiled_name(kept), sorted(files)]))
            except (CkptError, OSError) as error:
                self._warn(f"torch.compile builds anew: {error}")
            else:
                return

    def _kept(self, directory: Path) -> frozenset[str]:
        """Return the paths in the directory that a pack of the run has; none if the run lacks the pack."""
        try:
            name, paths = json.loads((directory / _KEPT).read_bytes())
            self._store.size(name)
        except (OSError, CkptError):
            return frozenset()
        return frozenset(paths)

    def _keep(self, checkpoint: Checkpoint) -> None:
        """Keep the directory as a pack, if it has files that the last pack lacks; only rank 0 does this."""
        directory, tenure = self._directory, self._tenure
        if directory is None or tenure is None or tenure.committer is None:
            return
        try:
            present = _files_in(directory)
            if present.keys() <= self._kept(directory):
                return
            if (size_bytes := sum(size for size, _ in present.values())) > MAX_PACK_BYTES:
                raise IntegrityError(f"{size_bytes >> 20} MiB are more than {MAX_PACK_BYTES >> 20}")
            files = {path: (directory / path).read_bytes() for path in present}
            if _is_building(directory) or _files_in(directory) != present:
                return  # Look again after the next commit.
            pieces = pack_files(files)
            new = Compiled(tenure.owner.epoch, self._kind, digest_hex(b"".join(pieces)))
            self._background.check()
            self._put(compiled_name(new), pieces)
            _write(directory / _KEPT, canonical_json([compiled_name(new), sorted(files)]))
            self._drop(new)
            first_s = tenure.resume.first_s
            fields = {} if first_s is None else {"step_s": round(first_s, 6)}
            size_bytes = sum(map(len, pieces))
            tenure.committer.note("compiled", {"step": checkpoint.step, "size_bytes": size_bytes, **fields})
        except (CkptError, OSError) as error:
            self._warn(f"Compiled code is not kept: {error}")

    def _put(self, name: str, pieces: list[bytes]) -> None:
        try:
            self._store.put(name, pieces)
        except CkptError:
            with suppress(CkptError):
                self._store.delete(name)  # The failed put may have left a part of the object.
            raise

    def _drop(self, new: Compiled) -> None:
        """Delete all packs except the newest one of each kind of host, for two kinds at most."""
        kinds = {new.kind}
        for kept in self._packs():
            if kept != new and (kept.kind in kinds or len(kinds) == _MOST_KINDS):
                self._store.delete(compiled_name(kept))
            kinds.add(kept.kind)

    def _warn(self, message: str) -> None:
        if message != self._said:
            _log.warning("%s", message)
        self._said = message


def kind_of_host() -> str:
    """Return a digest of all that compiled code depends on: versions, device, and the host's instruction set."""
    triton = ""
    with suppress(PackageNotFoundError):
        triton = version("triton")
    device = ""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}"
    facts = [torch.__version__, triton, device, sys.implementation.cache_tag, platform.machine(), *platform.libc_ver()]
    return digest_hex(canonical_json([*map(str, facts), *_processor()]))[:16]


def _processor() -> list[str]:
    """Return the model and the instruction set of the first processor, as Linux reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor()]
    return [line for line in lines if line.startswith(("vendor_id", "cpu family", "model", "flags", "Features"))]


def _files_in(directory: Path) -> dict[str, tuple[int, int]]:
    """Return size and modification time of every file that a pack can hold, by its path."""
    present = {}
    for root, _, names in os.walk(directory):
        for name in names:
            path, status = os.path.relpath(os.path.join(root, name), directory), os.lstat(os.path.join(root, name))
            if stat.S_ISREG(status.st_mode) and is_packed_path(path) and not path.startswith(f"{_LOCKS}/"):
                present[path] = status.st_size, status.st_mtime_ns
    return present


def _is_building(directory: Path) -> bool:
    """Return True if a compiler is building for torch in this directory."""
    for path in (directory / _LOCKS).glob("*.lock"):
        lock = open_descriptor(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # torch locks the file in the same way.
        except BlockingIOError:
            return True
        finally:
            close_descriptor(lock)
    return False


def _write(path: Path, content: bytes | memoryview) -> None:
    """Write a file that appears whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
