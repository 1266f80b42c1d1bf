"""What the command line understands and how it writes numbers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.cli.arguments import Target, parse_target
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.run.report.words import age, count, fine_span, number, percent, printable, size, span


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("runs/a", Target("runs/a", None)),
        ("runs/a@500", Target("runs/a", 500)),
        ("runs/a@0", Target("runs/a", 0)),
        ("runs/a@latest", Target("runs/a", "latest")),
        ("runs/a@best", Target("runs/a", "best")),
        ("runs/me@home@7", Target("runs/me@home", 7)),
        ("@7", Target("@7", None)),
    ],
)
def test_a_checkpoint_is_named_after_the_last_at(text: str, target: Target) -> None:
    """P27: DIR@STEP is taken apart at the last @, step 0 is a step, and a name without @ is a directory."""
    assert parse_target(text) == target


@pytest.mark.parametrize("name", ["run@500", "run@latest", "me@home"])
def test_a_directory_with_an_at_is_a_directory(tmp_path: Path, name: str) -> None:
    """A directory that exists under the whole name is meant, whatever follows its @."""
    (tmp_path / name).mkdir()
    assert parse_target(str(tmp_path / name)) == Target(str(tmp_path / name), None)
    assert parse_target(f"{tmp_path / name}@3") == Target(str(tmp_path / name), 3)


@pytest.mark.parametrize("which", ["", "newest", "1e3", "-1", "³", "٣", "latest "])
def test_anything_else_after_the_at_is_refused(which: str) -> None:
    """P51: what is neither a step nor "latest" nor "best" is an error that says what to write."""
    with pytest.raises(ConfigError, match="DIR@latest"):
        parse_target(f"runs/a@{which}")


WORDS: list[tuple[Callable[..., str], list[tuple[Any, str]]]] = [
    (size, [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1048570, "1.0 MiB"), (1 << 60, "1024.0 PiB")]),
    (span, [(0.123, "0.12 s"), (1.26, "1.3 s"), (9, "9 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min")]),
    (span, [(7200, "2 h")]),
    (fine_span, [(0.0, "0.0 ms"), (0.0021, "2.1 ms"), (0.45, "450 ms"), (1.5, "1.5 s"), (99.2, "99 s")]),
    (fine_span, [(197.0, "3.3 min"), (9_700.0, "2.7 h"), (98_400.0, "27 h"), (216_000.0, "2.5 d"), (1e9, "11574 d")]),
    (percent, [(0.0, "0.000 %"), (1e-7, "< 0.001 %"), (0.00034, "0.034 %"), (0.034, "3.4 %"), (0.34, "34 %")]),
    (number, [(0.0, "0"), (12.0, "12"), (0.123456, "0.1235"), (float("nan"), "nan"), (1e300, "1e+300")]),
    (number, [(float("-inf"), "-inf")]),
    (lambda n: count(n, "entry", "entries"), [(1, "1 entry"), (0, "0 entries"), (1000, "1,000 entries")]),
]


@pytest.mark.parametrize(("words", "value", "text"), [(words, *case) for words, cases in WORDS for case in cases])
def test_words_for_numbers(words: Callable[..., str], value: Any, text: str) -> None:
    """P62: sizes in powers of 1024; times, parts and metrics with two to four digits; NaN and infinity as they are."""
    assert words(value) == text


def test_ages_of_the_future_are_now() -> None:
    """P53: a clock that runs behind makes no negative age."""
    now = datetime(2026, 5, 1, 12, tzinfo=UTC)
    assert age((now - timedelta(days=3)).isoformat(), now) == "3 d ago"
    assert age((now - timedelta(seconds=3)).isoformat(), now) == "3 s ago"
    assert age((now + timedelta(days=3)).isoformat(), now) == "now"


def test_control_characters_are_spelled_out() -> None:
    """A text from a run directory cannot repaint the terminal, nor can a lone surrogate break the printing."""
    assert printable("a\x1b[2Jb\nc\ud800é") == "a\\x1b[2Jb\\nc\\ud800é"
