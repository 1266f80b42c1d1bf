"""How a restored Lightning trainer sets up its data: again, at the restored positions, as at the run's last setup."""

from __future__ import annotations

import logging
from typing import Any

from lightning import Trainer

from ckpt_tasks.state.data.loader import ResumableLoader

_log = logging.getLogger("ckpt_tasks")


def set_up_again(trainer: Trainer) -> None:
    """Let a restored trainer set up its data again, if some code had set it up before the restore.

    `estimated_stepping_batches` in configure_optimizers begins the first epoch's batches, and Lightning sets loaders to
    a restored position only when it sets the data up.
    """
    if (fetcher := trainer.fit_loop._data_fetcher) is not None:
        fetcher.teardown()
        trainer.fit_loop._combined_loader = None


def place_loaders(trainer: Trainer) -> None:
    """Let the next setup of the data restore the positions of ResumableLoaders, of a run that has ended too.

    Lightning takes a run whose last epoch is complete for one that begins, and so its loaders would begin again.
    """
    loop: Any = trainer.fit_loop
    if loop.restarting:
        return

    def place() -> None:
        del loop._load_combined_loader_states
        stateful = [one for one in loop._combined_loader.flattened if hasattr(one, "load_state_dict")]
        for loader, state in zip(stateful, loop._combined_loader_states_to_load, strict=False):
            if isinstance(loader, ResumableLoader):
                loader.load_state_dict(state)
            elif not loop.done:
                _log.warning(
                    "The run had ended, and trains on: %s may repeat the order of the first epochs. A ResumableLoader "
                    "goes on with the next epoch's",
                    type(loader).__name__,
                )

    loop._load_combined_loader_states = place


def set_up_as_in(trainer: Trainer) -> None:
    """Let a restored trainer ask for its loaders as in the epoch in which the run has asked for them last.

    With `reload_dataloaders_every_n_epochs`, Lightning asks every n epochs, and would count them from the restored one.
    """
    every = getattr(trainer, "reload_dataloaders_every_n_epochs")  # noqa: B009 (Lightning does not declare it)
    progress = trainer.fit_loop.epoch_progress.current
    epoch = progress.completed
    if every and epoch % every:
        progress.completed -= epoch % every
        try:
            trainer.fit_loop.setup_data()
        finally:
            progress.completed = epoch
