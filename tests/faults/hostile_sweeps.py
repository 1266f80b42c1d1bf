"""Every place of a manifest, an entry and an index, changed in every way of a list, and read; and files that change."""

from __future__ import annotations

import copy
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_tasks.copying.export import export_checkpoint
from ckpt_tasks.errors import CkptError
from ckpt_tasks.reading.opening import open_checkpoint
from ckpt_tasks.reading.reading import open_run
from tests.faults.hostile import NEWEST, UNTOUCHED, Hostile, Model, Raw, draw, fingerprint, state_of

Path_ = tuple[str | int, ...]
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, Raw("9" * 4300), 0.5, 1e300, -0.0, Raw("NaN"), Raw("1e999"), "", "x", "nan",
    "9" * 50, "\ud800", "../x", [], [[]], [1, 2], ["x"], {}, {"x": 1}, {"~dict": [[1, 2]]}, {"~tensor": "model/table"},
    {"~tuple": []}, {"~bytes": "AA=="}, {"~float": "nan"},
)  # fmt: skip


def places(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Yield the way to every value in a JSON document."""
    yield at
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*at, key))


def changed(body: Any, at: Path_, value: Any) -> Any:
    """Return a copy of a document with another value in one place; without the place for the value `places`."""
    body = copy.deepcopy(body)
    inside = body
    for key in at[:-1]:
        inside = inside[key]
    if value is places:
        del inside[at[-1]]
    else:
        inside[at[-1]] = value
    return body


def manifests(h: Hostile) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield what to call each change of the newest manifest, and how to make it."""
    body, entry = h.manifest(), h.entry()
    for at in [*places(body)][1:]:
        for value in (*VALUES, places):

            def make(at: Path_ = at, value: Any = value) -> None:
                h.put_entry(entry)
                h.put_manifest(changed(body, at, value))

            yield f"manifest {at} = {_word(value)}", make


def entries(h: Hostile) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the same for the newest ledger entry."""
    body = h.entry()
    for at in [*places(body)][1:]:
        for value in (*VALUES, places):
            yield f"entry {at} = {_word(value)}", partial(_put_entry, h, body, at, value)


def _put_entry(h: Hostile, body: Any, at: Path_, value: Any) -> None:
    h.put_entry(changed(body, at, value))


def indexes(h: Hostile) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the same for bytes and words of the index, which Arrow reads."""
    data, body, entry = h.index_path().read_bytes(), h.manifest(), h.entry()

    def put(new: bytes) -> None:
        h.put_entry(entry)
        h.put_manifest(body)
        h.put_index(new)

    for at in range(len(data)):
        for value in {0, 1, 0x7F, 0x80, 0xFF, data[at] ^ 1, (data[at] + 1) % 256} - {data[at]}:
            yield f"index byte {at} = {value}", partial(put, data[:at] + bytes([value]) + data[at + 1 :])
        if at % 4 == 0:
            for word in (-1, 2**31 - 1, -(2**31), 1 << 30, len(data)):
                new = data[:at] + struct.pack("<i", word) + data[at + 4 :]
                yield f"index word {at} = {word}", partial(put, new)


def met(h: Hostile, place: Path) -> dict[str, Any]:
    """Open the newest checkpoint; if that goes, do everything else with it that a reader does."""
    run = open_run(str(h.root))
    checkpoint = run.find("latest")
    opened = open_checkpoint(run.history.store, checkpoint)
    state = state_of(UNTOUCHED)
    try:
        run.restore(checkpoint, state, partial=False)
    except CkptError:
        assert fingerprint(state) == fingerprint(state_of(UNTOUCHED)), "the target has changed"
        raise
    draw(state)
    groups = [name for name in opened.groups if name != "rng"]
    export_checkpoint(
        run.history.store, checkpoint, place / "exported" / "x.safetensors", groups=groups, overwrite=True
    )
    return {"step": checkpoint.step}


SWEEPS = {"manifests": manifests, "entries": entries, "indexes": indexes}


def _word(value: Any) -> str:
    return "nothing" if value is places else repr(value)[:40]


# ── races ────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def disturbed(paths: list[Path], outside: Path, seed: int) -> Iterator[None]:
    """Let a thread cut files, let them grow, and put other things in their place, and put them right again."""
    good = {path: path.read_bytes() for path in paths}
    chance, over = random.Random(seed), threading.Event()

    def cut(path: Path) -> None:
        os.truncate(path, chance.randrange(max(1, len(good[path]))))

    def grow(path: Path) -> None:
        os.truncate(path, 1 << 40)

    def away(make: Callable[[Path], None]) -> Callable[[Path], None]:
        def put(path: Path) -> None:
            path.unlink()
            make(path)

        return put

    harms = (
        cut,
        grow,
        away(os.mkfifo),
        away(lambda path: path.symlink_to(outside / "canary")),
        away(Path.mkdir),
        Path.unlink,
    )

    def disturb() -> None:
        while not over.is_set():
            path = chance.choice(paths)
            with suppress(OSError):
                chance.choice(harms)(path)
            time.sleep(chance.uniform(0, 0.002))
            with suppress(OSError):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            path.write_bytes(good[path])

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def raced(h: Hostile, place: Path, seconds: float = 2.0) -> dict[str, Any]:
    """Read a checkpoint again and again while its files change; count how it went."""
    paths = [path for path in h.root.rglob("*") if path.is_file() and "heartbeat" not in path.parts]
    counts: dict[str, int] = {}
    until = time.monotonic() + seconds
    with disturbed(paths, h.outside, seed=len(paths)):
        while time.monotonic() < until:
            for what in (_restored, _opened):
                try:
                    what(h)
                    end = "well"
                except CkptError as error:
                    end = type(error).__name__
                counts[end] = counts.get(end, 0) + 1
    _restored(h)
    return counts


def _restored(h: Hostile) -> None:
    run = open_run(str(h.root))
    state: dict[str, Any] = {"model": Model(), "extra": {}}
    run.restore(run.find("latest"), state, partial=True)
    assert state["extra"]["step"] == NEWEST


def _opened(h: Hostile) -> None:
    run = open_run(str(h.root))
    for checkpoint in run.checkpoints():
        open_checkpoint(run.history.store, checkpoint)
