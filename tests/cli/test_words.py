"""What the command line understands and how it writes numbers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ckpt_tasks.cli.arguments import Target, parse_target
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.report.words import age, count, number, printable, size, span


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


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1048570, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 60, "1024.0 PiB"),
    ],
)
def test_sizes(size_bytes: int, text: str) -> None:
    """Sizes are in powers of 1024, and never "1024.0 KiB"."""
    assert size(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.123, "0.12 s"), (1.26, "1.3 s"), (9, "9 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h")],
)
def test_durations(seconds: float, text: str) -> None:
    """Durations have two or three digits."""
    assert span(seconds) == text


def test_ages_of_the_future_are_now() -> None:
    """P53: a clock that runs behind makes no negative age."""
    now = datetime(2026, 5, 1, 12, tzinfo=UTC)
    assert age((now - timedelta(days=3)).isoformat(), now) == "3 d ago"
    assert age((now + timedelta(days=3)).isoformat(), now) == "now"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (12.0, "12"), (0.123456, "0.1235"), (float("nan"), "nan"), (float("-inf"), "-inf"), (1e300, "1e+300")],
)
def test_metrics(value: float, text: str) -> None:
    """P62: metrics have four digits, whole ones are written in full, and NaN and infinity are themselves."""
    assert number(value) == text


def test_counts() -> None:
    """One object, three objects, and a thousand with a comma."""
    assert (count(1, "entry", "entries"), count(0, "object"), count(1000, "object")) == (
        "1 entry",
        "0 objects",
        "1,000 objects",
    )


def test_control_characters_are_spelled_out() -> None:
    """A text from a run directory cannot repaint the terminal, nor can a lone surrogate break the printing."""
    assert printable("a\x1b[2Jb\nc\ud800é") == "a\\x1b[2Jb\\nc\\ud800é"
