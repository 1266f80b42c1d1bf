"""`ckpt train` of a Trainer, as a job whose legs are killed; the reference is the same Trainer in a script."""

from __future__ import annotations

import json
import os

from prefect.context import refresh_global_settings_context

import ckpt_tasks.flows.console  # noqa: F401 (imported once for all legs)
from tests.integrations.ranks.huggingface_job import ranks, train
from tests.support.cli_runs import ckpt
from tests.support.legs import Leg

PROGRAM = "tests.integrations.ranks.huggingface_job:training"


def job(leg: Leg) -> None:
    """Train as a script; or by `ckpt train` until the step and on the ranks that the options have for this leg."""
    each = leg.options["legs"]
    if leg.folder.name == "reference":
        ranks(leg) if each[0][1] > 1 else train(leg, 1)
        return
    starts = leg.folder / "starts"
    with starts.open("a") as file:
        file.write("x")
    steps, size = each[len(starts.read_text()) - 1]
    os.environ["LEG"] = json.dumps([*leg.about, os.getpid()])
    os.environ |= leg.options["prefect"]
    refresh_global_settings_context()
    where = ("--run-key", "run", "--checkpoint-dir", leg.folder / "run", "--json")
    every = ("--batch-steps", "4", "--step-interval", "4", "--memory-dir", "none")
    done = [ckpt("train", PROGRAM, "--steps", str(steps), "--ranks", str(size), *every, *where)]
    if size == 1:
        done.append(ckpt("evaluate", PROGRAM, "--suite", "another", *where))
    for answer in done:
        assert answer.status == 0, answer
        [result] = answer.data["evaluations"]
        leg.record("eval_loss", result["step"], result["metrics"]["eval_loss"])
