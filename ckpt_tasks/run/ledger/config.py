"""The options of a checkpointed run: few, with names that users know; validated at construction."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.keys import is_run_key
from ckpt_tasks.format.ledger import BestMode
from ckpt_tasks.format.policy.cadence import SavePolicy
from ckpt_tasks.format.policy.retention import RetentionPolicy
from ckpt_tasks.storage.locations import Location, location_of

OnFlushFailure = Literal["raise", "warn"]
OnNonFinite = Literal["warn", "stop", "rollback"]
Cloud = Literal["aws", "google", "azure"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where a run's checkpoints are, when to save and which to keep.

    Raises ConfigError, a ValueError. `checkpoint_dir`, `max_num_checkpoints`, `epoch_interval`, `step_interval` and
    `save_interval_secs` have the names of Paddle Fluid's CheckpointConfig and TensorFlow's CheckpointManager.
    """

    # The text below each option is its row in docs/OPTIONS.md: `python -m tools.pages.options` writes the table there.

    # Prefect validates a flow's parameter with pydantic, which reads this: it refuses a misspelled option, too.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    checkpoint_dir: str | os.PathLike[str] | Location
    """Where the run lives: a directory, a URL in an object store (`s3://BUCKET/PATH`) or a block (`block://NAME/PATH`).
    In Python also a `Location` with options of the store, or a Path, which is kept as a str. As a parameter of a flow
    it may hold `{run_key}`.
    """
    run_key: str | None = None
    """Name of the run; `None` takes the directory's name. The directory of another run is refused."""
    step_interval: int | None = None
    """Save when the number of steps crosses a multiple of this. Of the three intervals the first that is due counts."""
    epoch_interval: int | None = None
    """Save when the number of epochs crosses a multiple of this; `step()` must be given the epochs."""
    save_interval_secs: float | None = None
    """Save when this many seconds have passed."""
    cadence: Literal["auto"] | None = None
    """`"auto"` chooses the seconds between saves from what a save costs and how often the run fails; so does `None`
    if no interval is given.
    """
    max_num_checkpoints: int | None = 3
    """Keep this many of the newest checkpoints; `None` keeps all. See below for the ends of batches."""
    keep_every_n_steps: int | None = None
    """Also keep the checkpoints whose step is a multiple of this."""
    keep_best: int = 0
    """Also keep this many of the best checkpoints by `best_metric`; of equal ones the oldest."""
    best_metric: str | None = None
    """A metric of saves or evaluations. It says what `best` means everywhere."""
    best_mode: BestMode = "min"
    """Which value of `best_metric` is better: `"min"` the lower, `"max"` the higher."""
    owner_timeout_s: float = 120.0
    """Another host may take the run over when its owner has shown no life for this many seconds."""
    memory_dir: str | os.PathLike[str] | None = "auto"
    """Where to keep snapshots that outlive the process. `"auto"` is `/dev/shm` if it, the machine and the container's
    limit have room for two of them; your own directory is used even without that room. `None` keeps snapshots in the
    process's own memory, which ends with it. `"auto"` does the same if there is no room, with a warning; these
    snapshots also count towards the container's memory.
    """
    on_flush_failure: OnFlushFailure = "raise"
    """What the next `step()` does after the store failed a save in the background: `"raise"`, or `"warn"` and continue.
    Some failures are raised in both cases; see below.
    """
    on_non_finite: OnNonFinite = "warn"
    """What `step()` and `save()` do if a metric is NaN or infinite. `"warn"` warns once for each stretch of such steps,
    and saves. `"stop"` raises NonFiniteError before the step is saved, which ends a flow for good. `"rollback"` raises
    it too, and the next `restore()` (a flow's retry) goes back to the newest checkpoint with finite metrics: further
    back each time, three times at most. A checkpoint with such a metric is never the best one.
    """
    on_spike: str | None = None
    """The metric, such as `"loss"`, after whose spikes training goes back: when each of its last 3 values is above the
    median of the 100 before them by more than 10 times their median absolute deviation, `step()` raises SpikeError, and
    the next `restore()` continues as after `on_non_finite="rollback"`: from the newest checkpoint before the spike,
    without its batches. Rank 0's metric counts, for all ranks. A tensor on a device is waited for at each step.
    """
    flush_timeout_s: float = 600.0
    """A flush is stuck when the store has taken nothing of it for this many seconds. Saves then stay in memory until
    the store answers. The end of a run waits until its flush is stuck; see below. Flushes give way to other programs
    (niceness + 10): where these take every core, allow for that.
    """
    local_dir: str | os.PathLike[str] | None = None
    """For a run in an object store: a directory of this host, one for each run. Checkpoints land there before they are
    sent, and are read from there if they are good. The next process on this host restores and sends what the store does
    not have yet.
    """
    spot_notices: Cloud | None = None
    """Ask the metadata server of this cloud (`"aws"`, `"google"` or `"azure"`) for notices that it takes the host away,
    which come without a signal there. A notice ends the run as SIGTERM does: after the step, with a commit. `None` asks
    for nothing.
    """
    compile_cache: bool = False
    """Keep in the run what `torch.compile` has built, and bring it back before the first step of the next process, on a
    host of the same kind. It is code: who can write to the run can run code in that process.
    """

    def __new__(cls, *given: Any, **options: Any) -> Self:
        """Raise ConfigError for an unknown option, or for a positional one."""
        if given:
            raise ConfigError("an option has a name", hint=f"Write CheckpointConfig(checkpoint_dir={given[0]!r:.80}).")
        for name in options.keys() - cls.__dataclass_fields__.keys():
            alike = difflib.get_close_matches(name, cls.__dataclass_fields__, n=1)
            do = f"Did you mean {alike[0]}?" if alike else "ckpt train --help lists the options."
            raise ConfigError(f"there is no option {name!r:.80}", hint=do)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("checkpoint_dir", "memory_dir", "local_dir"):
            if isinstance(given := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(given))
        for name, rule in _RULES.items():
            value = getattr(self, name)
            if not rule.fits(value):
                raise ConfigError(f"{name} must be {rule.words}, not {value!r}")
        if self.run_key is not None and not _is_name(self.run_key):
            raise ConfigError(
                f"run_key {self.run_key!r:.80} is not a name",
                hint="Use letters, digits, '_', '-' and '.', 200 at most.",
            )
        if self.cadence and self.save_interval_secs is not None:
            raise ConfigError("cadence='auto' chooses save_interval_secs itself: give one of them")
        if self.keep_best and self.best_metric is None:
            raise ConfigError("keep_best needs best_metric: the best by which metric?")
        if self.best_mode != "min" and self.best_metric is None:
            raise ConfigError("best_mode needs best_metric: which metric is better if it is higher?")

    @property
    def location(self) -> Location:
        """The run's location, with the options of its store."""
        return location_of(self.checkpoint_dir)

    @property
    def has_interval(self) -> bool:
        """Whether an interval of steps, epochs or seconds between saves is set."""
        return self.save_policy != SavePolicy()

    @property
    def automatic(self) -> bool:
        """Whether the run chooses the seconds between saves itself: if cadence="auto", or if no interval is set."""
        return self.cadence == "auto" or not self.has_interval

    @property
    def save_policy(self) -> SavePolicy:
        """The options that say when to save."""
        return SavePolicy(**{option.name: getattr(self, option.name) for option in fields(SavePolicy)})

    @property
    def retention_policy(self) -> RetentionPolicy:
        """The options that say which checkpoints to keep."""
        return RetentionPolicy(**{option.name: getattr(self, option.name) for option in fields(RetentionPolicy)})


def field_texts(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, joined to one line."""
    import ast  # Only the documentation and the help need it.
    import inspect
    from itertools import pairwise

    texts = {}
    for node, below in pairwise(ast.parse(inspect.getsource(kind)).body[0].body):  # type: ignore[attr-defined]
        match node, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(inspect.cleandoc(text).split())
    return texts


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and "/" not in key and is_run_key(key)


class _Rule(NamedTuple):
    """The rule of an option: a test, and the words for its error message."""

    fits: Callable[[Any], bool]
    words: str


def _one_of(choices: Any) -> _Rule:
    allowed = get_args(choices)
    return _Rule(lambda value: value in allowed, " or ".join(map(repr, allowed)))


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def config_of(run: str | os.PathLike[str] | Location | CheckpointConfig) -> CheckpointConfig:
    """Return the configuration of a run; a bare directory, URL or Location gets the default one."""
    return run if isinstance(run, CheckpointConfig) else CheckpointConfig(checkpoint_dir=run)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


_COUNT = _Rule(lambda value: value is None or (type(value) is int and value >= 1), "a whole number from 1 on or None")
_SECONDS = _Rule(_is_seconds, "a number of seconds above 0")

_RULES = {
    "checkpoint_dir": _Rule(
        lambda value: isinstance(value, Location) or (_is_text(value) and "\0" not in value),
        "a directory's name, a str, or a Location",
    ),
    "step_interval": _COUNT,
    "epoch_interval": _COUNT,
    "save_interval_secs": _Rule(lambda value: value is None or _is_seconds(value), _SECONDS.words),
    "cadence": _Rule(lambda value: value in (None, "auto"), "'auto' or None"),
    "max_num_checkpoints": _COUNT,
    "keep_every_n_steps": _COUNT,
    "keep_best": _Rule(lambda value: type(value) is int and value >= 0, "a whole number from 0 on"),
    "best_metric": _Rule(lambda value: value is None or _is_text(value), "a metric's name"),
    "best_mode": _one_of(BestMode),
    "owner_timeout_s": _SECONDS,
    "memory_dir": _Rule(lambda value: value is None or _is_text(value), "a directory, 'auto' or None"),
    "on_flush_failure": _one_of(OnFlushFailure),
    "on_non_finite": _one_of(OnNonFinite),
    "on_spike": _Rule(lambda value: value is None or _is_text(value), "a metric's name or None"),
    "flush_timeout_s": _SECONDS,
    "local_dir": _Rule(lambda value: value is None or _is_text(value), "a directory or None"),
    "spot_notices": _Rule(lambda value: value in (None, *get_args(Cloud)), "'aws', 'google', 'azure' or None"),
    "compile_cache": _Rule(lambda value: isinstance(value, bool), "True or False"),
}
