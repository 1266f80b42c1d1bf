"""The boundary of the package: whatever a public callable is given, it works or raises an error of ours, in time."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_tasks
from ckpt_tasks import (
    Checkpointer,
    Gradients,
    Listener,
    Location,
    ResumableLoader,
    ResumableSampler,
    ShuffleBuffer,
    open_run,
    sample_generator,
)
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.errors import CkptError
from tests.support.cli_runs import ckpt, config

_NUMBERS = count(2)
WRONG: list[Any] = [
    *(None, 3, -1, 3.5, float("nan"), 10**400, True, "", "no\0pe", "nope", "ü/../x", b"x", object(), int, Path("x")),
    *([], [object()], {}, {"a": object()}, {1: 2}, {"loss": 10**400}, {object(): 1.0}, (1,), (1, 2, 3), torch.ones(2)),
]


class World:
    """A run that a Checkpointer holds, and one that nobody holds, with what their callables need to work."""

    def __init__(self, place: Path):
        self.place = place
        model = torch.nn.Linear(2, 2)
        self.state: dict[str, Any] = {"model": model, "x": torch.ones(3)}
        self.held = self.begun("held")
        self.begun("free").close()
        run = open_run(str(place / "free"))
        self.run, self.checkpoint = run, run.checkpoints()[0]
        self.loader = ResumableLoader([*range(10)], batch_size=2)  # type: ignore[arg-type]
        self.calls = self._calls(model)

    def begun(self, name: str) -> Checkpointer:
        ckpt = Checkpointer(config(self.place / name))
        ckpt.restore(self.state)
        ckpt.save(1, self.state, metrics={"loss": 1.0})
        return ckpt

    def new(self, kind: Callable[[str], Any] = str) -> Any:
        return kind(str(self.place / f"new-{next(_NUMBERS)}"))

    def newest_step(self) -> int:
        return self.held.checkpoints()[0].step

    def _calls(self, model: torch.nn.Module) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
        """Return every public callable with arguments of which it needs all; a function makes one anew."""
        held, run, one = self.held, self.run, self.checkpoint
        step, target = partial(next, _NUMBERS), partial(self.new, lambda place: Location(place).open())
        store = run.history.store
        return {
            "Checkpointer": (Checkpointer, {"config": config(self.place / "other")}),
            "Checkpointer.restore": (held.restore, {"state": self.state}),
            "Checkpointer.step": (held.step, {"step": step, "state": self.state}),
            "Checkpointer.save": (held.save, {"step": step, "state": self.state}),
            "Checkpointer.pin": (held.pin, {"step": self.newest_step}),
            "Checkpointer.unpin": (held.unpin, {"step": self.newest_step}),
            "Checkpointer.remove": (held.remove, {"checkpoint": lambda: held.checkpoints()[-1]}),
            "Checkpointer.note": (held.note, {"what": "seen", "field": 1}),
            "Checkpointer.record_failure": (held.record_failure, {"field": 1}),
            "Checkpointer.record_program": (held.record_program, {"program": "a:B", "params": {}}),
            "Checkpointer.rollback": (held.rollback, {"step": self.newest_step}),
            "Checkpointer.prune": (held.prune, {"dry_run": True}),
            "Checkpointer.listen": (held.listen, {"listener": Listener()}),
            "ByRank": (ckpt_tasks.ByRank, {"value": 1}),
            "CheckpointConfig": (ckpt_tasks.CheckpointConfig, {"checkpoint_dir": str(self.place / "free")}),
            "open_run": (open_run, {"checkpoint_dir": str(self.place / "free")}),
            "Run.find": (run.find, {"which": 1}),
            "Run.restore": (run.restore, {"checkpoint": one, "state": self.state}),
            "Run.lease": (lambda **given: run.lease(**given).__enter__(), {"checkpoint": one, "holder": "me"}),
            "Run.pin": (run.pin, {"checkpoint": one, "reason": "good"}),
            "Run.unpin": (run.unpin, {"checkpoint": one}),
            "Run.record_evaluation": (run.record_evaluation, {"checkpoint": one, "suite": "s", "metrics": {"a": 1.0}}),
            "export_checkpoint": (
                ckpt_tasks.export_checkpoint,
                {"store": store, "checkpoint": one, "out": self.new},
            ),
            "plan_sync": (ckpt_tasks.plan_sync, {"source": run, "target": target}),
            "run_sync": (ckpt_tasks.run_sync, {"source": run, "target": target, "plan": None}),
            "Location": (lambda **given: Location(**given).open(), {"url": str(self.place / "free")}),
            "Location.resolve": (Location(str(self.place)).resolve, {"run_key": None}),
            "Listener": (Listener, {}),
            "LookupTable": (ckpt_tasks.LookupTable, {"dim": 4}),
            "ReplayBuffer": (ckpt_tasks.ReplayBuffer, {"capacity": 4, "action": torch.int64}),
            "Gradients": (lambda **given: Gradients(**given).state_dict(), {"module": model}),
            "Gradients.load_state_dict": (Gradients(model).load_state_dict, {"state": {}}),
            "ResumableLoader": (
                lambda **given: next(iter(ResumableLoader(**given)), None),
                {"dataset": [1], "batch_size": 1},
            ),
            "ResumableLoader.epochs": (lambda **given: next(self.loader.epochs(**given), None), {"count": 2}),
            "ResumableLoader.skip_batches": (self.loader.skip_batches, {"count": 1}),
            "ResumableLoader.load_state_dict": (self.loader.load_state_dict, {"state_dict": self.loader.state_dict()}),
            "ResumableSampler": (lambda **given: next(iter(ResumableSampler(**given))), {"size": 9, "batch_size": 3}),
            "ShuffleBuffer": (lambda **given: next(iter(ShuffleBuffer(**given))), {"stream": [1], "size": 2}),
            "sample_generator": (sample_generator, {"index": 1, "seed": 1, "epoch": 1}),
        }  # fmt: skip


_ELSEWHERE = {  # without arguments, values that are only read, and what other tests give hostile arguments
    "AttemptHooks", "Checkpoint", "CheckpointStore", "RestoreReport", "errors", "resumable", "resumable_task",
    "Checkpointer.acquire",
    "Checkpointer.checkpoints", "Checkpointer.close", "Checkpointer.wait", "Run.checkpoints", "Run.curve",
    "Run.evaluations", "Run.head", "Run.notes", "Gradients.state_dict",
    "ResumableLoader.end_epoch", "ResumableLoader.state_dict", "Location.open",
}  # fmt: skip
_OF_USERS = {
    ("ShuffleBuffer", "stream"),
    ("ResumableLoader", "dataset"),
    ("ResumableLoader", "collate_fn"),
}  # they raise what they raise


@pytest.fixture(scope="module")
def world(fast_dir: Path) -> Iterator[World]:
    made = World(fast_dir)
    (fast_dir / "here").mkdir()
    with chdir(fast_dir / "here"):  # some wrong values are names of files
        yield made
    with suppress(CkptError):
        made.held.close()


def public_callables() -> set[str]:
    """Return every public callable: exported ones, and public methods of the exported classes and of Run."""
    classes = {name: getattr(ckpt_tasks, name) for name in ckpt_tasks.__all__} | {"Run": Run}
    names = {*ckpt_tasks.__all__}
    for owner in ("Checkpointer", "Run", "Location", "Gradients", "ResumableLoader"):
        methods = inspect.getmembers(classes[owner], inspect.isfunction)
        names |= {f"{owner}.{name}" for name, _ in methods if not name.startswith("_")}
    return names


def test_every_public_callable_is_tried(world: World) -> None:
    """A public callable is in the table of calls, or among those that take no argument."""
    assert world.calls.keys() - {"Location.open"} == public_callables() - _ELSEWHERE


@pytest.mark.parametrize("name", sorted(public_callables() - _ELSEWHERE))
def test_a_wrong_argument_is_an_error_of_ours(world: World, name: str) -> None:
    """P50: each parameter is given each wrong value: the call works, or raises a CkptError, within seconds."""
    call, needed = world.calls[name]
    lazy = {"Run.lease": world.run.lease, "ResumableLoader.epochs": world.loader.epochs}
    target: Any = lazy.get(name) or (
        getattr(ckpt_tasks, name) if inspect.isfunction(call) and "." not in name else call
    )
    kinds = inspect.signature(target).parameters.items()
    parameters = {key for key, one in kinds if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    for parameter in sorted(parameters | needed.keys()):
        if (name, parameter) in _OF_USERS:
            continue
        for value in WRONG:
            given: Mapping[str, Any] = {
                key: made() if isinstance(made, (FunctionType, MethodType, partial)) else made
                for key, made in needed.items()
            }
            signal.alarm(60)
            try:
                call(**{**given, parameter: value})
            except CkptError:
                continue
            except Exception as error:
                raise AssertionError(f"{name}({parameter}={value!r:.60}) raises {error!r:.200}") from error
            finally:
                signal.alarm(0)


def test_numbers_of_numpy_and_torch_are_numbers(world: World) -> None:
    """What NumPy and torch call a number, a flag or a step is taken as one."""
    with world.begun("numbers") as ckpt:
        numbers: dict[str, Any] = {"metrics": {"loss": torch.tensor(1.0)}, "epoch": np.int32(1)}
        checkpoint = ckpt.save(np.int64(7), world.state, **numbers)  # type: ignore[arg-type]
        assert (checkpoint.step, checkpoint.epochs) == (7, 1)
        ckpt.pin(np.int64(7))  # type: ignore[arg-type]
        assert ckpt.prune(dry_run=np.bool_(True))  # type: ignore[arg-type]
        scores = {"a": np.float32(0.5), "b": torch.tensor(2)}
        assert open_run(str(world.place / "numbers")).record_evaluation(checkpoint, "suite", scores)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [("watch", "--every", "nan"), ("watch", "--every", "inf"), ("report", "--out", "")])
def test_a_wrong_option_is_an_error_of_ours(world: World, options: tuple[str, ...]) -> None:
    """P50: a number of seconds that is none, and a file without a name, are said to be so."""
    answer = ckpt(options[0], world.place / "free", *options[1:])
    assert answer.status == 1
    assert answer.err.startswith("error: ")
