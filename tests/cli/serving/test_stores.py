"""The page of `ckpt serve` over runs in an object store: what it shows, and how few requests it sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.cli.serving import run_table as table_module
from ckpt_tasks.cli.serving.run_table import RunTable
from ckpt_tasks.cli.serving.runs import OpenRuns
from ckpt_tasks.storage.objects import ObjectStore
from ckpt_tasks.storage.retrying import RetryingStore
from tests.servers.s3 import S3Server
from tests.support.answers import ACCESS_DENIED
from tests.support.chaos import Chaos
from tests.support.cli_runs import save_steps
from tests.support.histories import Told, trained
from tests.support.rules import Fault

RUNS = 4
ALL: dict[str, Any] = {"low": float("-inf"), "high": float("inf"), "most": 100}


@pytest.fixture
def sweep(ministack: S3Server, bucket: str, chaos: Chaos, tmp_path: Path) -> RunTable:
    """A table of runs in a bucket, behind a proxy that counts requests."""
    local = save_steps(tmp_path / "one", 4)
    for n in range(RUNS):
        copy(ministack, bucket, local, f"run-{n}")
    trained(Told(tmp_path / "silent").taken(), 1, every_s=1, steps=10)
    copy(ministack, bucket, tmp_path / "silent", "silent")
    options = ministack.through(chaos.endpoint).quick_options
    return RunTable(RetryingStore(ObjectStore(f"s3://{bucket}/sweep", options), deadline_s=2))


def copy(server: S3Server, bucket: str, local: Path, name: str) -> None:
    for path in (path for path in local.rglob("*") if path.is_file()):
        key = f"sweep/{name}/{path.relative_to(local)}"
        server.client().put_object(Bucket=bucket, Key=key, Body=path.read_bytes())


def rows(table: RunTable) -> dict[str, tuple[str, int | None]]:
    return {row["name"]: (row["state"], row["step"]) for row in table.since(-1)["rows"]}


@pytest.mark.slow
def test_runs_in_a_bucket_are_rows_and_a_look_lists_each_once(
    sweep: RunTable, chaos: Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later look lists the root twice and each run once, and reads the sign of life of one that was not released.

    It waits before the next one, so that a store gets at most ten requests a second. A report and a curve that are
    asked for again read the ledger and its tables once.
    """
    sweep.look()
    assert rows(sweep) == {f"run-{n}": ("ended", 4) for n in range(RUNS)} | {"silent": ("silent", 10)}
    before = len(chaos.log)
    assert before <= 2 + 6 * (RUNS + 1)
    sweep.look()
    later = chaos.log[before:]
    assert len(later) == 2 + RUNS + 2
    assert [one.key for one in later if "list-type" not in one.target] == ["sweep/silent/heartbeat/000001.json"]
    assert {one.method for one in chaos.log} <= {"GET", "HEAD"}
    monkeypatch.setattr(table_module, "_EVERY_S", 0.0)
    assert len(later) <= 10 * sweep.pause_s(0.0)
    runs = OpenRuns()

    def ask() -> Any:
        about = runs.ask("run-0", sweep.stores["run-0"], lambda run: run.about())
        assert [row["step"] for row in about["checkpoints"]] == ["4"]
        return runs.ask("run-0", sweep.stores["run-0"], lambda run: run.curves(["loss"], by="step", **ALL))["lines"]

    first, before = ask(), len(chaos.log)
    assert ask() == first
    again = [one for one in chaos.log[before:] if "list-type" not in one.target]
    assert not [one for one in again if "/steps/" in one.target]
    assert len(again) <= 6


@pytest.mark.slow
def test_an_outage_leaves_the_rows_and_ends(sweep: RunTable, chaos: Chaos) -> None:
    """What a store refuses is said for a run and for the root; later the same table is whole again."""
    denied = chaos.on(Fault(answer=ACCESS_DENIED), key="run-3/")
    sweep.look()
    assert rows(sweep)["run-3"] == ("unreadable", None)
    chaos.off(denied)
    sweep.look()
    whole = {**{f"run-{n}": ("ended", 4) for n in range(RUNS)}, "silent": ("silent", 10)}
    assert rows(sweep) == whole
    chaos.on(Fault(answer=ACCESS_DENIED))
    sweep.look()
    assert "denied" in sweep.error.lower()
    assert rows(sweep) == whole
    chaos.off()
    sweep.look()
    assert (rows(sweep), sweep.error) == (whole, "")
