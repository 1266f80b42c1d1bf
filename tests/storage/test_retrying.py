"""The wrapper that makes requests again: what it repeats and what it must not, how long, and at which distance."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tenacity
from botocore.exceptions import ClientError

from ckpt_tasks.errors import CkptError, IntegrityError, ObjectExistsError, ObjectNotFoundError, StoreError
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store, WrappedStore
from ckpt_tasks.storage.retrying import RetryingStore, wait_s
from ckpt_tasks.storage.s3 import send_part
from ckpt_tasks.system import System
from tests.support.children import Child
from tests.support.systems import Impatient, running_on

NAME = "checkpoint_000000000005/e000001-0123456789abcdef/model.safetensors"


def failing(*, transient: bool = True, refused: bool = False, key: str = NAME) -> StoreError:
    error = StoreError("on purpose", key=key)
    error.transient, error.refused = transient, refused
    return error


class Flaky(LocalStore):
    """A store whose requests fail with what stands in `faults`, one after the other; `after`: once they are done."""

    def __init__(self, root: Path):
        super().__init__(root)
        self.faults: list[Exception] = []
        self.after = False
        self.asked: list[str] = []


def _flaky(verb: str) -> Callable[..., Any]:
    def request(store: Flaky, *arguments: Any) -> Any:
        store.asked.append(verb)
        fault = store.faults.pop(0) if store.faults else None
        found = getattr(LocalStore, verb)(store, *arguments) if fault is None or store.after else None
        if fault is not None:
            raise fault
        return found

    return request


for _verb in ("put", "put_if_absent", "replace", "get", "read", "size", "names", "delete", "drop_unfinished"):
    setattr(Flaky, _verb, _flaky(_verb))


@pytest.fixture
def flaky(tmp_path: Path) -> Flaky:
    return Flaky(tmp_path / "run")


@pytest.fixture(autouse=True)
def _short_waits() -> Iterator[None]:
    with running_on(Impatient(20)):
        yield


REQUESTS: dict[str, Callable[[RetryingStore], object]] = {
    "put": lambda store: store.put(NAME, [b"abc"]),
    "replace": lambda store: store.replace("beat", b"x"),
    "get": lambda store: store.get("there", 10),
    "read": lambda store: store.read("there", 0, memoryview(bytearray(2))),
    "size": lambda store: store.size("there"),
    "names": lambda store: store.names(""),
    "delete": lambda store: store.delete("there"),
    "drop_unfinished": lambda store: store.drop_unfinished(lambda name: True),
}


@pytest.mark.parametrize("verb", REQUESTS)
def test_what_failed_for_the_moment_is_made_again(flaky: Flaky, verb: str) -> None:
    """P28: three failures, also after the deed, and then it is done; what is not for the moment is raised at once."""
    LocalStore(flaky.url).put("there", [b"0123"])
    store = RetryingStore(flaky)
    for after in (False, True):
        flaky.asked, flaky.faults, flaky.after = [], [failing() for _ in range(3)], after
        if verb == "put":
            LocalStore(flaky.url).delete(NAME)
        REQUESTS[verb](store)
        looks = ["put", "size", "size", "size"] + ([] if after else ["put"])  # what failed twice is the look
        assert flaky.asked == (looks if verb == "put" else [verb] * 4)
    flaky.asked, flaky.faults, flaky.after = [], [failing(transient=False)], False
    with pytest.raises(StoreError, match="on purpose"):
        REQUESTS[verb](store)
    assert flaky.asked == [verb]


class Reluctant(WrappedStore):
    """Keep some objects for a reason of each, as often as there is one."""

    def __init__(self, inner: Store, reasons: dict[str, list[CkptError]]):
        super().__init__(inner)
        self.asked: list[list[str]] = []
        self._reasons = reasons

    def delete_all(self, names: Sequence[str]) -> dict[str, CkptError]:
        self.asked.append([*names])
        kept = {name: self._reasons[name].pop() for name in names if self._reasons.get(name)}
        return kept | super().delete_all([name for name in names if name not in kept])


def test_of_several_deletes_those_are_made_again_that_may_succeed(tmp_path: Path) -> None:
    """P64: a key that fails for the moment is asked for again, alone; a refused one is returned."""
    inner = LocalStore(tmp_path / "run")
    for name in ("a", "b", "c"):
        inner.put(name, [b"x"])
    denied = failing(transient=False)
    store = Reluctant(inner, {"b": [denied], "c": [failing(), failing()]})
    assert RetryingStore(store).delete_all(["a", "b", "c"]) == {"b": denied}
    assert store.asked == [["a", "b", "c"], ["c"], ["c"]]
    assert inner.names("") == ["b"]
    store = Reluctant(inner, {"b": [denied], "c": [failing() for _ in range(100)]})
    refused = RetryingStore(store, deadline_s=0.3).delete_all(["b", "c"])
    assert refused["b"] is denied
    assert isinstance(refused["c"], StoreError)
    assert refused["c"].transient


def test_a_put_if_absent_is_made_again_only_where_it_was_refused(flaky: Flaky) -> None:
    """P32: after silence nobody knows whether it was done: the next word is the caller's, who looks first."""
    store = RetryingStore(flaky)
    flaky.faults = [failing(refused=True), failing(refused=True)]
    store.put_if_absent("ledger/1", b"mine")
    assert flaky.asked == ["put_if_absent"] * 3
    for after in (False, True):
        flaky.asked, flaky.faults, flaky.after = [], [failing()], after
        with pytest.raises(StoreError, match="on purpose"):
            store.put_if_absent(f"ledger/{after}", b"mine")
        assert flaky.asked == ["put_if_absent"]


@pytest.mark.parametrize("error", [ObjectNotFoundError("no"), ObjectExistsError("yes"), IntegrityError("short")])
def test_an_answer_is_an_answer(flaky: Flaky, error: Exception) -> None:
    """A missing, a taken or a damaged object is not asked for twice."""
    flaky.faults = [error]
    with pytest.raises(type(error)):
        RetryingStore(flaky).get("there", 10)
    assert flaky.asked == ["get"]


# ── a put whose answer was lost ──────────────────────────────────────────────────────────────────────────────────


def test_a_late_arrival_is_found_by_the_second_put(flaky: Flaky) -> None:
    """P32: not there when looked for, there when sent again: "exists" is said of our own object, and it is done."""
    late = LocalStore(flaky.url)

    class Late(Flaky):
        def size(self, name: str) -> int:
            try:
                return super().size(name)
            finally:
                if self.asked.count("size") == 1:
                    late.put(name, [b"abc"])

    store = Late(Path(flaky.url))
    store.faults = [failing()]
    RetryingStore(store).put(NAME, [b"abc"])
    assert store.asked == ["put", "size", "put", "size"]


@pytest.mark.parametrize("lies_there", [b"abX", b"ab", b"abcd", b""])
def test_a_taken_name_is_ours_only_with_our_bytes(flaky: Flaky, lies_there: bytes) -> None:
    """P31: told "exists" at the first try, the bytes decide; a store or proxy that did it twice is forgiven."""
    LocalStore(flaky.url).put(NAME, [lies_there])
    with pytest.raises(ObjectExistsError):
        RetryingStore(flaky).put(NAME, [b"a", b"bc"])
    assert LocalStore(flaky.url).get(NAME, 10) == lies_there
    LocalStore(flaky.url).put("other", [b"abc"])
    RetryingStore(flaky).put("other", [b"a", b"bc"])


# ── how long, and at which distance ──────────────────────────────────────────────────────────────────────────────


def test_the_deadline_ends_it(flaky: Flaky, caplog: pytest.LogCaptureFixture) -> None:
    """P43: after the deadline the last error is raised as it is; from the third try on a warning says what happens."""
    flaky.faults = [failing() for _ in range(10_000)]
    with caplog.at_level(logging.WARNING, logger="ckpt_tasks"), pytest.raises(StoreError, match="on purpose"):
        RetryingStore(flaky, deadline_s=1.0).size("there")
    assert 4 < len(flaky.asked) < 100
    assert len(caplog.records) == 1
    assert "trying again for" in caplog.text
    assert flaky.url in caplog.text


def test_waits_grow_and_are_spread() -> None:
    """P43: sixteen that were refused together do not come back together, and a long storm is not fed."""
    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    for number, most_s in ((1, 0.2), (2, 0.4), (3, 0.8), (6, 6.4), (7, 10), (30, 10), (500, 10)):
        state.attempt_number = number
        with running_on(System()):
            waits = [wait_s(state) for _ in range(300)]
        assert 0 <= min(waits) < most_s / 4
        assert most_s * 3 / 4 < max(waits) <= most_s
        assert len({round(wait, 9) for wait in waits}) > 250


def _draw(arguments: Sequence[str]) -> None:
    flaky = Flaky(Path(arguments[0]))
    flaky.faults = [failing() for _ in range(3)]
    before = random.getstate()
    RetryingStore(flaky).names("")
    sys.stdout.write(f"\n{len(flaky.asked)} {random.getstate() == before}")


def test_trying_again_leaves_the_trainings_random_numbers_alone(tmp_path: Path) -> None:
    """P11: waits are thrown with dice of our own: a store that fails must not change what training draws."""
    with Child(_draw, [str(tmp_path / "run")], tmp_path / "said") as child:  # here, threads of other tests may draw
        assert child.wait() == 0
    assert child.said().endswith("\n4 True")


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Part:
    def __init__(self, *faults: Exception):
        self.faults = list(faults)
        self.tries = 0

    async def __call__(self) -> dict[str, Any]:
        self.tries += 1
        if self.faults:
            raise self.faults.pop(0)
        return {"ETag": "etag"}


def answer(code: str, status: int) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "UploadPart")


def test_a_part_has_five_tries() -> None:
    """P30: a part of an upload is sent again alone; where that is in vain the upload fails at once."""
    part = Part(*[answer("SlowDown", 503)] * 4)
    assert asyncio.run(send_part(NAME, part)) == {"ETag": "etag"}
    assert part.tries == 5
    for faults, tries in (
        ([answer("SlowDown", 503)] * 9, 5),
        ([answer("AccessDenied", 403)], 1),
        ([answer("ExpiredToken", 400)], 1),
        ([ValueError("a mistake")], 1),
    ):
        part = Part(*faults)
        with pytest.raises(StoreError):
            asyncio.run(send_part(NAME, part))
        assert part.tries == tries
