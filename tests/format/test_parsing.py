"""Values out of JSON: each has the very type that is asked for, and its bounds."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from ckpt_tasks.format.parsing import MALFORMED, finite_json, moment_of, parse_json, typed
from ckpt_tasks.format.records import Lease
from tests.support.interpreters import python


@pytest.mark.parametrize("text", [b"NaN", b"-Infinity", b"\xff", b'"\xc3\xa4"', b"[" * 100_000])
def test_a_text_that_is_not_our_json_is_refused(text: bytes) -> None:
    """P42: NaN and infinities, bytes outside of ASCII, and lists without end."""
    assert parse_json(b"[12]") == [12]
    with pytest.raises(MALFORMED):
        parse_json(text)


def test_a_record_has_all_of_its_fields_and_no_other() -> None:
    """P42: each field has its type and bounds, whatever the digest says; the error names the field."""
    lease = {"id": "a", "manifest_digest": "b", "holder": "c", "expires_at": 3}
    assert typed(lease, Lease) == Lease(id="a", manifest_digest="b", holder="c", expires_at=3.0)
    for wrong, why in (
        ({**lease, "more": 1}, "more"),
        ({name: value for name, value in lease.items() if name != "holder"}, "holder"),
        ({**lease, "expires_at": "3"}, "expires_at"),
        ({**lease, "expires_at": 1e301}, "expires_at"),
        ({**lease, "holder": None}, "holder"),
    ):
        with pytest.raises(MALFORMED, match=why):
            typed(wrong, Lease)


def test_values_that_nest_too_deep_are_not_written() -> None:
    """P42: what a reader could not parse is refused by its writer."""
    value: Any = math.nan
    for _ in range(100):
        value = [value]
    assert str(finite_json(value)).strip("[]") == "'nan'"
    with pytest.raises(ValueError, match="deeper than 100"):
        finite_json([value])


@pytest.mark.parametrize(
    ("iso", "seconds"),
    [
        ("1970-01-01T00:01:00+00:00", 60),
        ("1970-01-01T09:01:00+09:00", 60),
        ("1970-01-01T00:01:00", 60),
        ("soon", None),
        ("", None),
        (7, None),
        ("0001-01-01T00:00:00+23:59", None),
    ],
)
def test_a_time_without_a_zone_is_of_utc(iso: Any, seconds: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text is the same time on every host, whatever its zone; what is no time is None."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        moment = moment_of(iso)
        assert (None if moment is None else moment.timestamp()) == seconds
    time.tzset()


_READ = """
import os, sys, threading
from contextlib import suppress
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.parsing import MALFORMED, typed

def read():
    together.wait()
    with suppress(*MALFORMED):
        typed(dict.fromkeys(vars(State)["__dataclass_fields__"]), State)

sys.setswitchinterval(1e-6)
for _ in range(12):
    if (pid := os.fork()) == 0:
        together = threading.Barrier(8)
        threads = [threading.Thread(target=read) for _ in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_threads_that_read_the_first_entry_of_a_process_at_once() -> None:
    """None of them meets half of what the parser prepares for a class, which would crash the process."""
    assert python("-c", _READ).stdout.split() == ["0"] * 12
