"""Keras 3 on torch, JAX or TensorFlow: a callback of `fit` that saves, and resumes by itself.

The callback saves step k when the next batch begins: the checkpoint then includes what the end of an epoch does
(validation, callbacks that change the learning rate, the seeds of its loaders). A resume restores random streams and
the sums of an epoch's metrics at the same point, since Keras draws numbers and resets metrics earlier.

`fit` counts the batches of an epoch from 0. So in a resumed epoch the loader repeats the next batch once for each
trained batch, and the step function skips these copies: they cost no time, and other callbacks see the right numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, repeat
from types import TracebackType
from typing import Any, Self

import keras
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.integrations.attached import numbers, with_extra
from ckpt_tasks.integrations.keras_state import BACKEND, Variables, named, state_of
from ckpt_tasks.run.ledger.config import CheckpointConfig, config_of
from ckpt_tasks.state.data.loader import ResumableLoader
from ckpt_tasks.state.data.sampler import ResumableSampler, SampleId
from ckpt_tasks.state.kinds.started import Started
from ckpt_tasks.state.tensors.random_streams import current_streams, set_streams


class CkptCallback(keras.callbacks.Callback):
    """Save the steps of `Model.fit` into a run, and resume there when `fit` is called again.

    ::

        with CkptCallback("runs/first", ResumableLoader(dataset, batch_size=32, shuffle=True)) as saving:
            model.fit(saving.data, epochs=3, shuffle=False, callbacks=[saving, *others])

    `checkpoint` is a directory, a URL or a CheckpointConfig. `data` is the loader of the training data, on every
    backend. `state` names objects of your own that are saved too. List this callback first: what other callbacks do
    when a batch begins belongs to that batch. A step is a batch; what `fit` logs becomes the step's metrics. Within the
    block SIGTERM and Ctrl-C end the training after the current step, with a commit, and an error in `fit` releases the
    run; Keras informs callbacks of neither signals nor errors.

    Raises ConfigError if a resumed epoch would begin within one execution of `steps_per_execution` batches, and what
    Checkpointer's `restore` and `step` raise.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | CheckpointConfig,
        data: ResumableLoader,
        *,
        state: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        if not isinstance(data.sampler, ResumableSampler):
            raise ConfigError(
                "a stream gives Keras no batches by number", key="data", hint="Take a data set by number."
            )
        self.config = config_of(checkpoint)
        self.ckpt: Checkpointer | None = None
        self._loader = data
        self._position = _Position(data)
        self._batches = _Batches(data.sampler)
        self._sampler = data.sampler
        self._extra = state
        self._state: dict[str, Any] = {}
        self._logs: dict[str, Any] = {}
        self._step = 0
        self._train_function: Any = None
        self._streams: Any = None  # Set by a restore, cleared by the first batch that is trained.
        self._in_block = False

    def __enter__(self) -> Self:
        self._in_block = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)
        self._in_block = False

    @property
    def data(self) -> Any:
        """The training data for `fit`: whole epochs, of which a restore skips the trained part."""
        if BACKEND != "tensorflow":
            return self._torch_loader()
        from ckpt_tasks.integrations.tensorflow import dataset_of

        return dataset_of(self._torch_loader())

    def _torch_loader(self) -> DataLoader[Any]:
        like: Any = self._loader._loader
        names = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
        options = {name: getattr(like, name) for name in (*names, "prefetch_factor", "persistent_workers")}
        # Each iterator draws a seed for its workers, and Keras makes more iterators than epochs: draw from our own.
        options["generator"] = torch.Generator()
        return DataLoader(_Once(like.dataset), batch_sampler=self._batches, **options)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Restore the run: by now the model and its optimizer have their variables, and no step is trained yet."""
        self._end()  # An error may have ended the last `fit`.
        self.ckpt = Checkpointer(self.config)
        model = self.model
        if BACKEND == "tensorflow":  # With TensorFlow, Keras makes the variables of metrics in the first step.
            model._symbolic_build(data_batch=next(iter(self._torch_loader())))
        metrics = Variables(lambda: named(model.metrics_variables), model)
        self._state = with_extra({**state_of(model), "metrics": metrics, "data": self._position}, self._extra)
        self._step = self.ckpt.restore(self._state)
        self._begin_epoch()
        if self.ckpt.last_restore is not None:
            self._pass_over()
        if self._in_block:
            self.ckpt.__enter__()

    def _pass_over(self) -> None:
        """Skip the trained batches of an epoch, to continue in its middle."""
        sampler, model = self._loader.sampler, self.model
        self._batches.passed, together = self._done, model.steps_per_execution
        if self._done % together:
            raise ConfigError(
                f"{self._done} batches of epoch {sampler.epoch} are trained, and `fit` trains {together} at a time",
                key="steps_per_execution",
                hint="Compile the model with steps_per_execution=1, or with the value of before.",
            )
        model._initial_epoch = sampler.epoch
        self._streams, self._train_function = current_streams(), model.train_function
        model.train_function = _SKIP[BACKEND](together)

    def _begin_epoch(self) -> None:
        self._done = len(self._batches) - len(self._sampler)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Clear Keras's initial epoch: the next epoch must not begin with it, too."""
        self.model._initial_epoch = None

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the previous step, which is complete; after a restore, restore again what Keras has changed."""
        assert self.ckpt is not None
        if self._streams is None:
            if self._step > self.ckpt.position:
                self.ckpt.step(self._step, self._state, metrics=self._logs, epoch=self._loader.sampler.epoch)
            return
        if batch == 0:
            self._state["metrics"].assign_again()
        if batch == self._done:
            set_streams(self._streams)
            self.model.train_function = self._train_function
            self._streams = self._train_function = None
            self._batches.passed = 0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Count the batches of an execution, and move the position in the data."""
        if self._streams is not None:
            return
        trained = min(batch + 1, len(self._batches)) - self._done
        self._step, self._done, self._logs = self._step + trained, self._done + trained, numbers(logs or {})
        for _ in range(trained):
            self._loader.sampler.advance()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Add what validation has logged to the metrics of the last step."""
        self._logs |= numbers(logs or {})
        self._begin_epoch()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Save the last step of `fit`."""
        assert self.ckpt is not None
        if self._step > self.ckpt.position:
            self.ckpt.save(self._step, self._state, metrics=self._logs, epoch=self._loader.sampler.epoch)
        self._end()

    def _end(self, error: BaseException | None = None) -> None:
        ckpt, self.ckpt = self.ckpt, None
        if self._train_function is not None:
            self.model.train_function = self._train_function
            self.model._initial_epoch = None
        self._state, self._streams, self._train_function, self._batches.passed = {}, None, None, 0
        if ckpt is not None:
            ckpt.__exit__(type(error) if error else None, error, None)


def _skip_next(together: int) -> Callable[[Any], Any]:
    """Return a step function that skips its batches."""

    def skip(batches: Any) -> Any:
        for _ in range(together):
            next(batches)
        return {}

    return skip


# Keras's step functions get an iterator (on JAX also the state); on torch they get the batches.
_SKIP: Mapping[str, Callable[[int], Callable[..., Any]]] = {
    "torch": lambda together: lambda batches: {},
    "tensorflow": _skip_next,
    "jax": lambda together: lambda state, batches: (_skip_next(together)(batches), state),
}


class _Position(Started):
    """The position of a loader; Keras iterates over a copy of the loader, so the loader itself skips no batches."""

    effects = ResumableLoader.effects

    def __init__(self, loader: ResumableLoader):
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state_dict)


class _Batches(Sampler[list[int]]):
    """The batches of an epoch from the position on, preceded by `passed` copies of the first batch."""

    def __init__(self, sampler: ResumableSampler):
        self._sampler = sampler
        self.passed = 0

    def __len__(self) -> int:
        return self._sampler.epoch_batches

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self._sampler)
        first = next(batches)
        return chain(repeat(first, self.passed), [first], batches)


class _Once(Dataset[Any]):
    """Makes a batch once, even if it is requested several times in succession."""

    def __init__(self, batches: Any):
        self._batches = batches
        self._last: tuple[Any, Any] = None, None

    def __len__(self) -> int:
        return len(self._batches)

    def __getitems__(self, samples: list[SampleId]) -> Any:
        wanted = samples[0].epoch, samples
        if self._last[0] != wanted:
            self._last = wanted, self._batches.__getitems__(samples)
        return self._last[1]
