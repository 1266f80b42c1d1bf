"""`ckpt ls ROOT`: many runs side by side, whatever state each is in."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.cli.ls import sort_runs
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.keys import heartbeat_name
from ckpt_tasks.run.overview import RunSummary, summaries_below
from ckpt_tasks.storage import objects
from ckpt_tasks.storage.objects import ObjectStore
from ckpt_tasks.storage.s3 import S3Requests
from tests.servers.s3 import S3Server
from tests.support.cli_runs import ckpt, config, flip, save_steps, started
from tests.support.ledgers import resealed
from tests.support.sweeps import quick_first

SUMMARIES = [
    RunSummary(name="a", url="", state="ended", step=3, saved_at="2026-01-03", size_bytes=1, metrics={"loss": 0.5}),
    RunSummary(name="b", url="", state="running", step=9, saved_at="2026-01-01", size_bytes=3, metrics={"loss": 0.1}),
    RunSummary(name="c", url="", state="ended", metrics={"loss": math.nan, "acc": 1.0}),
]


def rows(root: Path, *options: str) -> dict[str, Any]:
    return {row["name"]: row for row in ckpt("ls", root, "--json", *options).data["runs"]}


def test_metrics_are_chosen_and_sorted_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--metrics names the columns; --sort orders by any, which is shown, however narrow the screen."""
    save_steps(tmp_path / "long", 90)
    save_steps(tmp_path / "short", 1)
    assert [*rows(tmp_path, "--sort=-loss")] == ["short", "long"]
    assert [*rows(tmp_path, "--metrics", "loss", "--sort", "loss")] == ["long", "short"]
    with monkeypatch.context() as narrow, Checkpointer(config(tmp_path / "many")) as many:
        many.save(1, {"x": 1}, metrics=dict.fromkeys(("accuracy", "bits_per_byte", "calibration", "zebra"), 0.123456))
        narrow.setenv("COLUMNS", "80")
        shown = [ckpt("ls", tmp_path, *sort).out.partition("Not shown: ") for sort in ([], ["--sort", "zebra"])]
        assert [["zebra" in part for part in (table, left_out)] for table, _, left_out in shown] == [
            [False, True],
            [True, False],
        ]
    assert "no checkpoint has the metric 'acc'" in ckpt("ls", tmp_path / "long", "--metrics", "acc").err


@pytest.mark.parametrize(
    ("sort", "order"),
    quick_first(
        [
            ("name", "abc"),
            ("-name", "cba"),
            ("step", "bac"),
            ("saved", "abc"),
            ("size", "bac"),
            ("state", "acb"),
            ("loss", "bac"),
            ("-loss", "abc"),
            ("acc", "cab"),
        ],
        3,
    ),
)
def test_the_order(sort: str, order: str) -> None:
    """The newest and the largest come first, the smallest of a metric; a run without a value comes last."""
    assert "".join(run.name for run in sort_runs(SUMMARIES, sort)) == order
    with pytest.raises(ConfigError, match="acc"):
        sort_runs(SUMMARIES, "spell")


def test_a_damaged_run_is_shown_as_such(tmp_path: Path) -> None:
    """P49: format.json gone, broken or unknown, all ledger entries broken, or the newest: rows beside the good one."""
    runs = ("good", "format", "gone", "ledger", "newest", "later")
    save_steps(tmp_path / "good", 7)
    for name in runs[1:]:
        shutil.copytree(tmp_path / "good", tmp_path / name)
    flip(tmp_path / "format" / "format.json", 20)
    (tmp_path / "gone" / "format.json").unlink()
    for path in (tmp_path / "ledger" / "ledger").iterdir():
        flip(path, 20)
    flip(min((tmp_path / "newest" / "ledger").iterdir()), 20)  # the newest entry has the first name
    later = tmp_path / "later" / "format.json"
    later.write_bytes(resealed(later.read_bytes(), lambda body: body.update(version=999)))
    answer = ckpt("ls", tmp_path)
    assert answer.status == 1
    assert "format: format.json is damaged" in answer.out
    assert "gone: format.json is missing" in answer.out
    assert "newest: 1 ledger entry cannot be read" in answer.out
    assert "6 runs" in answer.out
    assert "4 damaged" in answer.out
    found = rows(tmp_path)
    assert [found[name]["state"] for name in runs] == ["ended", *["damaged"] * 4, "unreadable"]
    assert [found[name]["step"] for name in runs] == [7, 7, 7, None, 7, None]
    assert "Upgrade ckpt-tasks" in found["later"]["why"]


def test_a_run_that_is_trained_now(tmp_path: Path) -> None:
    """P34: to another process a run whose owner lives is running; one whose owner shows no life is silent, with why."""
    save_steps(tmp_path / "runs" / "one", 3)
    with Checkpointer(config(tmp_path / "runs" / "one")) as held:
        held.acquire()
        shutil.copytree(tmp_path / "runs" / "one", tmp_path / "runs" / "other")
        owner = open_run(str(tmp_path / "runs" / "other")).head().state.owner
        assert owner is not None
        sign = tmp_path / "runs" / "other" / heartbeat_name(owner.epoch)
        sign.parent.mkdir(exist_ok=True)
        sign.write_text(json.dumps({"at_s": time.time() - 1000}))
        with started("ls", tmp_path / "runs", "--json") as process:
            done = process.ends()
        assert done.returncode == 0, done
    one, other = json.loads(done.stdout)["runs"]
    assert (one["name"], one["state"]) == ("one", "running")
    assert other["state"] == "silent"
    assert re.search(r"no life for 1\d\d\d s", other["why"])


class Counting(S3Requests):
    """Requests that are counted, whichever store makes them over these connections."""

    count = 0

    def __getattribute__(self, name: str) -> Any:
        Counting.count += name in {"get", "keys", "folders", "read", "size", "sizes"}
        return super().__getattribute__(name)


@pytest.mark.slow
def test_a_bucket_of_runs(ministack: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that holds runs: one listing for all, then four requests for each, over the same connections."""
    local = save_steps(tmp_path / "one", 4)
    client = ministack.client()
    for n in range(12):
        for path in (path for path in local.rglob("*") if path.is_file()):
            key = f"sweep/run-{n:02}/{path.relative_to(local)}"
            client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
    client.put_object(Bucket=bucket, Key="sweep/notes/a.txt", Body=b"none")
    monkeypatch.setattr(objects, "S3Requests", Counting)
    found = summaries_below(ObjectStore(f"s3://{bucket}/sweep", ministack.storage_options))
    assert [(run.name, run.step, run.state) for run in found] == [(f"run-{n:02}", 4, "ended") for n in range(12)]
    assert 12 * 3 < Counting.count <= 1 + 12 * 4 + 2


def test_a_name_that_leads_nowhere_is_passed_over(tmp_path: Path) -> None:
    """A link to itself, through a file or to too long a name is named in a line, and the runs beside it are listed."""
    save_steps(tmp_path / "good", 1)
    (tmp_path / "file").touch()
    odd = {"loop": "loop", "through": "file/x", "long": "n" * 300}
    for name, target in odd.items():
        (tmp_path / name).symlink_to(target)
    answer = ckpt("ls", tmp_path, "--json")
    assert answer.status == 0
    assert [row["name"] for row in answer.data["runs"]] == ["good"]
    assert [f"{tmp_path / name} is passed over" in answer.err for name in ("loop", "long")] == [True, True]
