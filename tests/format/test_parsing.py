"""Values out of JSON: each has the very type that is asked for, and its bounds."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from ckpt_tasks.format import parsing
from ckpt_tasks.format.parsing import check_json, moment_of, parse_json


@pytest.mark.parametrize("data", [b"[1,2,3]", b'{"a":1,"b":2,"c":3}', b"[[],[],1]"])
def test_more_values_than_are_written_are_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """P42: numbers in one long list take memory as lists do."""
    monkeypatch.setattr(parsing, "MAX_VALUES", 5)
    check_json(data)
    monkeypatch.setattr(parsing, "MAX_VALUES", 2)
    with pytest.raises(ValueError, match="2 values"):
        check_json(data)


def test_more_texts_with_marks_than_are_written_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """P42: telling brackets in texts from others takes memory for each text, so they are counted first."""
    data = b'["a[","b]"]'
    monkeypatch.setattr(parsing, "_MAX_QUOTES", 4)
    check_json(data)
    monkeypatch.setattr(parsing, "_MAX_QUOTES", 3)
    with pytest.raises(ValueError, match="more texts"):
        check_json(data)


@pytest.mark.parametrize("allowed", [0, 10**6])
def test_the_longest_number_is_read_whatever_the_process_allows(allowed: int) -> None:
    """4,300 digits are Python's own limit, and the most that is read where somebody has lifted it."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(allowed)
    try:
        assert parse_json(b"9" * 4300) == 10**4300 - 1
        with pytest.raises(ValueError, match="4301 digits"):
            parse_json(b"9" * 4301)
    finally:
        sys.set_int_max_str_digits(before)


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
