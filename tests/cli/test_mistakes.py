"""What cannot be done is one line that says what to do, or with --json one object; and not a byte is changed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt_tasks import Checkpointer
from tests.support.cli_runs import ckpt, config, save_steps, tree
from tests.support.histories import Told, trained
from tests.support.sweeps import quick_first

NO_RUN = "there is no run at nothing: nothing is there. A training makes its run when it starts. Check the name."
NO_REPORT = "is not replaced"
MISTAKES = {
    **{f"{verb} nothing": NO_RUN for verb in ("ls", "show", "verify", "prune", "watch", "report")},
    **{f"{verb} nothing new": "there is no run at" for verb in ("sync", "fork", "export")},
    "ls net": "Did you mean nets?",
    "ls nets --sort loss": "many runs",
    "ls . --metrics acc": "loss",
    "ls . --sort acc": "loss",
    "show nets@7": "It has steps 1, 2, 3",
    "show plain@best": "best_metric",
    **{f"{verb} nets": "'nets' names no checkpoint. Write DIR@500, DIR@latest or DIR@best." for verb in ("pin", "rm")},
    "unpin nets": "names no checkpoint",
    "prune nets --keep-best 1": "--max-num-checkpoints",
    "prune nets --keep-every-n-steps 10": "--max-num-checkpoints",
    "prune nets --max-num-checkpoints 1 --best-metric loss --best-mode ''": "best_mode",
    "watch nets --every 0": "--every 0",
    f"import {'x' * 300}.pt new": "cannot be read: File name too long",
    "verify-resume './train.py:Net'": "names no program",
    "verify-resume 'train.py --lr 3:Net'": "A script of your own comes after --",
    "verify-resume '..:Net'": "names no program",
    "prune nets --memory-dir nothing": "nothing",
    "rollback nets": "'nets' names no step. Write DIR@STEP",
    "sync nets@7 new": "It has steps 1, 2, 3",
    "sync nets plain": "plain",
    "fork nets new --param lr=1": "no flow has recorded",
    "fork nets new --param lr": "is not NAME=VALUE",
    "fork nets new --param =1": "is not NAME=VALUE",
    "fork nets new --param optimizer.lr=1": "plain name",
    "fork nets new --param lr=1 --param lr=2": "set twice",
    "fork nets new --param lr=.1": "not a value that JSON knows",
    "fork nets new --run-key ../up": "run's key",
    **{f"export nets new --max-shard-size={size}": "size" for size in ("big", "-1GB", "GB", "1e9", "0", "5GBB")},
    "export nets new.pt --max-shard-size 5GB": "shard",
    "export nets new.safetensors --format torch": "safetensors",
    "export nets mine.pt": "mine.pt",
    "import none.pt new": "none.pt",
    "import empty new": "empty",
    "import cut.pt new": "cut.pt",
    "import mine.pt nets --step 9": "trained",
    "ls long --metrics wrong": "no checkpoint has the metric",
    **{f"metrics nets --port 9 {option}": "until Ctrl-C" for option in ("--otlp", "--out new")},
    "metrics nets --port 99999": "127.0.0.1:99999 cannot be listened at",
    "report long --out no/page.html": "the report cannot be written",
    "report long --out thesis.html": "is no report, and is not replaced",
    # A link is not followed, a pipe is not waited for.
    **{f"report long --out {kind}": NO_REPORT for kind in ("dangling", "linked", "pipe", "empty")},
    "restore-drill nets": "--program",
    "samples nets": "no position in the data",
    **{f"export nets {kind} --format torch --overwrite": NO_REPORT for kind in ("dangling", "linked", "pipe")},
    "export nets new.pt --format safetensors": "the name of a torch file",
    "export nets new.safetensors --format dcp": "the name of a safetensors file",
    "show nets@111111111111111111111": "names neither",
    "verify nets@1 --history": "whole run",
    "verify-resume m:P --param lr=1 --param lr=2": "set twice",
    "prune plain --best-mode max": "best_mode needs best_metric",
    "fork nets new --run-key ''": "run's key",
    "init new --name ''": "is not a name",
    "train m:P --keep-best 1": "keep_best needs best_metric",
    "train m:P --epoch-interval 1": "step_interval",
    "train m:P --step-interval 0": "step_interval",
    "train m:P --params {": "--params is not JSON",
    "train m:P --params '[1]'": "--params must be a JSON object",
    "train m:P --param seed": "--param 'seed' is not NAME=VALUE",
    "train m:P --param seed=1 --seed 2": "the parameter seed is given twice: 1 and 2",
    **{f"{verb} m:P --program m:Q": "named twice" for verb in ("train", "evaluate")},
    **{f"{verb} ''": "run_key" for verb in ("train", "evaluate")},
    "evaluate --which latest --limit 2": "--which pending",
    "evaluate --promote-params '{\"lr\": 1}'": "promote, which is not given",
}
# These compare: 1 is a difference, so a mistake is 2.
COMPARING = {
    "diff nothing nets": "there is no run at",
    **{
        f"diff nets plain {options}": "There are model, position, rng"
        for options in ("--group modle", "--ignore optimizer", "--group model --ignore model")
    },
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Work in a directory with runs, files that are somebody's own, and things that are no files."""
    place, before = tmp_path_factory.mktemp("mistakes"), Path.cwd()
    os.chdir(place)
    save_steps(place / "nets", 1, 2, 3, best_metric="loss")
    save_steps(place / "plain", 1)
    Told(place / "fresh").taken()
    trained(Told(place / "long").taken(), 3, every_s=60.0, steps=120, stall_s=0.05, flush_s=0.5, step_s=0.5)
    torch.save({"weight": torch.ones(3)}, place / "mine.pt")
    (place / "cut.pt").write_bytes(b"PK\3\4")
    (place / "thesis.html").write_text("mine")
    assert ckpt("report", "long", "--out", "own.html").status == 0
    (place / "linked").symlink_to(place / "own.html")
    (place / "dangling").symlink_to(place / "nowhere")
    os.mkfifo(place / "pipe")
    (place / "empty").mkdir()
    yield place
    os.chdir(before)


def names(place: Path) -> set[str]:
    return {str(path) for path in place.rglob("*")}


@pytest.mark.parametrize(
    ("line", "says", "status"),
    quick_first(
        [*((*mistake, 1) for mistake in MISTAKES.items()), *((*mistake, 2) for mistake in COMPARING.items())], 7
    ),
)
def test_a_mistake_is_one_line_or_one_object(world: Path, line: str, says: str, status: int) -> None:
    """An error of ours is a line on stderr with what to do, or with --json an object on stdout; nothing is made."""
    before = names(world), tree(world)
    people, programs = ckpt(*shlex.split(line)), ckpt(*shlex.split(line), "--json")
    assert (people.status, people.out, programs.status, programs.err) == (status, "", status, "")
    assert people.err.startswith("error: ")
    assert people.err.count("\n") == 1
    assert says in people.err.replace(f"{world}/", "")
    error = programs.data["error"]
    assert {*error} == {"type", "message", "key", "step", "hint"}
    assert people.err.endswith(f" {error['hint']}\n" if error["hint"] else "\n")
    assert (names(world), tree(world)) == before


def test_its_own_file_is_replaced(world: Path, tmp_path: Path) -> None:
    """What the same verb wrote is written anew, and nothing else lies beside it."""
    for _ in range(2):
        assert ckpt("report", "long", "--out", tmp_path / "made").status == 0
        assert "older" not in (tmp_path / "made").read_text()
        (tmp_path / "made").write_text((tmp_path / "made").read_text() + "<!-- older -->")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_an_evaluation_without_a_program_names_the_one_that_is_trained(run_dir: Path) -> None:
    """The example is not restored into another program's run, which would only list tensors that do not fit."""
    with Checkpointer(config(run_dir, run_key="run")) as made:
        made.save(1, {"at": 1})
        made.record_program("tests.support.forks:Scheduled", {})
    answer = ckpt("evaluate", "--run-key", "run", "--checkpoint-dir", run_dir)
    assert answer.status == 1
    assert "Name it: ckpt evaluate tests.support.forks:Scheduled" in answer.err
    assert "Starting" not in answer.out
