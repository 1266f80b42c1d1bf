"""A run directory's format.json: the run's key, and the tests that its store has passed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ckpt_tasks.errors import (
    CheckpointNotFoundError,
    IntegrityError,
    ObjectExistsError,
    ObjectNotFoundError,
    RunMismatchError,
    StoreError,
)
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.keys import FORMAT_NAME
from ckpt_tasks.format.parsing import FORMAT_VERSION, check_version, well_formed
from ckpt_tasks.storage.port import Store
from ckpt_tasks.storage.probe import prove
from ckpt_tasks.storage.retrying import read_good
from ckpt_tasks.system import now_iso

_PUTS = 5
_LOOKED_AT = 1000  # If a directory is no run, search this many names in it for runs.
_NAMED = 5
_NEAR = 2


class RunFormat:
    """Creates and checks the format.json of one run directory."""

    def __init__(self, store: Store):
        self.store = store

    def create(self, run_key: str, *, single_writer: bool = False) -> None:
        """Write the run directory's format.json if it is missing.

        A server is tested first, once for each endpoint through which the directory is reached. Raises ConfigError if
        the server lacks an operation that commits need; with `single_writer` put-if-absent is not needed.
        """
        body = self._format()
        if body is None:
            new = {"version": FORMAT_VERSION, "run_key": run_key, "created_at": now_iso()}
            self._put_format(self._proved(new, single_writer))
        elif not body and self.store.endpoint is not None:
            self._proved({}, single_writer)  # The damaged file may have recorded that the store has no put-if-absent.
        elif body.get("run_key") == run_key and body.get("endpoint") != self.store.endpoint:
            self.store.replace(FORMAT_NAME, self._proved(body, bool(body.get("single_writer"))))

    def check(self, run_key: str | None) -> str | None:
        """Return the run's key; None if format.json is damaged (every manifest holds the key as well).

        Raises CheckpointNotFoundError if there is no run, RunMismatchError if it is another run, and
        FormatVersionError if a newer version wrote it.
        """
        body = self._format()
        if body is None:
            raise self._no_run()
        if not body:
            return None
        key: str = body["run_key"]
        if run_key is not None and key != run_key:
            raise RunMismatchError(
                f"{self.store.url} holds the run {key!r}, not {run_key!r}",
                hint="Use another directory, or the run's own key.",
            )
        if body.get("single_writer") is True:
            self.store.assume_single_writer()
        return key

    def _no_run(self) -> CheckpointNotFoundError:
        """Return the error for a missing run; its hint names runs in the directory, or beside it with such a name."""
        url, names = self.store.url, list[str]()
        with suppress(StoreError):
            names = list(self.store.names("", limit=_LOOKED_AT))
        runs = sorted({name.partition("/")[0] for name in names if name.endswith(f"/{FORMAT_NAME}")})
        here, name = os.path.split(url)
        beside = [path.parent.name for path in Path(here).glob(f"*/{FORMAT_NAME}")] if os.path.isabs(url) else []
        if runs:
            hint = f"There are runs in it: {', '.join(runs[:_NAMED])}."
        elif near := get_close_matches(name, beside, n=_NEAR):
            hint = f"Did you mean {' or '.join(os.path.join(here, one) for one in near)}?"
        else:
            hint = "A training makes its run when it starts. Check the name."
        why = f"it has no {FORMAT_NAME}" if names else "nothing is there"
        return CheckpointNotFoundError(f"there is no run at {url}: {why}", hint=hint)

    def _format(self) -> dict[str, Any] | None:
        """Read format.json; return None if it is missing, {} if it is damaged."""
        try:
            return read_good(self.store, self._read_format)
        except ObjectNotFoundError:
            return None
        except IntegrityError:
            return {}

    def _read_format(self) -> dict[str, Any]:
        with well_formed("it", FORMAT_NAME):
            body: Any = json.loads(self.store.get(FORMAT_NAME, 1 << 20))
            if digest_hex(canonical_json({k: v for k, v in body.items() if k != "digest"})) != body["digest"]:
                raise IntegrityError("its bytes are not what was written", key=FORMAT_NAME)
            check_version(body["version"], FORMAT_NAME)
            return {**body, "run_key": str(body["run_key"])}

    def _put_format(self, data: bytes) -> None:
        for left in reversed(range(_PUTS)):
            try:
                self.store.put_if_absent(FORMAT_NAME, data)
            except ObjectExistsError:
                return  # Another process has written it meanwhile.
            except StoreError:
                if self._format() is not None:
                    return  # It was written; only the answer was lost.
                if not left:
                    raise
            else:
                return

    def _proved(self, body: Mapping[str, Any], single_writer: bool) -> bytes:
        new = {key: value for key, value in body.items() if key != "digest"}
        new |= {"single_writer": single_writer}
        if single_writer:
            self.store.assume_single_writer()
        if self.store.endpoint is not None:
            new |= {"endpoint": self.store.endpoint, "proved": prove(self.store, single_writer=single_writer)}
        return canonical_json({**new, "digest": digest_hex(canonical_json(new))})
