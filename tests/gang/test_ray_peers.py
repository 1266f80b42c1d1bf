"""A gang whose nodes keep copies of each other's memory: a node is lost with its memory, and nothing is read again.

The nodes are on this machine; each has a working directory of its own, and `memory_dir` is relative to it.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_tasks.gang.session import GangSession
from ckpt_tasks.reading.restore import RestoreReport
from ckpt_tasks.saving.listening import Listener
from ckpt_tasks.snapshot.peers import HostMemory, newest_of
from tests.gang.test_ray import Training, local, train, until
from tests.support.agents import MARK, config_of
from tests.support.cli_runs import flip
from tests.support.elastic import ELASTIC, trained

pytest.importorskip("ray")

from ckpt_tasks.gang.ray import RayGang
from tests.support.nodes import Nodes

pytestmark = pytest.mark.slow
RANKS = 4


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Start a cluster with the nodes 127.0.0.2 and 127.0.0.3, of two ranks and a memory directory each."""
    with Nodes(2, 3, mark=f"{MARK}={tmp_path}", homes=tmp_path / "homes") as cluster:
        yield cluster


class Peers:
    """A gang of four ranks on two nodes, two to a node, with copies; what it has restored, and its failures."""

    def __init__(self, run_dir: Path, nodes: Nodes, peer_copies: int = 1):
        self.config = config_of(run_dir, memory_dir="memory", step_interval=5)
        self.nodes, self.run_dir = nodes, run_dir
        self.engine = RayGang(RANKS, RANKS, nodes.address, peer_copies=peer_copies)
        self.training = Training()
        self.restored: list[RestoreReport] = []

    def session(self) -> GangSession:
        options = {"step_s": 0.2}
        session = GangSession(self.config, ELASTIC, options, ranks=RANKS, engine=self.engine, flow_run_id="a flow run")
        session.listen(Listener(restored=self.restored.append))
        return session

    def copied(self, node: int, ranks: range) -> int:
        """Return the step of which a node's memory has all of these ranks' parts; -1 without one."""
        return step_on(self.nodes, self.config.checkpoint_dir, node, ranks)

    def replace(self, node: int, another: int) -> None:
        """Lose a node with all its processes and its memory, and add another one."""
        killed = self.nodes.signal(node, signal.SIGKILL)
        assert len(killed) > 3, "a raylet, an agent, its fork server and two ranks"
        self.nodes.forget(node)
        shutil.rmtree(self.nodes.home(node))
        self.nodes.add(another)


def step_on(nodes: Nodes, run_dir: object, node: int, ranks: range) -> int:
    config = config_of(Path(str(run_dir)), memory_dir=nodes.home(node) / "memory")
    newest = newest_of(HostMemory(config, RANKS).offers(ranks), ranks)
    return int(newest[0].attempt.partition("/")[0].rpartition("_")[2]) if newest else -1


def unread(run_dir: Path) -> Callable[[], int]:
    """Take every byte of a tensor out of storage; return a function that puts them back."""
    shards = [*run_dir.glob("checkpoint_*/*/*.safetensors")]
    for shard in shards:
        shard.rename(shard.with_suffix(".away"))
    return lambda: len([shard.with_suffix(".away").rename(shard) for shard in shards])


def test_a_lost_host_is_restored_from_its_peer(run_dir: Path, tmp_path: Path, nodes: Nodes) -> None:
    """All processes of a node are killed and its memory is deleted: its ranks go on, on other nodes, from the copy.

    Storage cannot have delivered a byte: no tensor is there at that time. The end is bit-equal to a gang's of one host
    that was not killed, and when it has come no memory of the run is left on any node.
    """
    peers = Peers(run_dir, nodes)
    with peers.session() as session:
        peers.training.run(session, peers.training.to(10))
        until(lambda: peers.copied(3, range(2)) == peers.copied(2, range(2, 4)) == 10)
        peers.replace(2, 4)
        back = unread(run_dir)
        session.listen(Listener(restored=lambda report: back() and None))
        peers.training.run(session, peers.training.to(20))
        rows = session.gangs
    [report] = peers.restored
    assert (report.step, report.skipped) == (10, ())
    assert report.source.startswith(str(nodes.home(3) / "memory"))
    assert 0 < report.peer_bytes <= report.size_bytes
    assert "MiB from a peer)" in rows[0]["restored from"]
    assert len(peers.training.failures) == 1
    left = [path for path in (tmp_path / "homes").rglob("*") if path.is_file()]
    assert left == []
    assert train(local(tmp_path / "plain", RANKS), 20).failures == []
    assert trained(run_dir) == trained(tmp_path / "plain")


def test_a_host_is_lost_while_its_memory_is_copied(run_dir: Path, tmp_path: Path, nodes: Nodes) -> None:
    """Whenever it is lost, with saves under way: the gang goes on from a step that was sealed, bit-equal.

    The copy of a damaged bit is passed over, and storage is read.
    """
    peers = Peers(run_dir, nodes)
    with peers.session() as session:
        peers.training.run(session, peers.training.to(10))  # The copy of step 10 is under way, or has not begun.
        time.sleep(0.3)
        peers.replace(2, 4)
        peers.training.run(session, peers.training.to(15))
        until(lambda: peers.copied(3, range(2, 4)) == peers.copied(4, range(2)) == 15)
        for image in nodes.home(3).rglob("*-0000[23]-of-00004/?/*.safetensors"):
            flip(image, -1)
        peers.replace(4, 5)
        peers.training.run(session, peers.training.to(20))
    first, second = peers.restored
    assert first.step in (5, 10)
    assert second.step == 15
    assert second.skipped == () or second.skipped[0][1].startswith("in memory: ")
    assert train(local(tmp_path / "plain", RANKS), 20).failures == []
    assert trained(run_dir) == trained(tmp_path / "plain")
