"""The options of a checkpointed run: few, named as users know them, checked when made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.keys import is_run_key
from ckpt_tasks.policy.cadence import OVERHEAD_CAP, SavePolicy
from ckpt_tasks.policy.retention import RetentionPolicy

__all__ = ["AttemptHooks", "CheckpointConfig"]


@dataclass(frozen=True, kw_only=True)
class AttemptHooks:
    """A user's own functions around every attempt of a resumable task, called beside restore, save and discard."""

    before_attempt: Callable[..., None] | None = None
    after_attempt: Callable[..., None] | None = None
    after_failure: Callable[..., None] | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Say where a run's checkpoints live, when to save and what to keep.

    `checkpoint_dir` is a directory, or a place in an object store (s3://bucket/run); a Path is kept as a str. `run_key`
    names the run (default: the directory's name); a directory of another run is refused. Save when
    `step_interval` steps, `epoch_interval` epochs or `save_interval_secs` seconds have passed, whichever comes first.
    `cadence="auto"`, the default where no interval is given, chooses the seconds between saves from what the run
    measures: what a save costs and how often the run fails (Young and Daly); saves take at most the share
    `overhead_cap` of its time. Keep the newest `max_num_checkpoints` (None: all),
    every `keep_every_n_steps`-th step, and the `keep_best` best by `best_metric` (`best_mode` "min" or "max"; the two
    also say what the name "best" means). An owner that has shown no life for `owner_timeout_s` seconds may be taken
    over from another host.

    `memory_dir` is where snapshots lie: "auto" is /dev/shm where it, the machine and its container have room, a
    directory of your own is used whatever it has, None keeps them in the process's own memory, which ends with it.
    `on_flush_failure` says what a save that the store fails in the background does: "raise" in the next `step()`, or
    "warn" and go on. Raised all the same: the loss of the run, an uncertain commit, a damaged object, whatever is no
    StoreError, and what those meet who wait for a save. A flush of which the store has taken nothing for
    `flush_timeout_s` seconds is stuck: saves then stay in memory until it ends. `save()`, `wait()`, the end of the
    block (after an error too), SIGTERM and the end of the interpreter wait for a flush until it is stuck.
    `on_non_finite` says what a NaN or infinite metric does: "warn" once and save, or "stop" with NonFiniteError;
    after "rollback", which raises it too, the next restore goes back to the newest checkpoint with finite metrics.

    `local_dir` is a directory of this host, one for each run, for a run in an object store: checkpoints land there
    before they are sent, and are read from there where they are good; what the store has not got when the process ends
    is restored and sent by the next one on this host.

    `storage_options` go to the store's file system (s3fs, adlfs, gcsfs); without them credentials come from the usual
    places. `single_writer` does without the store's put-if-absent where it has none: you see to it that one process at
    a time writes.

    Raises ConfigError, a ValueError. The first five names are those of Paddle Fluid's CheckpointConfig and
    TensorFlow's CheckpointManager.
    """

    # pydantic reads this when Prefect validates a flow's parameter: a misspelled option is an error there as well.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    checkpoint_dir: str | os.PathLike[str]
    run_key: str | None = None
    step_interval: int | None = None
    epoch_interval: int | None = None
    save_interval_secs: float | None = None
    cadence: str | None = None
    overhead_cap: float = OVERHEAD_CAP
    max_num_checkpoints: int | None = 3
    keep_every_n_steps: int | None = None
    keep_best: int = 0
    best_metric: str | None = None
    best_mode: str = "min"
    owner_timeout_s: float = 120.0
    memory_dir: str | os.PathLike[str] | None = "auto"
    on_flush_failure: str = "raise"
    on_non_finite: str = "warn"
    flush_timeout_s: float = 600.0
    local_dir: str | os.PathLike[str] | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    single_writer: bool = False

    def __post_init__(self) -> None:
        self._keep_paths_as_text()
        if not isinstance(self.checkpoint_dir, str) or not self.checkpoint_dir or "\0" in self.checkpoint_dir:
            raise ConfigError(f"checkpoint_dir must be a directory's name, a str, not {self.checkpoint_dir!r}")
        if self.run_key is not None and not _is_name(self.run_key):
            raise ConfigError(
                f"run_key {self.run_key!r:.80} is no name", hint="Use letters, digits, '_', '-' and '.', 200 at most."
            )
        for name in ("step_interval", "epoch_interval", "max_num_checkpoints", "keep_every_n_steps"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a whole number from 1 on or None, not {value!r}")
        for name, optional in (("save_interval_secs", True), ("owner_timeout_s", False), ("flush_timeout_s", False)):
            value = getattr(self, name)
            if not (optional and value is None) and not (type(value) in (int, float) and 0 < value < float("inf")):
                raise ConfigError(f"{name} must be a number of seconds above 0, not {value!r}")
        if self.cadence not in (None, "auto"):
            raise ConfigError(f"cadence must be 'auto' or None, not {self.cadence!r}")
        if self.cadence and self.save_interval_secs is not None:
            raise ConfigError("cadence='auto' chooses save_interval_secs itself: give one of them")
        if type(self.overhead_cap) not in (int, float) or not 0 < self.overhead_cap < 1:
            raise ConfigError(f"overhead_cap must be a share between 0 and 1, not {self.overhead_cap!r}")
        options = self.storage_options
        if options is not None and not (isinstance(options, Mapping) and all(isinstance(key, str) for key in options)):
            raise ConfigError("storage_options must be a dict of the file system's options")  # its values may be secret
        if type(self.single_writer) is not bool:
            raise ConfigError(f"single_writer must be True or False, not {self.single_writer!r}")
        self._check_memory()

    def _keep_paths_as_text(self) -> None:
        for name in ("checkpoint_dir", "memory_dir", "local_dir"):
            if isinstance(given := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(given))

    def _check_memory(self) -> None:
        if self.memory_dir is not None and (not isinstance(self.memory_dir, str) or not self.memory_dir):
            raise ConfigError(f"memory_dir must be a directory, 'auto' or None, not {self.memory_dir!r}")
        if self.local_dir is not None and (not isinstance(self.local_dir, str) or not self.local_dir):
            raise ConfigError(f"local_dir must be a directory or None, not {self.local_dir!r}")
        choices = {
            "on_flush_failure": ("raise", "warn"),
            "on_non_finite": ("warn", "stop", "rollback"),
            "best_mode": ("min", "max"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be {' or '.join(map(repr, known))}, not {getattr(self, name)!r}")
        self._check_best()

    def _check_best(self) -> None:
        if type(self.keep_best) is not int or self.keep_best < 0:
            raise ConfigError(f"keep_best must be a whole number from 0 on, not {self.keep_best!r}")
        if self.best_metric is not None and (not isinstance(self.best_metric, str) or not self.best_metric):
            raise ConfigError(f"best_metric must be a metric's name, not {self.best_metric!r}")
        if self.keep_best and self.best_metric is None:
            raise ConfigError("keep_best needs best_metric: the best by which metric?")

    @property
    def has_interval(self) -> bool:
        """Whether steps, epochs or seconds between saves are given."""
        return self.save_policy != SavePolicy()

    @property
    def automatic(self) -> bool:
        """Whether the run chooses the seconds between saves: where asked to, and where no interval is given."""
        return self.cadence == "auto" or not self.has_interval

    @property
    def save_policy(self) -> SavePolicy:
        """The options that say when to save."""
        return SavePolicy(
            step_interval=self.step_interval,
            epoch_interval=self.epoch_interval,
            save_interval_secs=self.save_interval_secs,
        )

    @property
    def retention_policy(self) -> RetentionPolicy:
        """The options that say what to keep."""
        return RetentionPolicy(
            max_num_checkpoints=self.max_num_checkpoints,
            keep_every_n_steps=self.keep_every_n_steps,
            keep_best=self.keep_best,
            best_metric=self.best_metric,
            best_mode=self.best_mode,
        )


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and "/" not in key and is_run_key(key)
