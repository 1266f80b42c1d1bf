"""The stores of `ckpt_tasks.testing`: one keeps the contract of every store, the other breaks it as it was told."""

from __future__ import annotations

import pytest

from ckpt_tasks.errors import ObjectExistsError
from ckpt_tasks.storage.port import Store
from ckpt_tasks.testing import Fate, FaultyStore, InjectedError, MemoryStore, located
from tests.storage.conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    """A store in memory keeps the contract of every store, also behind a FaultyStore without rules."""

    @pytest.fixture(params=["alone", "faulty"])
    def store(self, request: pytest.FixtureRequest) -> Store:
        made = MemoryStore()
        return made if request.param == "alone" else FaultyStore(made)

    def again(self, store: Store) -> Store:
        return store

    def stored(self, store: Store, name: str) -> bytes | None:
        inner = store.inner if isinstance(store, FaultyStore) else store
        assert isinstance(inner, MemoryStore)
        return inner.objects.get(name)


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
    try:
        store.put("a/b", [b"bo", b"dy"]) if verb == "put" else getattr(store, verb)("a/b", b"body")
        told: Exception | None = None
    except (InjectedError, ObjectExistsError) as caught:
        told = caught
    assert type(told) is (error or type(None))
    assert getattr(told, "refused", False) is (fate == "refused")
    assert inner.objects.get("a/b") == now
    store.deliver()
    assert inner.objects.get("a/b") == later
    assert rule.hits == len(store.log) == 1


def test_what_comes_twice_writes_over_what_came_between() -> None:
    """A replace that is repeated brings the old bytes back; a put_if_absent does not."""
    store = FaultyStore(MemoryStore())
    store.on("twice", verb="replace put_if_absent", times=2)
    store.replace("beat", b"old")
    store.put_if_absent("once", b"old")
    store.replace("beat", b"new")
    store.delete("once")
    store.put_if_absent("once", b"new")
    store.deliver()
    assert (store.get("beat", 9), store.get("once", 9)) == (b"old", b"new")


def test_a_rule_strikes_what_it_means() -> None:
    """Verb, name, skip and times choose; the first rule that matches strikes; reads fail, or turn one bit."""
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
    part = bytearray(2)
    store.read("x/1", 1, memoryview(part))
    assert part == b"13"
    assert (refused.hits, refused.reached.is_set()) == (2, True)
    store.off()
    assert store.get("x/1", 9) == b"0123"


def test_what_fails_for_the_moment_is_made_again_where_it_is_asked_for() -> None:
    """`located` with a deadline is a store with a server: what is refused is repeated, a lost answer looked for."""
    faulty = FaultyStore(MemoryStore())
    store = located(faulty, deadline_s=30).open()
    for fate in ("refused", "unanswered", "exists"):
        faulty.on(fate, verb="put", times=1)
        store.put(f"a/{fate}", [b"body"])
        faulty.off()
    assert store.names("a/") == ["a/exists", "a/refused", "a/unanswered"]
    faulty.on("refused", verb="get")
    with pytest.raises(InjectedError):
        located(faulty).open().get("a/exists", 9)
