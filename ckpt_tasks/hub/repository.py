"""A repository of the Hugging Face Hub as a store: read at one commit, written by one commit.

Invariants

1. Reads see the commit that was newest when the store was opened, and the objects that this store has put since.
2. Only `commit` makes objects visible, all or none of them. Bytes of large objects are sent earlier, and belong to no
   commit until then: a killed process leaves nothing that looks like a part of a run.
3. The parent of a new commit is the commit that the store reads: if the repository has a newer commit, the Hub refuses
   the new one.

huggingface_hub sends all requests, retries them and finds the endpoint (HF_ENDPOINT) and the token (HF_TOKEN).
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_url
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public names that its types do not export
    build_hf_headers,
    disable_progress_bars,
    hf_raise_for_status,
    http_backoff,
)

from ckpt_tasks.errors import (
    CheckpointNotFoundError,
    CkptError,
    ConfigError,
    IntegrityError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
)
from ckpt_tasks.format.keys import FORMAT_NAME, is_object_name
from ckpt_tasks.storage.port import OneByOne, Store
from ckpt_tasks.storage.secrets import without_secrets

_NAME = re.compile(r"(?:hf://)?([\w.-]+/[\w.-]+)(?:@([^@\s]+))?", re.ASCII)
_SENT_AT_ONCE_BYTES = 32 << 20  # Smaller objects wait in memory until their sum reaches this size.
_SIGN_OF_LIFE = "heartbeat/"


class HubRepository(OneByOne):
    """A model repository as a store; see `Store` for the contract of each method.

    `name` is ORG/NAME or ORG/NAME@REVISION. Raises ConfigError for any other name or an unknown revision. A repository
    that does not exist is empty until `create`. `quiet` hides the library's progress bars in the whole process.
    """

    near = False
    gap_bytes = 8 << 20
    endpoint = None  # With None, the store is not tested before use: its one commit is atomic.

    def __init__(self, name: str, *, quiet: bool = False):
        match = _NAME.fullmatch(name)
        if match is None:
            raise ConfigError(f"{name!r:.200} is not a repository", hint="Write ORG/NAME or ORG/NAME@REVISION.")
        self.repo_id, self.revision = match[1], match[2]
        self.url = f"hf://{self.repo_id}" + (f"@{self.revision}" if self.revision else "")
        if quiet:
            disable_progress_bars()
        self.api = HfApi()
        self.at: str | None = None  # The id of the commit that this store reads; None without a repository.
        self.files: dict[str, int] = {}  # Every file of the commit, with its size in bytes.
        self._kept: dict[str, bytes] = {}
        self._sent: dict[str, int] = {}
        self._waiting: list[CommitOperationAdd] = []
        self._operations: list[CommitOperationAdd] = []
        self._open: list[IO[bytes]] = []
        with suppress(CheckpointNotFoundError), self.asking():
            self._look()

    def __repr__(self) -> str:
        return f"HubRepository({self.url!r})"

    @property
    def holds_run(self) -> bool:
        """Whether the commit that this store reads has a run."""
        return FORMAT_NAME in self.files

    @property
    def has_news(self) -> bool:
        """Whether `commit` has new objects to make visible."""
        return bool(self._sent) or any(not name.startswith(_SIGN_OF_LIFE) for name in self._kept)

    def create(self, *, private: bool | None) -> None:
        """Create the repository, and the branch that `revision` names, if they do not exist."""
        if self.at is not None:
            return
        with self.asking():
            self.api.create_repo(self.repo_id, private=private, exist_ok=True)
            if self.revision:
                self.api.create_branch(self.repo_id, branch=self.revision, exist_ok=True)
            self._look()

    def commit(self, message: str, files: Sequence[CommitOperationAdd] = (), delete: Sequence[str] = ()) -> str:
        """Commit all objects that were put and `files`, and delete the files in `delete`; return the commit's id.

        Raises StoreError if the repository has a newer commit than this store reads.
        """
        kept = {name: data for name, data in self._kept.items() if not name.startswith(_SIGN_OF_LIFE)}
        small = [CommitOperationAdd(name, data) for name, data in kept.items()]
        gone = [CommitOperationDelete(name, is_folder=False) for name in delete]
        with self.asking(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The library warns that .arrow files usually belong to datasets.
            done = self.api.create_commit(
                self.repo_id,
                [*self._operations, *self._waiting, *files, *small, *gone],
                commit_message=message,
                revision=self.revision,
                parent_commit=self.at,
            )
        return str(done.oid)

    # ── the methods of Store that a copy of a run calls ──────────────────────────────────────────────────────────

    def put(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        self._check_absent(name)
        size_bytes = sum(memoryview(piece).nbytes for piece in body)
        content: bytes | str
        if size_bytes < _SENT_AT_ONCE_BYTES:
            content = b"".join(body)
        else:
            file = tempfile.TemporaryFile()  # noqa: SIM115 (closed when its bytes are sent)
            self._open.append(file)
            file.writelines(body)
            file.flush()
            content = f"/proc/self/fd/{file.fileno()}"  # The file has no name, so a killed process leaves no file.
        self._waiting.append(CommitOperationAdd(name, content))
        self._sent[name] = size_bytes
        if sum(one.upload_info.size for one in self._waiting) >= _SENT_AT_ONCE_BYTES:
            self._send()

    def put_if_absent(self, name: str, body: bytes) -> None:
        self._check_absent(name)
        self._kept[name] = bytes(body)

    def replace(self, name: str, body: bytes) -> None:
        self._kept[name] = bytes(body)

    def adopt(self, source: Store, name: str, size_bytes: int) -> bool:
        return False

    def get(self, name: str, max_bytes: int) -> bytes:
        size_bytes = self.size(name)
        if size_bytes > max_bytes:
            raise IntegrityError(f"the object has {size_bytes} bytes, more than {max_bytes}", key=name)
        data = bytearray(size_bytes)
        self.read(name, 0, memoryview(data))
        return bytes(data)

    def read(self, name: str, begin: int, into: memoryview) -> None:
        end = begin + into.nbytes
        if name in self._kept:
            data = self._kept[name][begin:end]
        elif self.size(name) < end:
            raise IntegrityError(f"the object ends before byte {end}", key=name)
        else:
            data = self._ranged(name, begin, end) if into.nbytes else b""
        if len(data) != into.nbytes:
            raise IntegrityError(f"{len(data)} bytes came of {into.nbytes}", key=name)
        into[:] = data

    def size(self, name: str) -> int:
        for sizes in (self.files, self._sent):
            if name in sizes:
                return sizes[name]
        if name not in self._kept:
            raise ObjectNotFoundError(f"{self.url} has no such object", key=name)
        return len(self._kept[name])

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        every = {*self.files, *self._sent, *self._kept}
        return sorted(name for name in every if name.startswith(prefix) and is_object_name(name))[:limit]

    def delete(self, name: str) -> None:
        self._kept.pop(name, None)  # A copy deletes only heartbeats, which are in no commit.

    def drop_unfinished(self, dead: Callable[[str], bool]) -> None:
        """Do nothing: the Hub frees bytes that belong to no commit."""

    def assume_single_writer(self) -> None:
        """Do nothing: `commit` names its parent, so a second writer is refused."""

    def keep_room(self) -> None:
        """Do nothing."""

    # ── private helpers ──────────────────────────────────────────────────────────────────────────────────────────

    def _look(self) -> None:
        self.at = self.api.repo_info(self.repo_id, revision=self.revision).sha
        entries = self.api.list_repo_tree(self.repo_id, recursive=True, revision=self.at)
        self.files = {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}

    def _check_absent(self, name: str) -> None:
        if name in self.files or name in self._sent or name in self._kept:
            raise ObjectExistsError("the object exists already", key=name)

    def _send(self) -> None:
        """Send the bytes of the waiting objects, except those that the Hub already has."""
        with self.asking():
            self.api.preupload_lfs_files(self.repo_id, self._waiting, revision=self.revision)
        self._operations += self._waiting
        if not any(isinstance(one.path_or_fileobj, str) for one in self._waiting):  # The library has sent all files.
            for file in self._open:
                file.close()
            self._open.clear()
        self._waiting = []

    def _ranged(self, name: str, begin: int, end: int) -> bytes:
        url = hf_hub_url(self.repo_id, name, revision=self.at, endpoint=self.api.endpoint)
        headers = {**build_hf_headers(token=self.api.token), "Range": f"bytes={begin}-{end - 1}"}
        with self.asking():
            answer = http_backoff("GET", url, headers={**headers, "Accept-Encoding": "identity"})
            hf_raise_for_status(answer)
        return answer.content if answer.status_code == 206 else answer.content[begin:end]

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Turn the library's errors into errors of this package."""
        try:
            yield
        except CkptError:
            raise
        except Exception as error:
            raise self._ours(error) from error

    def _ours(self, error: Exception) -> CkptError:
        if type(error) is RuntimeError and isinstance(error.__cause__, Exception):
            error = error.__cause__  # The library has wrapped the error of an upload in a RuntimeError.
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        text = without_secrets(" ".join(str(error).split())) or type(error).__name__
        if isinstance(error, RevisionNotFoundError):
            return ConfigError(f"{self.repo_id} has no revision {self.revision}")
        if isinstance(error, HFValidationError):
            return ConfigError(text)
        if isinstance(error, RepositoryNotFoundError):
            hint = "Check the name; a private one needs HF_TOKEN or `hf auth login`."
            return CheckpointNotFoundError(f"the Hub shows no repository {self.repo_id}", hint=hint)
        if status in (409, 412):
            hint = "Nothing of this was committed. Give the same command again."
            return StoreError(f"{self.url} has another commit than {self.at}, which was read", hint=hint)
        if status in (401, 403) or isinstance(error, LocalTokenNotFoundError):
            failure = StoreError(f"the Hub refuses: {text}", hint="HF_TOKEN, or `hf auth login`, must allow it.")
            failure.denied = True
            return failure
        return StoreError(f"the Hub fails: {text}", hint="Give the same command again: what was sent is found there.")
