"""Names from outside on a terminal, in logs and in errors: no brackets are markup, and no code reaches them."""

from __future__ import annotations

import io
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import IntegrityError, NoGoodCheckpointError, StateMismatchError
from ckpt_tasks.flows.prefect.evaluate import EvaluationResult
from ckpt_tasks.flows.screen import LiveLine, Screen, print_evaluation, print_evaluations, print_run
from ckpt_tasks.flows.session.session import Progress
from ckpt_tasks.run.report.words import when
from tests.support.ledgers import made

NAMES = ["acc[/top5]", "[bold]x", ":smile:", "red\x1b[31m", "link\x1b]8;;http://evil\x1b\\", "back\r\x08", "csi\x9b2J"]


def test_the_line_says_where_training_is() -> None:
    """Step, metric, speed, and the time left at this speed: both have what comes between the steps in them."""
    out = Screen(file=io.StringIO(), width=200, color_system=None)
    line = LiveLine(out, 30)
    first, second = (
        Progress(step=step, step_s=0.5, metrics={"loss": 2.5}, amount=64e6, unit="samples", commit=None)
        for step in (1, 2)
    )
    line(first)
    time.sleep(1.5)
    line(second)
    found = re.fullmatch(r"step 2/30 · loss 2\.5 · ([\d,]+) samples/s · ETA (\d+):(\d\d)", line.text(second))
    assert found is not None
    speed, minutes, seconds = (int(number.replace(",", "")) for number in found.groups())
    assert speed <= 64e6  # 128e6 samples in 2 s or more
    assert abs(28 * 64e6 / speed - (60 * minutes + seconds)) < 1.5


def test_one_long_wait_does_not_stretch_the_time_left() -> None:
    """The time left is that of the newest seconds: a commit that was waited for is one step among hundreds."""
    line = LiveLine(Screen(file=io.StringIO(), width=200, color_system=None), 20_000)
    steps = [Progress(step=n, step_s=1e-3, metrics={}, amount=0, unit="samples", commit=None) for n in range(1, 401)]
    began_s = time.monotonic()
    for step in steps:
        time.sleep(0.4 * (step.step == 400))
        line(step)
    left_s = (time.monotonic() - began_s) / 400 * 19_600
    minutes, seconds = line.text(steps[-1]).rpartition("ETA ")[2].split(":")
    assert left_s / 2 < 60 * int(minutes) + int(seconds) < 2 * left_s


def test_a_narrow_line_cuts_no_number() -> None:
    """A line leaves out whole parts, the wait first, then the speed and the time left, until it fits."""
    line = LiveLine(Screen(file=io.StringIO(), width=200, color_system=None), 20_000)
    commit = replace(made(19_000, 1), cost_s=0.0024)
    progress = Progress(step=20_000, step_s=0.1, metrics={"loss": 0.5}, amount=1e4, unit="samples", commit=commit)
    line(progress)
    texts = [line.text(progress, width) for width in (200, 80, 60, 50)]
    assert [len(text) <= width for text, width in zip(texts, (200, 80, 60, 50), strict=True)] == [True] * 4
    parts = ["step 20000/20000", "loss 0.5", "100,000 samples/s", "ETA 0:00", "committed 19000"]
    assert [text.split(" · ") for text in texts] == [
        [*parts[:-1], "committed 19000, waited 2.4 ms"],
        parts,
        [part for part in parts if "samples/s" not in part],
        [parts[0], parts[1], parts[4]],
    ]


def test_the_last_line_has_the_last_commit() -> None:
    """What stays of a complete training is its last step, with the commit that follows it."""
    file = io.StringIO()
    line = LiveLine(Screen(file=file, width=200, color_system=None), 30)
    with line:
        line(Progress(step=30, step_s=0.1, metrics={}, amount=0.0, unit="samples", commit=made(19, 1)))
        assert not file.getvalue()
        line.finish(made(30, 2))
    assert re.search(r"^step 30/30 · .*committed 30, waited .*\n$", file.getvalue())


def test_times_are_those_of_the_reader(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table at the end of a training has the time of a save in the reader's zone, as the line of its start has."""
    config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None)
    with Checkpointer(config) as ckpt:
        saved_at = ckpt.save(1, {"one": 1}).saved_at
    texts = {}
    for zone in ("UTC", "UTC-9"):  # POSIX's sign: nine hours east.
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        out = Screen(file=io.StringIO(), width=200, color_system=None)
        print_run(out, config)
        texts[zone] = out.file.getvalue()  # type: ignore[attr-defined]
        assert when(saved_at)[11:] in texts[zone]
    monkeypatch.undo()
    time.tzset()
    assert texts["UTC"] != texts["UTC-9"]


def test_a_reader_that_leaves_ends_no_training() -> None:
    """What follows `ckpt train | head -1` is shown to nobody, the program's own prints too, and is no error.

    `ckpt train > /full/log` trains as well, and what has no room is left out.
    """
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as file:
        for _ in range(2):
            Screen(file=file).print("step 1")
        print("the program's own", file=file, flush=True)
    full = open("/dev/full", "w")  # noqa: SIM115 (what is left in it has no room either when it is closed)
    Screen(file=full).print("step 1")
    with pytest.raises(OSError, match="No space"):
        full.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("terminal", [False, True])
def test_a_metric_has_any_name(name: str, terminal: bool) -> None:
    """Whatever a metric is called, the lines and tables of a flow show it as it is, and no code of it."""
    file = io.StringIO()
    out = Screen(file=file, force_terminal=terminal, width=200, color_system=None)
    line = LiveLine(out, 10)
    progress = Progress(step=10, step_s=0.1, metrics={name: 0.5}, amount=1.0, unit="samples", commit=None)
    line(progress)
    out.print(line.text(progress))
    result = EvaluationResult(step=1, suite="quick", manifest_digest="0" * 32, metrics={name: 0.5}, outcome="recorded")
    print_evaluation(out, result)
    print_evaluations(out, "quick", [result])
    shown = file.getvalue()
    plain = name if name.isprintable() else name[:3]
    assert shown.count(plain) >= 3
    assert "evil\x1b" not in shown
    assert not [c for c in shown if not (c.isprintable() or c == "\n")]


@pytest.mark.parametrize("name", NAMES)
def test_an_error_names_keys_without_their_codes(name: str) -> None:
    """A key in an error's text, which logs and servers keep, holds no control character."""
    for error in (
        IntegrityError(f"changed {name}", key=name, hint=name),
        StateMismatchError("differs", missing=(name,)),
        NoGoodCheckpointError("none", reasons=((1, name),)),
    ):
        assert str(error).isprintable()
