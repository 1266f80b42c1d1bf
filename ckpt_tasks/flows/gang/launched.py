"""A gang that a launcher has started (torchrun, srun, a JobSet): rank 0 is the flow run, the other ranks follow it.

Every rank is a process with the same command line. Before rank 0 restores, trains, saves or evaluates, it posts an
order, which the other ranks carry out, too. Each rank has its own Checkpointer, as in a torchrun script. After a
signal, the ranks agree on the last step. If a rank fails, every process ends, and the launcher starts all of them
again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch.distributed as dist

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.interrupt import taking_stop_signals
from ckpt_tasks.checkpoint.pausing import end_waits, give_up, is_told_to_end
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.flows.gang.joining import join
from ckpt_tasks.flows.gang.orders import Orders
from ckpt_tasks.flows.gang.parallel import RankSession, check_parallel
from ckpt_tasks.flows.gang.rank import StoppedError, raise_stopped
from ckpt_tasks.flows.session.forked import recorded_params
from ckpt_tasks.flows.session.local_session import END_SUITE, LocalSession, find_program
from ckpt_tasks.flows.session.parameters import effective_params
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.system import gang_rank

_PATIENCE_S = 5.0  # After a signal, a rank waits this long for one more order.
_CLOSE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class LaunchedPlace:
    """The rank that a launcher gave to this process: `rank` of `size`, and `local_rank` of `local_size` on its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def find(cls) -> Self | None:
        """Return the rank that the environment names; None if this process is not one of several ranks.

        Raises ConfigError if a variable is not a number.
        """
        if gang_rank() is None:
            return None
        names = {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"}
        otherwise = {"local_rank": "0", "local_size": "1"}
        given = {field: os.environ.get(name, otherwise.get(field, "")) for field, name in names.items()}
        if wrong := [names[field] for field, value in given.items() if not value.isdecimal()]:
            raise ConfigError(f"{wrong[0]} is {os.environ[wrong[0]]!r:.80}, not a number: the launcher sets it")
        return cls(**{field: int(value) for field, value in given.items()})

    @contextmanager
    def lead(
        self, config: CheckpointConfig, program: str, params: Mapping[str, Any], flow_run_id: str | None
    ) -> Iterator[LocalSession]:
        """Open the session of rank 0: the other ranks carry out its orders, and end when the session ends."""
        orders = self._join(config)
        with Checkpointer(config, flow_run_id=flow_run_id) as ckpt:
            orders.watch(partial(end_waits, ckpt))
            session = _Leading(ckpt, program, params, orders)
            try:
                yield session
            except (Exception, SystemExit) as error:
                give_up(ckpt)
                orders.failed(error, session.position)
                raise
            except BaseException:  # If a signal comes between two orders, the other ranks wait for an order.
                orders.give("close")
                raise
            orders.give("close")
            orders.close(_CLOSE_S)
        dist.destroy_process_group()

    def dismiss(self, config: CheckpointConfig) -> None:
        """End the other ranks, because rank 0 has nothing to train."""
        orders = self._join(config)
        orders.give("close")
        orders.close(_CLOSE_S)
        dist.destroy_process_group()

    def follow(self, config: CheckpointConfig, program: str, params: Mapping[str, Any]) -> int:
        """Carry out all orders of rank 0; return the exit status: 0, 143 after SIGTERM, or 130 after Ctrl-C.

        Does not return if a rank fails: the process ends with status 1.
        """
        orders = self._join(config)
        with taking_stop_signals():
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, raise_stopped)
            try:
                with Checkpointer(config) as ckpt:
                    try:
                        self._carry_out(orders, ckpt, program, params)
                    except StoppedError:
                        raise
                    except BaseException as error:  # noqa: BLE001 (also a program's SystemExit)
                        orders.end_process(orders.failed(error, ckpt.position))
                dist.destroy_process_group()
            except StoppedError as stop:
                return 128 + int(stop.args[0])
        return 0

    def _carry_out(self, orders: Orders, ckpt: Checkpointer, program: str, params: Mapping[str, Any]) -> None:
        orders.watch(partial(end_waits, ckpt))
        session: RankSession | None = None
        while (order := orders.take(_Patience(ckpt).is_over)) is not None:
            if order.name == "close":
                orders.close(_CLOSE_S)
                return
            if session is None:  # By now rank 0 has made the fork, if the run is a fork.
                recorded = recorded_params(ckpt.config)
                session = RankSession(ckpt, program, effective_params(find_program(program), recorded, params))
            if order.name == "restore":
                check_parallel(session.program, self.size)
                session.restore()
            elif order.name == "run":
                session.run(order.step)
            elif order.name == "evaluate":
                try:
                    session.evaluate(ckpt.run.find(order.step), END_SUITE)
                except Exception as error:  # noqa: BLE001 (logged: the training is complete)
                    orders.unevaluated(error)
            else:
                session.save(order.step)

    def _join(self, config: CheckpointConfig) -> Orders:
        return Orders(join(self.rank, self.size, self.local_rank, self.local_size, config.flush_timeout_s))


# The rank of this process. The flow does not get it as a parameter: parameters must be the same at every start.
launched: ContextVar[LaunchedPlace | None] = ContextVar("ckpt_tasks_launched", default=None)


class _Leading(RankSession):
    """The session of rank 0: before it restores, trains, saves or evaluates, it orders the other ranks to do so too."""

    def __init__(self, ckpt: Checkpointer, program: str, params: Mapping[str, Any], orders: Orders):
        super().__init__(ckpt, program, params)
        self._orders = orders

    def restore(self) -> int:
        with self._ordered("restore"):
            check_parallel(self.program, self.ranks)
            return super().restore()

    def run(self, until: int) -> None:
        with self._ordered("run", until):
            super().run(until)

    def save(self, step: int) -> None:
        with self._ordered("save", step):
            super().save(step)

    def evaluate(self, checkpoint: Checkpoint, suite: str) -> Mapping[str, float]:
        assert suite == END_SUITE  # The other ranks read only a step from the store.
        self._orders.give("evaluate", checkpoint.step)
        try:
            return super().evaluate(checkpoint, suite)
        except Exception as error:
            self._orders.unevaluated(error)
            raise

    @contextmanager
    def _ordered(self, name: str, step: int = 0) -> Iterator[None]:
        self._orders.give(name, step)
        try:
            yield
        except Exception as error:
            give_up(self.ckpt)
            first = self._orders.failed(error, self.position)
            if first is error:
                raise
            raise first from error


class _Patience:
    """Limits how long a rank waits for one more order after a signal; the order lets all ranks end at the same step."""

    def __init__(self, ckpt: Checkpointer):
        self._ckpt = ckpt
        self._told_s: float | None = None

    def is_over(self) -> bool:
        if not is_told_to_end(self._ckpt):
            return False
        self._told_s = self._told_s or time.monotonic()
        return time.monotonic() - self._told_s > _PATIENCE_S
