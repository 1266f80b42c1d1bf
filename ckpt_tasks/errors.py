"""Every exception that ckpt_tasks raises, grouped by what the handler does next.

::

    CkptError
    ├── ConfigError                  fix the call: nothing was read or written
    │   └── ProgramError             … the program of a flow cannot be built
    ├── StateError                   fix the state: nothing was written, the target is untouched
    │   ├── NonFiniteError           … a metric is NaN or infinite: restore an older step, and change what made it so
    │   │   └── SpikeError           … a metric is far above its earlier values: the same
    │   ├── UnsupportedStateError    … a value that cannot be stored
    │   └── StateMismatchError       … the checkpoint and the target differ
    ├── RunMismatchError             use another directory: this one belongs to another run
    ├── FormatVersionError           upgrade ckpt_tasks: a newer version wrote this
    ├── CheckpointNotFoundError      choose another step: there is no such checkpoint
    ├── IntegrityError               take an older checkpoint: bytes are not what was written
    │   └── NoGoodCheckpointError    … and none of the older ones is good either
    ├── StoreError                   look at the store, then try again
    │   ├── ObjectNotFoundError
    │   └── ObjectExistsError
    ├── CommitUncertainError         start again: the commit may or may not have landed, no data is lost
    ├── OwnerError
    │   ├── OwnedError               wait, or take over: a live process holds the run directory
    │   └── FencedError              stop: another process has taken the run directory over
    ├── RankError                    look at the rank that is named: it died, failed or hung; a retry starts a new gang
    ├── NoProgressError              look at the failures: attempt after attempt commits nothing
    └── SiteError                    look at its log, then start again: a server, worker or deployment did not come up
"""

from __future__ import annotations

from ckpt_tasks.uncaught import show_briefly

__all__ = [
    "CheckpointNotFoundError",
    "CkptError",
    "CommitUncertainError",
    "ConfigError",
    "FencedError",
    "FormatVersionError",
    "IntegrityError",
    "NoGoodCheckpointError",
    "NoProgressError",
    "NonFiniteError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "OwnedError",
    "OwnerError",
    "ProgramError",
    "RankError",
    "RunMismatchError",
    "SiteError",
    "SpikeError",
    "StateError",
    "StateMismatchError",
    "StoreError",
    "UnsupportedStateError",
]


class CkptError(Exception):
    """Base of all errors of ckpt_tasks: what went wrong, for which key and step, and what to do next.

    `key` is a path in the state, a tensor's key or an object's name; `step` is the checkpoint's step; `hint` is one
    sentence that says what to do. All three are optional, and all survive pickling.
    """

    def __init__(self, message: str, *, key: str | None = None, step: int | None = None, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.key = key
        self.step = step
        self.hint = hint
        show_briefly(CkptError)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __str__(self) -> str:
        where = [f"step {self.step}" if self.step is not None else "", f"at {self.key}" if self.key else ""]
        place = ", ".join(part for part in where if part)
        text = f"{self.message} ({place})" if place else self.message
        return _printable(f"{text}. {self.hint}" if self.hint else text)


class ConfigError(CkptError, ValueError):
    """An option or argument is invalid; nothing was read or written."""


class ProgramError(ConfigError):
    """The program named for a flow cannot be imported, built or used."""


class StateError(CkptError):
    """The state does not fit; nothing was written, and the target is unchanged."""


class NonFiniteError(StateError):
    """A metric is NaN or infinite, and `on_non_finite` says to stop; `key` is its name.

    `rolls_back`: the next restore goes back to an older checkpoint, so that another attempt may help. `began` is the
    first of the bad steps, if there were several.
    """

    rolls_back: bool = False
    began: int | None = None


class SpikeError(NonFiniteError):
    """The metric that `on_spike` names has spiked in the steps from `began` to `step`; `key` is its name."""


class UnsupportedStateError(StateError, TypeError):
    """A value in the state cannot be stored; `key` is its path."""


class StateMismatchError(StateError):
    """The checkpoint and the target differ; three lists say in which keys.

    `missing` are keys that the target has and the checkpoint lacks, `unexpected` the reverse; `different` says for each
    key which shape, dtype or kind differs. `of_ranks`: only so many ranks can restore the values that each has saved.
    """

    of_ranks: int | None = None

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        different: tuple[str, ...] = (),
        key: str | None = None,
        step: int | None = None,
        hint: str | None = None,
    ):
        super().__init__(message, key=key, step=step, hint=hint)
        self.missing = missing
        self.unexpected = unexpected
        self.different = different

    def __str__(self) -> str:
        lists = (
            ("not in the checkpoint", self.missing),
            ("only in the checkpoint", self.unexpected),
            ("different", self.different),
        )
        parts = [f"{name}: {_some(keys)}" for name, keys in lists if keys]
        return "; ".join([super().__str__().rstrip("."), *map(_printable, parts)])


class RunMismatchError(CkptError):
    """The directory belongs to a run with another key."""


class FormatVersionError(CkptError):
    """An object was written by a newer version of the format; a reader neither skips it nor guesses its meaning."""


class CheckpointNotFoundError(CkptError, LookupError):
    """The run has no such checkpoint."""


class IntegrityError(CkptError):
    """Stored bytes are missing, cut or changed; `key` names the object or the tensor."""


class NoGoodCheckpointError(IntegrityError):
    """Every checkpoint of the run failed verification; `reasons` holds (step, why) newest first."""

    def __init__(
        self,
        message: str,
        *,
        reasons: tuple[tuple[int, str], ...] = (),
        key: str | None = None,
        step: int | None = None,
        hint: str | None = None,
    ):
        super().__init__(message, key=key, step=step, hint=hint)
        self.reasons = reasons

    def __str__(self) -> str:
        return "; ".join([super().__str__(), *(_printable(f"step {step}: {why}") for step, why in self.reasons)])


class StoreError(CkptError, OSError):
    """The store refused or failed a request; `key` is the object's name.

    `transient`: the same request may succeed a moment later (no answer, overload), so it is worth another try.
    `refused`: the store said that it did nothing. `denied`: permissions, a full disk or a read-only disk do not allow
    it.
    """

    transient: bool = False
    refused: bool = False
    denied: bool = False


class ObjectNotFoundError(StoreError):
    """The object does not exist."""


class ObjectExistsError(StoreError):
    """An object of this name exists already, and the request was put-if-absent."""


class CommitUncertainError(CkptError):
    """The answer to a commit was lost and could not be read back: all data is durable; the commit may still land."""


class OwnerError(CkptError):
    """Another process holds the run directory."""


class OwnedError(OwnerError):
    """A process that may be alive holds the run directory; nothing was written.

    `same_flow_run`: that process executes the same flow run as this one.
    """

    same_flow_run: bool = False


class FencedError(OwnerError):
    """Another process has taken the run directory over: this process must stop; it has changed nothing since then."""


class RankError(CkptError):
    """A rank of a gang has died, failed or hung, and the other ranks were ended; a retry starts a new gang."""


class NoProgressError(CkptError):
    """Several attempts in a row have ended without a new committed step."""


def _printable(text: str) -> str:
    """Return a text without control characters, except line ends: keys and names may be foreign."""
    plain = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "replace").decode() for c in text)
    return text if text.isprintable() else "".join(plain)


def _some(keys: tuple[str, ...], most: int = 6) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more


class SiteError(CkptError):
    """A server, a worker or a deployment on this machine did not come up, or does not answer."""
