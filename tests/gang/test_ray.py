"""A gang on the nodes of a Ray cluster: what it trains, what it survives, and with how many ranks it goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.errors import CkptError
from ckpt_tasks.gang.session import GangSession
from tests.support.agents import MARK, config_of
from tests.support.elastic import ELASTIC, trained

ray = pytest.importorskip("ray")

from ckpt_tasks.gang.ray import RayGang  # noqa: E402 (where Ray is installed)
from tests.support.nodes import Nodes, is_connected  # noqa: E402


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Start a cluster with the nodes 127.0.0.2 and 127.0.0.3, of two ranks each."""
    with Nodes(2, 3, mark=f"{MARK}={tmp_path_factory.mktemp('cluster')}") as cluster:
        yield cluster


def gang(run_dir: Path, nodes: Nodes, ranks: int, engine: RayGang | None = None, **params: Any) -> GangSession:
    engine = engine or RayGang(ranks, ranks, nodes.address)
    return GangSession(config_of(run_dir), ELASTIC, params, ranks=ranks, engine=engine, flow_run_id="a flow run")


def local(run_dir: Path, ranks: int) -> GangSession:
    return GangSession(config_of(run_dir), ELASTIC, {}, ranks=ranks, flow_run_id="a flow run")


class Training:
    """Train a session in batches of 5 steps, as a flow does; keep the failures, and how many ranks trained a batch."""

    def __init__(self) -> None:
        self.failures: list[CkptError] = []
        self.sizes: dict[int, int] = {}  # end of a batch → ranks

    def run(self, session: GangSession, enough: Callable[[], bool], tries: int = 4) -> None:
        while not (session.clean and enough()):
            try:
                session.hold_signals(True)
                if not session.clean:
                    session.restore()
                end = session.position - session.position % 5 + 5
                session.run(end)
                self.sizes[end] = session.ranks
                session.save(end)
            except CkptError as error:
                self.failures.append(error)
                session.discard()
                if len(self.failures) == tries:
                    raise
                session.record_failure(attempt=len(self.failures), why=str(error))

    def to(self, total: int) -> Callable[[], bool]:
        return lambda: max(self.sizes, default=0) >= total


def train(session: GangSession, total: int) -> Training:
    training = Training()
    with session:
        training.run(session, training.to(total))
    return training


def until(true: Callable[[], bool], timeout_s: float = 90) -> None:
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s, "what is waited for does not happen"
        time.sleep(0.05)


def test_two_nodes_train_as_one_host(run_dir: Path, tmp_path: Path, nodes: Nodes) -> None:
    """Four ranks on two nodes end bit-equal to four on this host; then no process of theirs is left."""
    assert train(gang(run_dir, nodes, 4), 10).sizes == {5: 4, 10: 4}
    assert not is_connected()
    until(lambda: nodes.ranks() == [])
    assert train(local(tmp_path / "local", 4), 10).failures == []
    assert trained(run_dir) == trained(tmp_path / "local")


@pytest.mark.slow
def test_a_lost_node_is_fewer_ranks_and_a_new_one_more(run_dir: Path, tmp_path: Path, nodes: Nodes) -> None:
    """A node killed in the middle of a batch fails the batch by its address and ranks; two ranks go on without it.

    A node that comes is taken in at the end of a batch. State and data are divided again each time: the end is
    bit-equal to that of gangs of one host which changed their number of ranks at the same steps.
    """
    training = Training()

    def lose_one() -> None:
        until((tmp_path / "stopped").exists)
        nodes.kill(3)

    def grown() -> bool:
        sizes = [*training.sizes.values()]
        if 2 in sizes and 4 not in nodes.numbers:
            nodes.add(4)  # in this thread: a raylet dies with the thread that has started it
            until(engine.has_more)
        return 2 in sizes and sizes[-2:] == [4, 4]

    losing = threading.Thread(target=lose_one)
    losing.start()
    engine = RayGang(4, 2, nodes.address)
    with gang(run_dir, nodes, 4, engine=engine, stops_at=7, folder=str(tmp_path)) as session:
        training.run(session, grown)
    losing.join()
    [failure] = training.failures
    assert str(failure).startswith("the node 127.0.0.3 of rank 2, 3 is lost: ")
    assert "   2  " in failure.__notes__[0]
    assert failure.__notes__[0].count("on the lost node 127.0.0.3") == 2
    plain, position = tmp_path / "plain", 0
    for end, ranks in segments(training.sizes):
        assert train(local(plain, ranks), end).sizes == dict.fromkeys(range(position + 5, end + 1, 5), ranks)
        position = end
    assert trained(run_dir) == trained(plain)
    until(lambda: nodes.ranks() == [])


def segments(sizes: dict[int, int]) -> list[tuple[int, int]]:
    """Return (end, ranks) of each part that was trained with one number of ranks."""
    return [(end, ranks) for end, ranks in sizes.items() if sizes.get(end + 5) != ranks]
