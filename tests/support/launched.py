"""Ranks as a launcher starts them: processes with one command, and RANK and its like in the environment."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ckpt_tasks import CheckpointConfig
from ckpt_tasks.flows.gang.launched import LaunchedPlace
from ckpt_tasks.flows.session.forked import recorded_params
from ckpt_tasks.flows.session.local_session import find_program
from ckpt_tasks.flows.session.parameters import effective_params
from tests.servers.process import free_port
from tests.support.agents import MARK, PARALLEL, config_of
from tests.support.children import Child


def main(arguments: Sequence[str]) -> None:
    """Be one rank: rank 0 trains in batches of five steps as a flow does, without a retry; the others follow."""
    options = json.loads(arguments[0])
    os.environ |= {MARK: options["run"], **options["environment"]}
    place = LaunchedPlace.find()
    assert place is not None
    config = config_of(Path(options["run"]), **options["config"])
    program = options["program"]
    if place.rank:
        sys.exit(place.follow(config, program, options["params"]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lead(place, config, program, options)


def lead(place: LaunchedPlace, config: CheckpointConfig, program: str, options: dict[str, Any]) -> None:
    # As the flow does: a rank that takes recorded parameters beside one that does not would build its program twice.
    params = effective_params(find_program(program), recorded_params(config), options["params"])
    with place.lead(config, program, params, "a flow run") as session:
        session.hold_signals(True)
        session.restore()
        while session.position < options["total"]:
            end = min(session.position - session.position % 5 + 5, options["total"])
            session.run(end)
            session.save(end)


@contextmanager
def ranks(
    run_dir: Path,
    *,
    size: int = 2,
    total: int = 18,
    program: str = PARALLEL,
    port: int | None = None,
    main: Callable[[Sequence[str]], None] = main,
    config: dict[str, Any] | None = None,
    **params: Any,
) -> Iterator[list[Child]]:
    """Start ranks that train `total` steps; none is left at the end of the block."""
    where = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}
    where |= {"LOCAL_WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    options = {"run": str(run_dir), "program": program, "params": params, "total": total, "config": config or {}}
    with ExitStack() as stack:
        children = []
        for rank in range(size):
            environment = {**where, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            words = [json.dumps({**options, "environment": environment})]
            children.append(stack.enter_context(Child(main, words, run_dir.with_name(f"rank-{rank}.log"))))
        yield children
