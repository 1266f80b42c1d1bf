"""A repository of the Hugging Face Hub: read at one commit, written by one commit.

Invariants

1. Reads see the commit that was newest when the repository was opened.
2. Only `commit` makes files visible, all or none of them.
3. The parent of a new commit is the commit that was read: if the repository has a newer commit, the Hub refuses the new
   one.

huggingface_hub sends all requests, retries them and finds the endpoint (HF_ENDPOINT) and the token (HF_TOKEN).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

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
    StoreError,
)
from ckpt_tasks.storage.secrets import without_secrets

_NAME = re.compile(r"(?:hf://)?([\w.-]+/[\w.-]+)(?:@([^@\s]+))?", re.ASCII)


class HubRepository:
    """A model repository.

    `name` is ORG/NAME or ORG/NAME@REVISION. Raises ConfigError for any other name or an unknown revision. A repository
    that does not exist is empty until `create`. `quiet` hides the library's progress bars in the whole process.
    """

    def __init__(self, name: str, *, quiet: bool = False):
        match = _NAME.fullmatch(name)
        if match is None:
            raise ConfigError(f"{name!r:.200} is not a repository", hint="Write ORG/NAME or ORG/NAME@REVISION.")
        self.repo_id, self.revision = match[1], match[2]
        self.url = f"hf://{self.repo_id}" + (f"@{self.revision}" if self.revision else "")
        if quiet:
            disable_progress_bars()
        self.api = HfApi()
        self.at: str | None = None  # The id of the commit that is read; None without a repository.
        self.files: dict[str, int] = {}  # Every file of the commit, with its size in bytes.
        with suppress(CheckpointNotFoundError), self.asking():
            self._look()

    def __repr__(self) -> str:
        return f"HubRepository({self.url!r})"

    def create(self, *, private: bool | None) -> None:
        """Create the repository, and the branch that `revision` names, if they do not exist."""
        if self.at is not None:
            return
        with self.asking():
            self.api.create_repo(self.repo_id, private=private, exist_ok=True)
            if self.revision:
                self.api.create_branch(self.repo_id, branch=self.revision, exist_ok=True)
            self._look()

    def commit(self, message: str, files: Sequence[CommitOperationAdd], delete: Sequence[str]) -> str:
        """Commit `files`, and delete the files in `delete`; return the commit's id.

        Raises StoreError if the repository has a newer commit than the one that was read.
        """
        gone = [CommitOperationDelete(name, is_folder=False) for name in delete]
        with self.asking():
            done = self.api.create_commit(
                self.repo_id,
                [*files, *gone],
                commit_message=message,
                revision=self.revision,
                parent_commit=self.at,
            )
        return str(done.oid)

    def get(self, name: str) -> bytes:
        """Return the bytes of a file at the commit that was read."""
        url = hf_hub_url(self.repo_id, name, revision=self.at, endpoint=self.api.endpoint)
        with self.asking():
            answer = http_backoff("GET", url, headers=build_hf_headers(token=self.api.token))
            hf_raise_for_status(answer)
        return answer.content

    # ── private helpers ──────────────────────────────────────────────────────────────────────────────────────────

    def _look(self) -> None:
        self.at = self.api.repo_info(self.repo_id, revision=self.revision).sha
        entries = self.api.list_repo_tree(self.repo_id, recursive=True, revision=self.at)
        self.files = {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}

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
