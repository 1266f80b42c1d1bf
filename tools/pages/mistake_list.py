"""The mistakes, each made really; see mistaken.py for what is looked at."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableSampler
from ckpt_tasks.session.forked import check_program
from ckpt_tasks.session.local import LocalSession
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.locations import Location
from tests.support.cli_runs import ckpt as command
from tests.support.owner_child import OwnerChild
from tools.pages.mistaken import (
    MISTAKES,
    Careless,
    Failing,
    State,
    answering,
    config,
    mistake,
    resume,
    run,
    stepped,
    training,
)

__all__ = ["MISTAKES"]

_CARELESS = f"{Careless.__module__}:Careless"


# ── what is in the state ─────────────────────────────────────────────────────────────────────────────────────────


@mistake(
    "A cell of a notebook runs again before the first checkpoint",
    says="begins at step 0 with the state as it is, and optimizer has taken steps",
    do="make model and optimizer anew",
)
def cell_ran_before(place: Path) -> None:
    resume(place, stepped(training()))


@mistake(
    "The optimizer is not in the state",
    says="Adam of model is not in the state: after a resume it begins anew",
    do="'optimizer': optimizer",
)
def optimizer_forgotten(place: Path) -> None:
    state = stepped(training())
    run(place, {"model": state["model"]})


@mistake(
    "The learning-rate schedule is not in the state",
    says="StepLR of optimizer is not in the state",
    do="'schedule': schedule",
)
def schedule_forgotten(place: Path) -> None:
    state = stepped(training())
    schedule = torch.optim.lr_scheduler.StepLR(state["optimizer"], step_size=2)
    run(place, state)
    assert schedule.last_epoch == 0


@mistake(
    "A DataLoader shuffles by itself, and is not in the state",
    says="keeps no position: after a resume",
    do="Use ResumableSampler, or a StatefulDataLoader in the state",
)
def loader_forgotten(place: Path) -> None:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, shuffle=True)
    state = stepped(training())
    with Checkpointer(config(place)) as ckpt:
        for step, _ in enumerate(loader, start=1):
            ckpt.step(step, state)
        ckpt.save(step, state)


@mistake(
    "A loader's sampler is in the state, and the loop does not move it",
    says="whose position does not move: a resume begins the epoch again",
    do="Iterate sampler.follow\\(loader\\)",
)
def sampler_stands(place: Path) -> None:
    sampler = ResumableSampler(8, 2)
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_sampler=sampler)
    state = training(data=sampler)
    with Checkpointer(config(place)) as ckpt:
        for step, _ in enumerate(loader, start=1):
            ckpt.save(step, stepped(state))


@mistake(
    "A generator of one's own is not in the state",
    says="Different from step 3 on, after the first resume",
    do="not in its state: program.noise\\s\\(Generator\\)",
    slow=True,
)
def generator_forgotten(place: Path) -> str:
    return command("verify-resume", _CARELESS, "--steps", "6").out


@mistake(
    "optimizer.state_dict() in the state, not the optimizer",
    says="state_dict\\(\\) of an optimizer, and a restore into it would not reach",
    do="Give the object itself: state={'model': model, 'optimizer': optimizer}",
)
def copy_of_state(place: Path) -> None:
    state = stepped(training())
    run(place, {"model": state["model"], "optimizer": state["optimizer"].state_dict()})


@mistake(
    "A lambda in the state",
    says="a value of type function cannot be stored \\(at schedule/warmup",
    do="Leave it out of the state: code",
)
def function_in_state(place: Path) -> None:
    run(place, training(schedule={"warmup": lambda step: min(1.0, step / 100), "done": 0}))


@mistake("An open file in the state", says="TextIOWrapper cannot be stored \\(at log/file", do="open it anew")
def file_in_state(place: Path) -> None:
    with open(place / "train.log", "w", encoding="utf-8") as file:
        run(place, training(log={"file": file}))


@mistake(
    "A Python generator (an iterator over batches) in the state",
    says="a value of type generator cannot be stored \\(at batches",
    do="Use ResumableSampler",
)
def iterator_in_state(place: Path) -> None:
    run(place, training(batches=(batch for batch in range(3))))


@mistake(
    "A model that is still on the meta device", says="a tensor on the meta device.*at model/body.weight", do="to_empty"
)
def meta_tensor(place: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential()
        model.add_module("body", nn.Linear(3, 4))
    run(place, {"model": model})


# ── what has changed since the run began ─────────────────────────────────────────────────────────────────────────


@mistake("The model has another width than the run's", says="step 3.*body.weight \\(.*4.*3", do="as they were")
def width_changed(place: Path) -> None:
    run(place, stepped(training(width=4)))
    resume(place, training(width=8))


@mistake("A layer has another name", says="step 3.*model/top.*model/head", do="only=\\{'model/top': 'model/head'")
def layer_renamed(place: Path) -> None:
    run(place, stepped(training()))
    model = nn.Sequential()
    model.add_module("body", nn.Linear(3, 4))
    model.add_module("top", nn.Linear(4, 2))
    resume(place, {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)})


@mistake("The model has another dtype", says="step 3.*bfloat16.* here, float32", do="convert it after that")
def dtype_changed(place: Path) -> None:
    run(place, stepped(training()))
    state = training()
    state["model"].bfloat16()
    resume(place, state)


@mistake(
    "The optimizer has fewer param groups", says="1 param groups here, 2 in the checkpoint", do="same param groups"
)
def param_groups_changed(place: Path) -> None:
    model = nn.Linear(3, 2)
    groups: list[State] = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.01}]
    run(place, {"model": model, "optimizer": torch.optim.Adam(groups, lr=0.1)})
    resume(place, {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)})


@mistake("Another kind of optimizer", says="another kind of optimizer", do="as they were")
def optimizer_changed(place: Path) -> None:
    run(place, stepped(training()))
    state = training()
    resume(place, state | {"optimizer": torch.optim.SGD(state["model"].parameters(), lr=0.1)})


@mistake(
    "Another learning rate on the command line",
    says="step 3 .*optimizer lr: 0.1 → 0.01. 0.1 is restored",
    do="set them after restore",
)
def rate_changed(place: Path) -> None:
    run(place, stepped(training(lr=0.1)))
    resume(place, training(lr=0.01))


@mistake(
    "A schedule of another length",
    says="step 3 .*schedule T_max: 100 → 200. 100 is restored",
    do="set them after restore",
)
def schedule_changed(place: Path) -> None:
    def scheduled(steps: int) -> State:
        state = training()
        return state | {"schedule": torch.optim.lr_scheduler.CosineAnnealingLR(state["optimizer"], steps)}

    run(place, stepped(scheduled(100)))
    resume(place, scheduled(200))


@mistake(
    "Another learning rate as a parameter of a flow's program",
    says="another lr than the run's would be lost",
    do="fork the run: ckpt fork DIR NEW --set NAME=VALUE",
)
def parameter_changed(place: Path) -> None:
    for lr in (0.1, 0.01):
        with Checkpointer(config(place)) as ckpt:
            LocalSession(ckpt, _CARELESS, {"lr": lr}).restore()


@mistake("A flow on the run of another program", says="Careless.*Careful|Careful.*Careless", do="directory")
def program_changed(place: Path) -> None:
    with Checkpointer(config(place)) as ckpt:
        LocalSession(ckpt, _CARELESS).restore()
    check_program(config(place), f"{Careless.__module__}:Careful")  # as the flow `train` does first


@mistake("Another data set than the run's", says="size is 100 in the checkpoint and 120 here", do="same data set")
def data_changed(place: Path) -> None:
    run(place, stepped(training(data=ResumableSampler(100, batch_size=4))))
    resume(place, training(data=ResumableSampler(120, batch_size=4)))


# ── where the run lies ───────────────────────────────────────────────────────────────────────────────────────────


@mistake("restore() was not called", says="holds checkpoints up to step 3", do="Call restore\\(\\) first")
def restore_forgotten(place: Path) -> None:
    run(place, stepped(training()))
    with Checkpointer(config(place)) as ckpt:
        ckpt.save(4, stepped(training()))


@mistake("The directory of another run", says="holds the run 'lm-7', not 'lm-8'", do="Use another directory")
def run_of_another(place: Path) -> None:
    run(place, stepped(training()), run_key="lm-7")
    resume(place, training(), run_key="lm-8")


@mistake("Two processes, one directory", says="is held by process 4711 on node-3", do="Stop that process")
def two_processes(place: Path) -> None:
    other = OwnerChild(place / "lm-7")
    try:
        other.ask("save 3")
        resume(place, training())
    finally:
        other.kill()


@mistake("A file where the directory should be", says="lm-7 is a file, and a run is a directory", do="another name")
def file_as_directory(place: Path) -> None:
    (place / "lm-7").write_text("notes", encoding="utf-8")
    resume(place, training())


@mistake("The disk is full", says="No space left on device.*step 4", do="free space, or keep fewer")
def disk_full(place: Path) -> None:
    run(place, stepped(training()))
    with Checkpointer(config(place)) as ckpt:
        state = training()
        ckpt.restore(state)
        ckpt._history.store = LocalStore(place / "lm-7", calls=Failing("pwrite", errno.ENOSPC))
        ckpt.save(4, state)


@mistake("The directory is read-only", says="Read-only file system", do="mounted read-only")
def read_only(place: Path) -> None:
    ckpt = Checkpointer(config(place))
    ckpt._history.store = LocalStore(place / "lm-7", calls=Failing("mkdir", errno.EROFS))
    ckpt.restore(training())


@mistake("s3:/ with one slash", says="is not a place: after s3 come ://", do="Write s3://bucket/lm-7")
def one_slash(place: Path) -> None:
    Checkpointer(CheckpointConfig(checkpoint_dir="s3:/bucket/lm-7"))


@mistake("A scheme that is misspelt", says="s4://bucket/lm-7", do="Write s3://")
def scheme_misspelt(place: Path) -> None:
    Checkpointer(CheckpointConfig(checkpoint_dir="s4://bucket/lm-7"))


@mistake("A bucket that is not there", says="404 NoSuchBucket", do="Create the bucket first, or check its name")
def bucket_missing(place: Path) -> None:
    with answering(404, "NoSuchBucket") as url:
        _restore_there(url)


@mistake("Wrong keys for a bucket", says="403 InvalidAccessKeyId", do="The credentials are of no user")
def keys_wrong(place: Path) -> None:
    with answering(403, "InvalidAccessKeyId") as url:
        _restore_there(url)


def _restore_there(endpoint: str) -> None:
    options = {"endpoint_url": endpoint, "key": "lab", "secret": "hush", "skip_instance_cache": True}
    there = Location("s3://bucket/lm-7", storage_options=options)
    Checkpointer(CheckpointConfig(checkpoint_dir=there, memory_dir=None)).restore(training())


# ── options and calls ────────────────────────────────────────────────────────────────────────────────────────────


@mistake("An option that is misspelt", says="no option 'max_num_checkpoint'", do="Did you mean max_num_checkpoints")
def option_misspelt(place: Path) -> None:
    config(place, max_num_checkpoint=3)


@mistake("max_num_checkpoints=0", says="max_num_checkpoints must be a whole number from 1 on or None, not 0", do="None")
def keeps_none(place: Path) -> None:
    config(place, max_num_checkpoints=0)


@mistake("Steps that begin again in every epoch", says="step 1 comes after step 3", do="count on over all epochs")
def steps_begin_again(place: Path) -> None:
    state = training()
    with Checkpointer(config(place)) as ckpt:
        ckpt.restore(state)
        stepped(state)
        for _ in range(2):
            for step in range(1, 4):
                ckpt.step(step, state)


@mistake("The loss is NaN", says="Step 2: loss is nan", do="on_non_finite")
def loss_is_nan(place: Path) -> None:
    state = training()
    with Checkpointer(config(place)) as ckpt:
        ckpt.restore(state)
        stepped(state)
        ckpt.step(1, state, metrics={"loss": 0.5})
        ckpt.save(2, state, metrics={"loss": float("nan")})


@mistake("The losses of a whole batch as a metric", says="a metric is one number.*loss", do="mean\\(\\)")
def metric_is_a_list(place: Path) -> None:
    state = training()
    with Checkpointer(config(place)) as ckpt:
        ckpt.restore(state)
        stepped(state)
        ckpt.save(1, state, metrics={"loss": np.ones(2)})  # type: ignore[dict-item]


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────


@mistake("A .pt file is shown", says="model.pt is a file", do="torch.load")
def file_shown(place: Path) -> str:
    torch.save({"x": 1}, place / "model.pt")
    return command("show", place / "model.pt").err


@mistake("A run that is not there", says="there is no run at", do="Check the name")
def run_missing(place: Path) -> str:
    return command("show", place / "lm-8").err


@mistake("The directory above the run", says="there is no run at", do="runs in it: lm-7")
def run_below(place: Path) -> str:
    run(place, stepped(training()))
    return command("show", place).err


@mistake("A step that was never saved", says="no checkpoint of step 5", do="It has steps 3")
def step_missing(place: Path) -> str:
    run(place, stepped(training()))
    return command("show", f"{place / 'lm-7'}@5").err
