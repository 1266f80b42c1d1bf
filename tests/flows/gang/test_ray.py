"""A gang on the nodes of a Ray cluster: what it trains, what it survives, and with how many ranks it goes on."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_tasks import open_run
from ckpt_tasks.checkpoint.restore.restore import RestoreReport
from ckpt_tasks.checkpoint.save.listening import Listener
from ckpt_tasks.errors import CkptError, RankError
from ckpt_tasks.flows.gang.gang_session import GangSession
from ckpt_tasks.system import process_start
from tests.support.agents import MARK, config_of, kept
from tests.support.children import Child
from tests.support.elastic import ELASTIC, trained
from tests.support.ledgers import newest_step
from tests.support.waiting import until

if TYPE_CHECKING:
    from ckpt_tasks.flows.gang.ray import RayGang
    from tests.support.nodes import Nodes

pytestmark = pytest.mark.framework


def ray_gang(ranks: int, least: int, address: str) -> RayGang:
    from ckpt_tasks.flows.gang.ray import RayGang

    return RayGang(ranks, least, address)


def is_connected() -> bool:
    """Whether this process is connected to a cluster."""
    import ray

    return bool(ray.is_initialized())


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Start a cluster with the nodes 127.0.0.2 and 127.0.0.3, of two ranks each."""
    from tests.support.nodes import Nodes

    with Nodes(2, 3, mark=f"{MARK}={tmp_path_factory.mktemp('cluster')}") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _two_nodes(nodes: Nodes) -> None:
    """Begin with two nodes, whatever the test before has lost: a new one has another address."""
    while len(nodes.numbers) < 2:
        nodes.add(max(nodes.numbers) + 1)


def flow(arguments: Sequence[str]) -> None:
    """Train in this process, to be killed or told to end: 4 ranks to a step, of the cluster at an address."""
    run_dir, address, total, params = arguments
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    engine, config = ray_gang(4, 4, address), config_of(Path(run_dir))
    with GangSession(config, ELASTIC, json.loads(params), ranks=4, engine=engine, flow_run_id="a flow run") as session:
        training = Training()
        training.run(session, training.to(int(total)))


def gang(run_dir: Path, nodes: Nodes, ranks: int, engine: RayGang | None = None, **params: Any) -> GangSession:
    engine = engine or ray_gang(ranks, ranks, nodes.address)
    return GangSession(config_of(run_dir), ELASTIC, params, ranks=ranks, engine=engine, flow_run_id="a flow run")


def local(run_dir: Path, ranks: int) -> GangSession:
    return GangSession(config_of(run_dir), ELASTIC, {}, ranks=ranks, engine=kept, flow_run_id="a flow run")


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
    training, lost = Training(), max(nodes.numbers)

    def lose_one() -> None:
        until((tmp_path / "stopped").exists)
        nodes.kill(lost)

    def grown() -> bool:
        sizes = [*training.sizes.values()]
        if 2 in sizes and len(nodes.numbers) < 2:
            nodes.add(lost + 1)  # in this thread: a raylet dies with the thread that has started it
            until(engine.has_more)
        return 2 in sizes and sizes[-2:] == [4, 4]

    losing = threading.Thread(target=lose_one)
    losing.start()
    engine = ray_gang(4, 2, nodes.address)
    with gang(run_dir, nodes, 4, engine=engine, stops_at=7, folder=str(tmp_path)) as session:
        training.run(session, grown)
    losing.join()
    [failure] = training.failures
    assert str(failure).startswith(f"the node 127.0.0.{lost} of rank 2, 3 is lost: ")
    assert failure.__notes__[0].count(f"on the lost node 127.0.0.{lost}") == 2
    assert_as_plain(run_dir, tmp_path / "plain", training.sizes)
    until(lambda: nodes.ranks() == [])


def test_an_engine_keeps_to_ranks_that_were_asked_for() -> None:
    """Only a number from the least to all of them, and only once: what else is refused cannot be waited for."""
    engine = ray_gang(4, 2, "127.0.0.1:1")
    assert [engine.keep_to(ranks) for ranks in (None, 1, 5, 3, 3, 4)] == [False, False, False, True, False, False]


@pytest.mark.slow
def test_a_head_that_listens_and_does_not_answer_is_an_error() -> None:
    """As one that is lost while its host lives: a start says so within a minute, and Ray is left as it was."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(RankError, match=f"no Ray cluster answers at 127.0.0.1:{port}"):
            ray_gang(2, 2, f"127.0.0.1:{port}").prepare()
    assert not is_connected()
    assert "RAY_gcs_server_port_wait_time_s" not in os.environ


def assert_as_plain(run_dir: Path, plain: Path, sizes: dict[int, int]) -> None:
    """Assert that a run is bit-equal to one of this host that has changed its number of ranks at the same steps."""
    position = 0
    for end, ranks in sizes.items():
        if sizes.get(end + 5) != ranks:
            assert train(local(plain, ranks), end).sizes == dict.fromkeys(range(position + 5, end + 1, 5), ranks)
            position = end
    assert trained(run_dir) == trained(plain)


@pytest.mark.slow
def test_a_node_that_was_away_disturbs_nothing(run_dir: Path, tmp_path: Path, nodes: Nodes) -> None:
    """A node whose processes are all stopped, rank 0 among them, is lost after Ray's deadline; the run goes on.

    It is fenced as a whole: when its processes go on they commit nothing, and end.
    """
    training, away = Training(), min(nodes.numbers)
    stopped: list[int] = []

    def part() -> None:
        until((tmp_path / "stopped").exists)
        stopped.extend(nodes.signal(away, signal.SIGSTOP))

    parting = threading.Thread(target=part)
    parting.start()
    engine = ray_gang(4, 2, nodes.address)
    with gang(run_dir, nodes, 4, engine=engine, stops_at=7, folder=str(tmp_path)) as session:
        training.run(session, lambda: 2 in training.sizes.values())
        before = session.checkpoints()
        nodes.signal(away, signal.SIGCONT)
        until(lambda: living(stopped) == [])
        assert session.checkpoints() == before
        training.run(session, training.to(max(training.sizes) + 5))
    parting.join()
    nodes.kill(away)
    assert str(training.failures[0]).startswith(f"the node 127.0.0.{away} of rank 0, 1 is lost: ")
    assert len(training.failures) == 1
    assert_as_plain(run_dir, tmp_path / "plain", training.sizes)


def living(pids: list[int]) -> list[str]:
    """Return the commands of the processes that are there."""
    there = [pid for pid in pids if process_start(pid)]
    return [f"{pid} {Path(f'/proc/{pid}/cmdline').read_text()[:200]}" for pid in there]


@pytest.mark.slow
@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_the_flow(run_dir: Path, tmp_path: Path, nodes: Nodes, what: signal.Signals) -> None:
    """After SIGKILL of the flow's process no process of a rank is left on any node, and the next one goes on.

    SIGTERM is one commit at one step by all ranks, a release, and then the end by that signal.
    """
    folder = {"folder": str(tmp_path)}
    options = folder | ({"stops_at": 7} if what == signal.SIGKILL else {"step_s": 0.2})
    with Child(flow, [str(run_dir), nodes.address, "200", json.dumps(options)], tmp_path / "flow.log") as told:
        told.until((tmp_path / "stopped").exists if what == signal.SIGKILL else lambda: newest_step(run_dir) >= 5)
        told.send(what)
        assert told.wait() == -what
    until(lambda: nodes.ranks() == [])
    owner = open_run(str(run_dir)).head().state.owner
    assert owner is not None
    assert owner.released == (what == signal.SIGTERM)
    total = newest_step(run_dir) // 5 * 5 + 5
    assert train(gang(run_dir, nodes, 4, folder=str(tmp_path)), total).failures == []
    assert train(local(tmp_path / "plain", 4), total).failures == []
    assert trained(run_dir)[:2] == trained(tmp_path / "plain")[:2]


@pytest.mark.slow
def test_a_rank_of_another_node_fails_by_its_number(
    run_dir: Path, nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that is killed or stopped on another node is named; the gang restores from the memory of its hosts.

    The log has the stacks of the ranks that run, on every node.
    """
    training, killing = Training(), iter([signal.SIGKILL])
    restored: list[RestoreReport] = []

    def enough() -> bool:
        for what in killing if training.sizes else ():
            os.kill(engine.ranks[3].pid, what)
        return max(training.sizes, default=0) >= 15

    engine = ray_gang(4, 4, nodes.address)
    config = config_of(run_dir, flush_timeout_s=15.0, step_interval=2)
    options = {"folder": str(tmp_path), "stops_at": 13}
    with GangSession(config, ELASTIC, options, ranks=4, engine=engine, flow_run_id="a flow run") as session:
        session.listen(Listener(restored=restored.append))
        training.run(session, enough)
    killed, hung = training.failures
    assert str(killed).startswith("rank 3 was killed by SIGKILL")
    assert str(hung).startswith("rank 3 is stopped (SIGSTOP, or a debugger)")
    log = caplog.text
    assert [rank for rank in range(4) if f"The stacks of rank {rank}" in log] == [0, 1, 2]
    assert [report.source.startswith(str(run_dir)) for report in restored] == [False, False]  # memory of the hosts
    assert train(local(tmp_path / "plain", 4), 15).failures == []
    assert trained(run_dir)[:2] == trained(tmp_path / "plain")[:2]
