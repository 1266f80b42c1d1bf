"""`ckpt watch`: follows a run without touching it, and ends with Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.cli import app
from tests.support.children import Child
from tests.support.cli_runs import ckpt, save_steps, tree
from tests.support.owner_child import OwnerChild


def follow(arguments: Sequence[str]) -> None:
    os.environ["COLUMNS"] = "80"
    app(["watch", "--every", "0.1", *arguments])


def told(child: Child) -> list[dict[str, Any]]:
    return [json.loads(line) for line in child.said().splitlines(keepends=True) if line.endswith("\n")]


def test_every_event_is_one_line_of_json(run_dir: Path, tmp_path: Path) -> None:
    """Commits, a pin, its end and the owner's death are told as they happen; Ctrl-C ends it with status 0."""
    owner = OwnerChild(run_dir)
    assert owner.ask("save 1") == "ok 1"
    with Child(follow, [str(run_dir), "--json"], tmp_path / "said") as child:
        assert child.until(lambda: any(event["event"] == "owner" for event in told(child)))
        assert owner.ask("save 2") == "ok 2"
        assert child.until(lambda: any(event["event"] == "commit" for event in told(child)))
        assert owner.ask("measure 3") == "ok"
        assert child.until(lambda: any(event["event"] == "live" for event in told(child)))
        ckpt("pin", f"{run_dir}@2", "-m", "mine")
        ckpt("unpin", f"{run_dir}@2")
        assert child.until(lambda: any(event["event"] == "unpin" for event in told(child)))
        owner.kill()
        assert child.until(lambda: sum(event["event"] == "owner" for event in told(child)) == 2)
        before = tree(run_dir)
        child.send(signal.SIGINT)
        assert child.wait() == 0
        events = told(child)
    assert [event["event"] for event in events if event["event"] not in ("pruned", "live")] == [
        "watching",
        "owner",
        "commit",
        "pin",
        "unpin",
        "owner",
    ]
    assert (events[0]["step"], events[0]["run_key"]) == (1, run_dir.name)
    assert events[1]["alive"] is True
    assert next(event["step"] for event in events if event["event"] == "commit") == 2
    assert next(event for event in events if event["event"] == "live") == {
        "event": "live",
        "step": 3,
        "metrics": {"loss": 1 / 3},
        "committed": 2,
    }
    assert next(event["text"] for event in events if event["event"] == "pin") == "mine"
    assert events[-1]["alive"] is False
    assert "is gone" in events[-1]["text"]
    assert tree(run_dir) == before


@pytest.mark.slow
def test_without_a_terminal_it_prints_lines(run_dir: Path, tmp_path: Path) -> None:
    """Into a file or a pipe each event is one line that a person can read."""
    save_steps(run_dir, 1)
    with Child(follow, [str(run_dir), "--every=0.01"], tmp_path / "said") as child:
        assert child.until(lambda: "owner" in child.said())
        save_steps_again(run_dir)
        assert child.until(lambda: "step 2, loss 0.25" in child.said())
        child.send(signal.SIGINT)
        assert child.wait() == 0
        lines = child.said().splitlines()
    assert lines[0].split(maxsplit=1) == ["watching", "step 1, loss 0.5"]
    assert lines[1].split(maxsplit=1) == ["owner", "none, its owner released it"]


def save_steps_again(run_dir: Path) -> None:
    from ckpt_tasks import Checkpointer
    from tests.support.cli_runs import config, some_state

    with Checkpointer(config(run_dir)) as mine:
        state = some_state()
        mine.restore(state)
        mine.save(2, state, metrics={"loss": 0.25})
