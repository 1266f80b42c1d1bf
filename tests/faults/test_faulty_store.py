"""The stores of `ckpt_tasks.testing`: one keeps the contract of every store, the other breaks it as it was told."""

from __future__ import annotations

import pytest

from ckpt_tasks.errors import ObjectExistsError
from ckpt_tasks.storage.port import Store
from ckpt_tasks.testing import Fate, FaultyStore, InjectedError, MemoryStore, located
from tests.storage.conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    """A store in memory keeps the contract of every store, behind a FaultyStore without rules."""

    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(MemoryStore())

    def again(self, store: Store) -> Store:
        return store

    def stored(self, store: Store, name: str) -> bytes | None:
        assert isinstance(store, FaultyStore)
        assert isinstance(store.inner, MemoryStore)
        return store.inner.objects.get(name)


# What is there when the request has ended, and once the late ones have arrived; and the error.
FATES: dict[Fate, tuple[bytes | None, bytes | None, type[Exception] | None]] = {
    "done": (b"body", b"body", None),
    "refused": (None, None, InjectedError),
    "unanswered": (b"body", b"body", InjectedError),
    "exists": (b"body", b"body", ObjectExistsError),
    "late": (None, b"body", InjectedError),
    "twice": (b"body", b"body", None),
    "torn": (b"bo", b"bo", InjectedError),
}


@pytest.mark.parametrize("verb", ["put", "put_if_absent", "replace"])
@pytest.mark.parametrize("fate", FATES)
def test_a_request_meets_its_fate(verb: str, fate: Fate) -> None:
    """What a fate does to the object, what its sender is told, and that only "refused" says that nothing is done."""
    now, later, error = FATES[fate]
    inner = MemoryStore()
    store = FaultyStore(inner)
    rule = store.on(fate, verb=verb, name="^a/b$")
    told: Exception | None = None
    try:
        store.put("a/b", [b"bo", b"dy"]) if verb == "put" else getattr(store, verb)("a/b", b"body")
    except (InjectedError, ObjectExistsError) as caught:
        told = caught
    assert type(told) is (error or type(None))
    assert getattr(told, "refused", False) is (fate == "refused")
    assert inner.objects.get("a/b") == now
    if fate == "twice" and verb == "replace":
        store.off()
        store.replace("a/b", b"newer")  # what comes twice writes over what came between
    store.deliver()
    assert inner.objects.get("a/b") == later
    assert rule.hits == 1


def test_a_rule_strikes_what_it_means() -> None:
    """Verb, name, skip and times choose; the first rule that matches strikes; reads fail, or turn one bit.

    `located` with a deadline is a store with a server: what is refused is asked for again.
    """
    store = FaultyStore(MemoryStore())
    for name in ("x/1", "x/2", "y/1"):
        store.put(name, [b"0123"])
    refused = store.on("refused", verb="get size", name="^x/", skip=1, times=2)
    store.on("flipped", verb="get read")
    told = []
    for name in ("x/1", "y/1", "x/1", "x/2", "x/1"):
        try:
            told.append(store.get(name, 9))
        except InjectedError:
            told.append(b"")
    assert told == [b"0133", b"0133", b"", b"", b"0133"]
    assert (refused.hits, refused.reached.is_set()) == (2, True)
    store.off()
    for fate in ("refused", "unanswered", "exists"):
        store.on(fate, verb="put", times=1)
        located(store, deadline_s=30).open().put(f"a/{fate}", [b"body"])
        store.off()
    assert store.names("a/") == ["a/exists", "a/refused", "a/unanswered"]
