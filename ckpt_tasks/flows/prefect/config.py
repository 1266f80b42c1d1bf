"""Derive from a flow's parameters the run's directory, its position, and the end of the next batch."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from ckpt_tasks.checkpoint.restore.reading import run_of
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.upkeep.verifying import verify_checkpoint
from ckpt_tasks.storage.secrets import secret_options

_log = logging.getLogger("ckpt_tasks")
_FIRST_STEPS = 10  # The length of the first batch, before which no step has been timed.
_GROWTH = 8  # A batch is at most this many times as long as the last: the first steps after a start are slow.


def config_of_run(config: CheckpointConfig, run_key: str) -> CheckpointConfig:
    """Return the options of one run: with its key, which also replaces "{run_key}" in `checkpoint_dir`.

    Raises ConfigError if the options name another run, or if the key cannot be a directory's name.
    """
    if config.run_key not in (None, run_key):
        raise ConfigError(
            f"run_key is {run_key!r} and checkpoint.run_key is {config.run_key!r}", hint="Set only one of them."
        )
    for where in secret_options(config.location.storage_options):
        _log.warning("%s is a secret, and Prefect stores a flow's parameters in plain text: use block://NAME.", where)
    keyed = replace(config, run_key=run_key)  # This checks the key before it becomes part of a path.
    location = config.location
    return replace(keyed, checkpoint_dir=replace(location, url=location.url.replace("{run_key}", run_key)))


def position_of_run(config: CheckpointConfig, total_steps: int) -> int:
    """Return the step from which the run continues: 0 without a checkpoint, `total_steps` or more if it is complete.

    The ledger decides, since Prefect's results lack the steps of other processes. A checkpoint that completes the run
    is verified here, because no restore will read it. Raises RunMismatchError.
    """
    try:
        run = run_of(config)
    except CheckpointNotFoundError:
        return 0
    for checkpoint in run.checkpoints():
        if checkpoint.step < total_steps or not verify_checkpoint(run.history.store, checkpoint):
            return checkpoint.step
    return 0


def check_ranks(ranks: int, engine: str = "local", min_ranks: int | None = None) -> None:
    """Raise ConfigError if the number of ranks, or their engine, is invalid, or if they do not fit together."""
    for name, value in {"ranks": ranks, "min_ranks": ranks if min_ranks is None else min_ranks}.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} must be a whole number from 1 on, not {value!r:.80}")
    if engine not in ("local", "ray") and not engine.startswith("block://"):
        raise ConfigError(f'engine must be "local", "ray" or "block://NAME", not {engine!r:.80}')
    if min_ranks is not None and engine == "local":
        raise ConfigError("min_ranks needs an engine of several hosts: this host has all ranks, or none")
    if min_ranks is not None and min_ranks > ranks:
        raise ConfigError(f"min_ranks is {min_ranks}, and ranks is {ranks}: it can be that many at most")


def check_saves(config: CheckpointConfig) -> None:
    """Raise ConfigError for an interval that a flow cannot see: it counts the steps of a program, and no epochs."""
    if config.epoch_interval is not None:
        raise ConfigError("a flow knows no epochs, so epoch_interval saves nothing", hint="Give step_interval instead.")


def check_evaluation(
    which: int | str, limit: int | None, promote: str | None, promote_params: object, follow_s: float = 0.0
) -> None:
    """Raise ConfigError for parameters of an evaluation that have no effect without another one."""
    if which != "pending" and (limit is not None or follow_s):
        raise ConfigError(
            "limit and follow_s are for which='pending'", hint="Ask for what is pending: --which pending."
        )
    if promote_params and promote is None:
        raise ConfigError("promote_params are for promote, which is not given", hint="Name the function as well.")


@dataclass(frozen=True, kw_only=True)
class BatchLength:
    """The length of step-batches: `steps`, or as many steps as take `seconds`.

    A batch ends at a multiple of its length, even if the previous batch was stopped early. A length from `seconds` is a
    multiple of `step_interval`, or divides it into equal parts (rounded up): so batches end where saves are due.
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
        """Return the step at which the batch that begins at `position` ends, `total` at most.

        `step_s`: seconds of one step; `last`: steps of this process's last batch. Both are None before the first batch.
        """
        stride = self.steps or self._timed(step_s, last)
        return min((position // stride + 1) * stride, total)

    def _timed(self, step_s: float | None, last: int | None) -> int:
        steps = _FIRST_STEPS
        if step_s is not None and last is not None:
            steps = max(1, min(int(self.seconds / max(step_s, 1e-9)), max(_FIRST_STEPS, last) * _GROWTH))
        if self.step_interval is None:
            return steps
        if steps >= self.step_interval:
            return steps - steps % self.step_interval
        return -(-self.step_interval // -(-self.step_interval // steps))  # Split the interval evenly.
