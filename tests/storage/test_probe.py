"""A store is tried before a run is made in it, and whatever lies is found out."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_tasks.errors import ConfigError, ObjectExistsError, StoreError
from ckpt_tasks.format.keys import FORMAT_NAME
from ckpt_tasks.ledger.history import History
from ckpt_tasks.storage.objects import ObjectStore
from ckpt_tasks.storage.port import WrappedStore
from ckpt_tasks.storage.probe import prove


class Liar(WrappedStore):
    """A server that keeps its word in everything but what a test says."""

    where = "http://liar"

    @property
    def endpoint(self) -> str | None:
        return self.where


class Overwrites(Liar):
    def put_if_absent(self, name: str, body: bytes) -> None:
        self.inner.replace(name, body)


class RefusesAndOverwrites(Liar):
    def put_if_absent(self, name: str, body: bytes) -> None:
        try:
            self.inner.put_if_absent(name, body)
        except ObjectExistsError:
            self.inner.replace(name, body)
            raise


class LooksThenWrites(Liar):
    """Two writers that look at once both see nothing."""

    def put_if_absent(self, name: str, body: bytes) -> None:
        if "race" in name:
            self.inner.replace(name, body)
        else:
            self.inner.put_if_absent(name, body)


class ListsLate(Liar):
    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        return self.inner.names(prefix, limit)[:-1]


class ListsInNoOrder(Liar):
    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        return self.inner.names(prefix)[::-1][:limit]


class IgnoresRanges(Liar):
    def read(self, name: str, begin: int, into: memoryview) -> None:
        self.inner.read(name, 0, into)


@pytest.fixture
def good() -> ObjectStore:
    return ObjectStore(f"memory://probe/{secrets.token_hex(8)}")


def written(store: ObjectStore) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.get(FORMAT_NAME, 1 << 20))
    return found


def test_a_good_store_is_fit_and_left_clean(good: ObjectStore) -> None:
    """What is tried is removed again, and what was seen is said."""
    assert prove(good, single_writer=False) == {
        "put_if_absent": True,
        "read_after_write": True,
        "ordered_listing": True,
    }
    assert good.names("") == []


@pytest.mark.parametrize("lie", [Overwrites, RefusesAndOverwrites, LooksThenWrites])
def test_a_store_that_lets_a_second_writer_win_is_refused(good: ObjectStore, lie: Callable[..., Liar]) -> None:
    """P35: a condition that is accepted and ignored is found out, and nothing of a run is written."""
    with pytest.raises(ConfigError, match="second writer") as caught:
        History(lie(good)).create("run")
    assert "single_writer=True" in str(caught.value)
    assert good.names("") == []


@pytest.mark.parametrize("lie", [ListsLate, ListsInNoOrder, IgnoresRanges])
@pytest.mark.parametrize("single_writer", [True, False])
def test_a_store_that_does_not_show_what_it_has_is_refused(
    good: ObjectStore, lie: Callable[..., Liar], single_writer: bool
) -> None:
    """P54: without reads and ordered listings that see what was written there is no newest entry, for no writer."""
    with pytest.raises(ConfigError, match="does not show"):
        History(lie(good)).create("run", single_writer=single_writer)
    assert good.names("") == []


def test_a_single_writer_may_use_any_store_and_it_is_recorded(good: ObjectStore) -> None:
    """Who says that nobody else writes gets a run; later processes read so in format.json, and look first."""
    History(Overwrites(good)).create("run", single_writer=True)
    assert written(good)["single_writer"] is True
    assert written(good)["proved"]["put_if_absent"] is False
    later = ObjectStore(good.url)
    assert History(later).check("run") == "run"
    later.put_if_absent("a", b"1")
    with pytest.raises(ObjectExistsError):
        later.put_if_absent("a", b"2")


def test_another_endpoint_is_tried_anew(good: ObjectStore) -> None:
    """A directory that is reached through another server is tried there once, and refused where that one lies."""
    first = Liar(good)
    History(first).create("run")
    before = written(good)
    History(first).create("run")
    assert written(good) == before
    moved = Liar(good)
    moved.where = "http://moved"
    History(moved).create("run")
    assert written(good) == {**before, "endpoint": "http://moved", "digest": written(good)["digest"]}
    assert History(moved).check("run") == "run"
    lying = Overwrites(good)
    lying.where = "http://elsewhere"
    with pytest.raises(ConfigError):
        History(lying).create("run")
    assert written(good)["endpoint"] == "http://moved"


def test_what_cannot_be_removed_stays_and_is_nobodys(good: ObjectStore) -> None:
    """A store that takes no deletes can be tried all the same."""

    class Keeps(Liar):
        def delete(self, name: str) -> None:
            raise StoreError("not allowed", key=name)

    prove(Keeps(good), single_writer=False)
    assert all(name.startswith("probe/") for name in good.names(""))
    assert History(good).head().entry is None
