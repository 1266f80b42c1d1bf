"""A store is tried before a run is made in it, and whatever lies is found out."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.keys import FORMAT_NAME
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage.objects import ObjectStore
from ckpt_tasks.storage.probe import prove
from tests.support.liars import (
    IgnoresRanges,
    Liar,
    ListsInNoOrder,
    ListsLate,
    LooksThenWrites,
    Overwrites,
    RefusesAndOverwrites,
)


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
