"""Tests of what commits need of a store: some stores accept the condition of a put and ignore it.

The tests look for faults of real stores: a second writer of a name wins, later or at the same time (eight writers); or
right after a write, a listing or a partial read is wrong.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from ckpt_tasks.errors import ConfigError, ObjectNotFoundError, StoreError
from ckpt_tasks.process import in_threads
from ckpt_tasks.storage.port import Store

_RACERS = 8
_ROUNDS = 5
_TRIES = 5
_HINT = (
    "Use another store, or set single_writer=True if you make sure yourself that one process at a time writes to this"
    " directory."
)


def prove(store: Store, *, single_writer: bool) -> dict[str, bool]:
    """Test a store with objects below `probe/`; delete them, and return the results by name.

    Raises ConfigError if a second writer wins (not tested if `single_writer`), or a written object is not visible at
    once.
    """
    place = f"probe/{secrets.token_hex(8)}"
    written: list[str] = []
    try:
        exclusive = single_writer or (_refuses_second(store, place, written) and _one_of_many(store, place, written))
        if not exclusive:
            raise ConfigError(f"{store.url} lets a second writer replace what the first one wrote", hint=_HINT)
        if not _shows(store, place, written):
            raise ConfigError(f"{store.url} does not show at once what was written", hint="Use another store.")
        return {"put_if_absent": not single_writer, "read_after_write": True, "ordered_listing": True}
    finally:
        with suppress(StoreError):  # A few bytes may remain: no run uses these names.
            store.delete_all(written)


def _refuses_second(store: Store, place: str, written: list[str]) -> bool:
    name = f"{place}/twice"
    written.append(name)
    failures = [_put(store, name, body) for body in (b"first", b"second")]
    return _keeps_word(store, name, {b"first": failures[0], b"second": failures[1]})


def _one_of_many(store: Store, place: str, written: list[str]) -> bool:
    bodies = [f"{racer}".encode() for racer in range(_RACERS)]
    for round_ in range(_ROUNDS):
        name = f"{place}/race-{round_}"
        written.append(name)
        failures = in_threads(partial(_put, store, name), bodies, _RACERS, "ckpt-probe")
        if not _keeps_word(store, name, dict(zip(bodies, failures, strict=True))):
            return False
    return True


def _shows(store: Store, place: str, written: list[str]) -> bool:
    names = [f"{place}/shown-{n}" for n in (2, 0, 1)]
    for name in names:
        written.append(name)
        store.put(name, [b"0123456789"])
    part = bytearray(3)
    store.read(names[0], 4, memoryview(part))
    listed = [name for name in store.names(f"{place}/") if "/shown-" in name]
    return (
        bytes(part) == b"456" and listed == sorted(names) and store.names(f"{place}/", limit=1) == sorted(written)[:1]
    )


def _put(store: Store, name: str, body: bytes) -> StoreError | None:
    """Return None if the store reported success, else its error. Retries are safe here: no run uses the name."""
    failure: StoreError | None = None
    for _ in range(_TRIES):
        try:
            store.put_if_absent(name, body)
        except StoreError as error:
            failure = error
        else:
            return None
        if not failure.transient:
            break
    return failure


def _keeps_word(store: Store, name: str, answers: Mapping[bytes, StoreError | None]) -> bool:
    """Return True if the object has the bytes of every writer whose write succeeded; lost answers prove nothing.

    Raises a writer's error if the object is missing.
    """
    try:
        there = store.get(name, 16)
    except ObjectNotFoundError as error:
        raise next((failure for failure in answers.values() if failure is not None), error) from None
    return all(body == there for body, failure in answers.items() if failure is None)
