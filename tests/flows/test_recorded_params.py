"""What a run's ledger says of parameters, and what of it reaches the program: a ledger may be anybody's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import open_run
from ckpt_tasks.errors import ProgramError
from ckpt_tasks.flows.evaluate import evaluate
from ckpt_tasks.flows.session.local_session import build_program
from ckpt_tasks.flows.train import train
from ckpt_tasks.format.digests import canonical_json, digest_hex
from tests.support.forks import PROGRAM, fork, states
from tests.support.tiny import Tiny

pytestmark = pytest.mark.usefixtures("harness")


class Reading(Tiny):
    """Read the file `data`, as programs do; what every call of the factory was given is kept."""

    recorded_params = ("mode",)
    given: list[dict[str, Any]] = []  # noqa: RUF012 (of the class: instances come and go)

    def __init__(self, *, data: str, mode: str = "plain", rates: Any = None, flag: bool = False, **rest: Any):
        self.given.append({"data": data, "mode": mode, "rates": rates, "flag": flag, **rest})
        Path(data).read_bytes()
        super().__init__(**rest)


READING = f"{__name__}:Reading"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    Reading.given.clear()


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus"
    path.write_text("text")
    return str(path)


@pytest.fixture
def secret(tmp_path: Path) -> str:
    """Return the path of a file that the program can read, and that its deployment never names."""
    path = tmp_path / "secret"
    path.write_text("key")
    return str(path)


def trained(run_dir: Path, total_steps: int, program: str = READING, **options: Any) -> None:
    checkpoint = {"checkpoint_dir": str(run_dir), "max_num_checkpoints": None, "memory_dir": None}
    train(run_key="r", total_steps=total_steps, checkpoint=checkpoint, program=program, batch_steps=5, **options)


def rewrite(run_dir: Path, **fields: Any) -> None:
    """Write into the newest ledger entry, with a digest that fits, what an attacker wants its state to say."""
    entry = min((run_dir / "ledger").glob("[0-9]*.json"))
    body = json.loads(entry.read_bytes())
    del body["digest"]
    body["state"] |= fields
    entry.write_bytes(canonical_json({**body, "digest": digest_hex(canonical_json(body))}))


def seen(name: str) -> list[Any]:
    return [call.get(name) for call in Reading.given]


def evaluated(run_dir: Path, **options: Any) -> None:
    evaluate(run_key="r", checkpoint_dir=str(run_dir), program=READING, retries=0, **options)


def test_a_path_in_the_ledger_reaches_no_program(run_dir: Path, corpus: str, secret: str) -> None:
    """P21: a file that the record names is not read, by training and by evaluations; nothing is built or committed."""
    trained(run_dir, 2, params={"data": corpus})
    rewrite(run_dir, params={"data": secret})
    Reading.given.clear()
    with pytest.raises(ProgramError, match=r"'data'.*not taken from there"):
        trained(run_dir, 4)
    with pytest.raises(ProgramError, match=r"'data'.*not taken from there"):
        evaluated(run_dir)
    assert Reading.given == []
    assert open_run(str(run_dir)).find("latest").step == 2


def test_the_source_of_a_fork_is_read_as_any_ledger(run_dir: Path, corpus: str, secret: str) -> None:
    """P21: the program of before is built with the source's numbers, never with its paths."""
    trained(run_dir, 2, params={"data": corpus, "flag": False})
    rewrite(run_dir, params={"data": secret, "flag": False})
    Reading.given.clear()
    target = run_dir.with_name("fork")
    trained(target, 4, params={"data": corpus, "flag": True}, fork_from=f"{run_dir}@2")
    assert states(target)[0]["origin"]["params"]["data"] == secret
    assert [(call["data"], call["flag"]) for call in Reading.given] == [(corpus, True), (corpus, False)]


def test_a_forks_learning_rate_comes_from_its_record(run_dir: Path) -> None:
    """`ckpt fork --param lr=…` trains with it though the flow is given nothing."""
    trained(run_dir, 2, PROGRAM, params={"lr": 0.02})
    target = run_dir.with_name("fork")
    fork(run_dir, 2, target, {"lr": 0.0002}, run_key="r")
    trained(target, 4, PROGRAM)
    assert states(target)[-1]["params"] == {"lr": 0.0002}
    at = open_run(str(target))
    fresh = build_program(PROGRAM)
    at.restore(at.find("latest"), fresh.state, partial=False)
    assert [group["initial_lr"] for group in fresh.state["optimizer"].param_groups] == [0.0002] * 2
