"""Parameters of runs and forks: what is recorded, what changes, and that it reaches what was restored."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import Checkpointer
from ckpt_tasks.checkpoint.transfer.fork import checked_params
from ckpt_tasks.errors import ConfigError, RunMismatchError
from ckpt_tasks.flows.session.forked import check_program, fork_run, record_program, recorded_params
from ckpt_tasks.flows.session.local_session import LocalSession
from ckpt_tasks.flows.session.parameters import effective_params
from ckpt_tasks.format.keys import MANIFEST_NAME
from ckpt_tasks.storage.local import LocalStore
from tests.support.cli_runs import only, tree
from tests.support.forks import PROGRAM, Scheduled, config, fork, run_of, states, train, two_steps
from tests.support.ledgers import resealed


@pytest.fixture
def a(run_dir: Path) -> Path:
    return two_steps(run_dir)


@pytest.fixture
def b(tmp_path: Path) -> Path:
    return tmp_path / "b"


def test_changed_parameters_really_apply(run_dir: Path, b: Path) -> None:
    """P14: the optimizer has the new rate and decay, the checkpoint the old ones; so again after a crash."""
    schedule = "step"
    old = {"lr": 0.02, "schedule": schedule, "warmup": 2}
    train(run_dir, 3, old)
    fork(run_dir, 3, b, {"lr": 0.0002, "weight_decay": 0.25})
    params = effective_params(Scheduled, recorded_params(config(b)), {"schedule": schedule})
    assert params == {**old, "lr": 0.0002, "weight_decay": 0.25}
    rate = 0.0001
    for _ in range(2):  # the first process ends before it has committed
        with Checkpointer(config(b)) as ckpt:
            session = LocalSession(ckpt, PROGRAM, params)
            assert session.restore() == 3
            assert [group["lr"] for group in session.state["optimizer"].param_groups] == pytest.approx([rate] * 2)
            assert [group["weight_decay"] for group in session.state["optimizer"].param_groups] == [0.25, 0.0]
            assert session.state["schedule"].get_last_lr() == pytest.approx([rate] * 2)
            assert session.state["schedule"].base_lrs == [0.0002] * 2
            session.run(4)
            session.discard()
    expected = train(b, 5, params)
    assert train(b, 5, params) == expected  # restored from the fork's own: nothing is applied again
    assert run_of(b).checkpoints()[0].step == 5


def test_the_extra_build_draws_nothing(a: Path, b: Path, tmp_path: Path) -> None:
    """P74: building the program of before leaves the random streams alone: the same batches and dropout follow."""
    fork(a, 3, b, {"warmup": 4, "seed": 0})  # said, and what it was
    fork(a, 3, tmp_path / "c")
    assert train(b, 6, {"lr": 0.02, "warmup": 4, "seed": 0}) == train(tmp_path / "c", 6, {"lr": 0.02})


def test_a_program_of_before_that_cannot_be_built_is_named(a: Path, b: Path) -> None:
    """Where the code has lost a parameter of the source, the change cannot be seen: nothing trains with old values."""
    fork(a, 3, b, {"lr": 0.5})
    entry = only(b, "ledger/*.json")
    entry.write_bytes(resealed(entry.read_bytes(), lambda body: body["state"]["origin"].update(params={"momentun": 1})))
    with Checkpointer(config(b)) as ckpt:
        session = LocalSession(ckpt, PROGRAM, {"lr": 0.5})
        with pytest.raises(ConfigError, match="parameters of before"):
            session.restore()
        assert not session.clean


def test_a_flow_forks_once(a: Path, b: Path, tmp_path: Path) -> None:
    """`fork_run` makes the run where there is none, with what differs; afterwards it does nothing, source or not."""
    fork_run(f"{a}@3", config(b), {"lr": 0.02, "warmup": 9})
    assert states(b)[0]["origin"]["set"] == {"warmup": 9}
    assert states(b)[0]["params"] == {"lr": 0.02, "warmup": 9}
    shutil.rmtree(a)
    before = tree(b)
    fork_run(f"{a}@3", config(b), {"lr": 0.02, "warmup": 9})
    assert tree(b) == before
    train(tmp_path / "own", 1)
    with pytest.raises(ConfigError, match="began by itself"):
        fork_run(f"{a}@3", config(tmp_path / "own"), {})


def test_parameters_are_recorded_once(run_dir: Path) -> None:
    """A session records its program and what that is built with, each time that the parameters are new."""
    train(run_dir, 1)
    assert recorded_params(config(run_dir)) == {}
    train(run_dir, 2, {"seed": 5})
    train(run_dir, 3, {"seed": 5})
    train(run_dir, 4, {"seed": 25})
    assert recorded_params(config(run_dir)) == {"seed": 25}
    notes = [(note["program"], note["params"]) for note in run_of(run_dir).notes() if note["note"] == "program"]
    assert notes == [(PROGRAM, {"seed": 25}), (PROGRAM, {"seed": 5}), (PROGRAM, {})]
    assert recorded_params(config(run_dir / "absent")) is None


def test_another_program_is_refused(a: Path, b: Path) -> None:
    """A run is one program's, before anything is built and in the owner's restore; a new fork takes any program."""
    other = "tests.support.tiny:Tiny"
    fork(a, 3, b)
    for run_dir, trained in ((a, True), (b, False)):
        if trained:
            with pytest.raises(RunMismatchError, match=rf"trains {PROGRAM}, not {other}"):
                check_program(config(run_dir), other)
            entries = len(states(run_dir))
            with (
                Checkpointer(config(run_dir)) as ckpt,
                pytest.raises(RunMismatchError, match="fork the run"),
            ):
                record_program(ckpt, other, {})
            assert len(states(run_dir)) == entries
        else:
            check_program(config(run_dir), other)
    train(b, 4, {"lr": 0.02})
    with pytest.raises(RunMismatchError):
        check_program(config(b), other)
    check_program(config(b), PROGRAM)
    check_program(config(b / "absent"), other)


@pytest.mark.parametrize("params", [{"a.b": 1}, {1: 2}, {"": 1}, {"x": float("nan")}, {"x": object()}])
def test_parameters_that_are_no_json_are_refused(params: Any) -> None:
    """What the ledger could not give back is not a parameter."""
    with pytest.raises(ConfigError):
        checked_params(params)


def test_a_fork_that_was_killed_goes_on_with_its_checkpoint(a: Path, b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P73: killed while bytes came over, then the source commits: the fork keeps its checkpoint."""
    put = LocalStore.put_if_absent

    def killed(store: LocalStore, name: str, body: Any) -> None:
        if name.endswith(MANIFEST_NAME):
            raise SystemExit
        put(store, name, body)

    newest = run_of(a).find("latest").step
    monkeypatch.setattr(LocalStore, "put_if_absent", killed)
    with pytest.raises(SystemExit):
        fork_run(str(a), config(b))
    monkeypatch.undo()
    train(a, newest + 3)
    fork_run(str(a), config(b))
    assert [one.step for one in run_of(b).checkpoints()] == [newest]


def test_a_parameter_that_a_restore_would_undo_is_refused(a: Path) -> None:
    """On a resume an optimizer comes back with its options: another `lr` is refused, and is not recorded."""
    before = tree(a)
    with Checkpointer(config(a)) as ckpt, pytest.raises(ConfigError, match=r"another lr .* ckpt fork"):
        LocalSession(ckpt, PROGRAM, {"lr": 0.5}).restore()
    assert {name for name in tree(a) if "checkpoint" in name} == {name for name in before if "checkpoint" in name}
    assert recorded_params(config(a)) == {"lr": 0.02}
    with Checkpointer(config(a)) as ckpt:  # the default's own value, and what no optimizer knows
        LocalSession(ckpt, PROGRAM, {"lr": 0.02, "weight_decay": 0.0, "seed": 5}).restore()
    assert recorded_params(config(a)) == {"lr": 0.02, "weight_decay": 0.0, "seed": 5}
