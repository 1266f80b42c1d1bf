"""What a flow's parameters mean: the run's own directory, where it stands, and where the next batch ends."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.reading.reading import run_of
from ckpt_tasks.storage.secrets import secret_options
from ckpt_tasks.upkeep.upkeep import verify_checkpoint

__all__ = ["BatchLength", "config_of_run", "position_of_run"]

_log = logging.getLogger("ckpt_tasks")
_FIRST_STEPS = 10  # before a step has been timed
_GROWTH = 8  # the first steps after a start are slow ones: believe them step by step


def config_of_run(config: CheckpointConfig, run_key: str) -> CheckpointConfig:
    """Return the options of one run: its key, and its own directory where `checkpoint_dir` holds "{run_key}".

    Raises ConfigError where the options name another run, or the key cannot be a directory's name.
    """
    if config.run_key not in (None, run_key):
        raise ConfigError(
            f"run_key is {run_key!r} and checkpoint.run_key {config.run_key!r}", hint="Set only one of them."
        )
    for where in secret_options(config.location.storage_options):
        _log.warning(
            "%s is a secret, and a flow's parameters are kept by Prefect as they are: use block://NAME.", where
        )
    keyed = replace(config, run_key=run_key)  # checks the key, before it becomes part of a path
    location = config.location
    return replace(keyed, checkpoint_dir=replace(location, url=location.url.replace("{run_key}", run_key)))


def position_of_run(config: CheckpointConfig, total_steps: int) -> int:
    """Return the step from which the run goes on, 0 where it has no checkpoint; `total_steps` or more: it is complete.

    The ledger says so, never Prefect's results: they know nothing of another process. A checkpoint that completes the
    run is read in full, as no restore would do it, and counts if it is good. Raises RunMismatchError.
    """
    try:
        run = run_of(config)
    except CheckpointNotFoundError:
        return 0
    for one in run.checkpoints():
        if one.step < total_steps or not verify_checkpoint(run.history.store, one):
            return one.step
    return 0


@dataclass(frozen=True, kw_only=True)
class BatchLength:
    """Say how long a step-batch is: `steps`, or as many as take `seconds`.

    Batches end at multiples of their length (and of `step_interval`, where they are longer than that), so that they
    end where saves are due anyway, and a run that was stopped within a batch soon falls into step again.
    """

    steps: int | None = None
    seconds: float = 30.0
    step_interval: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"batch_steps must be 1 or more, not {self.steps}")
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"batch_seconds must be above 0, not {self.seconds}")

    def end(self, position: int, total: int, *, step_s: float | None, last: int | None) -> int:
        """Return the step at which the batch from `position` on ends, `total` at most.

        `step_s` is how long a step takes, `last` how many steps the last batch of this process had; None where there
        is none yet.
        """
        stride = self.steps or self._sized(step_s, last)
        return min((position // stride + 1) * stride, total)

    def _sized(self, step_s: float | None, last: int | None) -> int:
        wanted = _FIRST_STEPS
        if step_s is not None and last is not None:
            wanted = max(1, min(int(self.seconds / max(step_s, 1e-9)), max(_FIRST_STEPS, last) * _GROWTH))
        if self.step_interval is None:
            return wanted
        if wanted >= self.step_interval:
            return wanted - wanted % self.step_interval
        return -(-self.step_interval // -(-self.step_interval // wanted))  # as many batches to an interval as it takes
