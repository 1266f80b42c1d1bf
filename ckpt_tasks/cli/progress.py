"""Progress of long reads on a terminal, seen from the store: every verb that reads goes through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt_tasks.cli.output import Output, console
from ckpt_tasks.report.words import size, span
from ckpt_tasks.storage.wrapping import WrappedStore

if TYPE_CHECKING:
    from ckpt_tasks.storage.port import Store

__all__ = ["WatchedStore", "reading"]

_SHOWN_AFTER_S = 0.5  # what is done sooner needs no bar


class WatchedStore(WrappedStore):
    """A store that tells how many bytes were read from it."""

    def __init__(self, inner: Store, on_progress: Callable[[int], None]):
        super().__init__(inner)
        self._on_progress = on_progress

    def get(self, name: str, max_bytes: int) -> bytes:
        data = super().get(name, max_bytes)
        self._on_progress(len(data))
        return data

    def read(self, name: str, begin: int, into: memoryview) -> None:
        super().read(name, begin, into)
        self._on_progress(into.nbytes)


@contextmanager
def reading(out: Output, what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar with rate and time left while the block reads; give what is to be told of every read, in bytes.

    It appears after half a second, on stderr, where that is a terminal, and is gone at the end.
    """
    from rich.progress import BarColumn, Progress, TextColumn

    screen = console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", style="dim"),
        BarColumn(),
        TextColumn("{task.fields[work]}"),
        console=screen,
        transient=True,
        disable=out.as_json or not screen.is_terminal,
    )
    task = bar.add_task(what, total=total_bytes, work="")
    began, done = bar.get_time(), 0

    def on_progress(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        bar.update(task, completed=done, work=_work(done, total_bytes, bar.get_time() - began))
        if not bar.live.is_started and not bar.disable and bar.get_time() - began > _SHOWN_AFTER_S:
            bar.start()

    try:
        yield on_progress
    finally:
        bar.stop()


def _work(done: int, total_bytes: int, took_s: float) -> str:
    rate = done / max(took_s, 1e-9)
    left_s = max(total_bytes - done, 0) / max(rate, 1.0)
    return f"{size(done)} of {size(total_bytes)}, {size(rate)}/s, {span(round(left_s))} left"
