"""`ckpt plan`: what a run has measured, the interval that follows, and the curve in numbers, bars and a picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ckpt_tasks.ledger.observing import observe
from ckpt_tasks.policy.cadence import recommend
from ckpt_tasks.report.words import fine_span, percent
from tests.support.cli_runs import ckpt, config, save_steps, tree
from tests.support.histories import LOST, Told, trained

SVG = "{http://www.w3.org/2000/svg}"
LIGHT = {"stall_s": 0.05, "flush_s": 0.5, "step_s": 0.5}
HEAVY = {"stall_s": 2.0, "flush_s": 60.0, "step_s": 0.5}
BLOCKING = {"stall_s": 30.0, "flush_s": 30.0, "step_s": 0.5}


@pytest.fixture
def light(run_dir: Path) -> Path:
    trained(Told(run_dir).taken(), 20, every_s=60.0, steps=120, **LIGHT)
    return run_dir


def test_plan_recommends_what_the_policy_says(light: Path) -> None:
    """The interval is that of the cadence for what the run's ledger holds, in seconds and in steps."""
    observed = observe(Told(light).history)
    assert observed is not None
    wanted = recommend(observed)
    answer = ckpt("plan", light, "--json")
    assert answer.status == 0
    found = answer.data
    assert found["run_key"] == "lm-7"
    assert found["observed"] == {**LIGHT, "failures": 0, "trained_s": 1200.0}
    assert found["recommended"]["interval_s"] == wanted.interval_s == pytest.approx(99.2, rel=0.01)
    assert found["recommended"]["steps"] == wanted.steps == 199
    assert (found["recommended"]["decided_by"], found["overhead_cap"]) == ("optimum", 0.03)
    assert found["svg"] is None


def test_plan_shows_it_to_people(light: Path) -> None:
    """Figures, the recommendation in seconds and steps, and a curve with one row that is recommended."""
    answer = ckpt("plan", light)
    assert answer.status == 0
    assert "99.2 s, 199 steps" in answer.out
    assert "27 h (prior: no failure yet)" in answer.out
    assert "0.050 % waiting for saves" in answer.out
    rows = [line for line in answer.out.splitlines() if "▒" in line or "█" in line]
    (recommended,) = [n for n, row in enumerate(rows) if "◂ recommended" in row]
    lengths = [row.count("█") + row.count("▒") for row in rows]
    assert 10 <= len(rows) <= 20
    assert lengths[0] == max(lengths) > 3 * lengths[recommended] > 0
    assert lengths[-1] > 3 * lengths[recommended]
    assert all(len(line.rstrip()) <= 80 for line in rows)


def test_plan_says_what_the_failures_were(run_dir: Path) -> None:
    """After a failure the mean time between failures is measured, and the interval shorter."""
    told = trained(Told(run_dir).taken(), 20, every_s=60.0, steps=120, **LIGHT)
    before = ckpt("plan", run_dir, "--json").data
    trained(told.taken(LOST), 20, every_s=60.0, steps=120, **LIGHT)
    after = ckpt("plan", run_dir, "--json").data
    assert (before["mtbf_source"], after["mtbf_source"]) == ("prior", "measured")
    assert after["observed"]["failures"] == 1
    assert after["mtbf_s"] == pytest.approx((8640 + 2400) / 1.1)
    assert after["recommended"]["interval_s"] < before["recommended"]["interval_s"]
    shown = ckpt("plan", run_dir).out
    assert "1 in 40 min of training" in shown
    assert "(1 failure and the prior)" in shown


def test_another_mtbf_can_be_asked_for(light: Path) -> None:
    """--mtbf-s takes the place of what the run has seen, and says so."""
    found = ckpt("plan", light, "--mtbf-s", "600", "--json").data
    assert (found["mtbf_s"], found["mtbf_source"]) == (600.0, "given")
    assert found["recommended"]["interval_s"] == pytest.approx(7.7, rel=0.01)
    assert "10 min (given)" in ckpt("plan", light, "--mtbf-s", "600").out


def test_the_cap_and_the_flush_are_named_where_they_decide(run_dir: Path) -> None:
    """Where the interval is longer than the optimum it says why, and what the cap costs."""
    trained(Told(run_dir).taken(), 5, every_s=1200.0, steps=2400, **BLOCKING)
    shown = ckpt("plan", run_dir, "--mtbf-s", "600").out
    assert "of the overhead cap of 3 %; without it every 2.8 min, at 32 % in all" in shown
    assert "970 s (16 min), 1,940 steps" in shown
    lifted = ckpt("plan", run_dir, "--mtbf-s", "600", "--overhead-cap", "0.5", "--json").data
    assert lifted["recommended"]["decided_by"] == "optimum"
    other = run_dir.with_name("other")
    trained(Told(other).taken(), 5, every_s=1200.0, steps=2400, **HEAVY)
    shown = ckpt("plan", other, "--mtbf-s", "600", "--overhead-cap", "0.5").out
    assert "a flush takes that long; the optimum would be 48 s" in shown


def test_a_run_without_a_checkpoint_has_nothing_to_plan_from(run_dir: Path) -> None:
    """Before the first commit nothing has been measured: an error that says so, and exit status 1."""
    Told(run_dir).taken()
    answer = ckpt("plan", run_dir)
    assert answer.status == 1
    assert "nothing has been measured" in answer.err
    assert ckpt("plan", run_dir.with_name("nothing"), "--json").data["error"]["type"] == "CheckpointNotFoundError"


@pytest.mark.parametrize("option", [("--overhead-cap", "0"), ("--overhead-cap", "3"), ("--mtbf-s", "0")])
def test_options_that_mean_nothing_are_one_line(light: Path, option: tuple[str, str]) -> None:
    """A cap of 3 (it is a part, not a percentage) and an MTBF of 0 are errors of one line."""
    answer = ckpt("plan", light, *option)
    assert (answer.status, answer.out) == (1, "")
    assert answer.err.count("\n") == 1


def test_planning_changes_nothing(light: Path) -> None:
    """Looking writes nothing into the run."""
    before = tree(light)
    assert ckpt("plan", light).status == 0
    assert tree(light) == before


def test_a_real_run_can_be_planned(run_dir: Path) -> None:
    """Milliseconds of a real save come out as such, in table and JSON."""
    save_steps(run_dir, 1, 2, 3)
    assert config(run_dir).checkpoint_dir == str(run_dir)
    found = ckpt("plan", run_dir, "--json").data
    assert 0 < found["observed"]["stall_s"] < 60
    assert found["recommended"]["interval_s"] >= found["observed"]["flush_s"] > 0
    assert "◂ recommended" in ckpt("plan", run_dir).out


# ── the picture ──────────────────────────────────────────────────────────────────────────────────────────────


def texts(svg: ET.Element) -> list[str]:
    return [text.text or "" for text in svg.iter(f"{SVG}text")]


@pytest.mark.parametrize(("costs", "mtbf_s"), [(LIGHT, "86400"), (HEAVY, "600"), (BLOCKING, "6000"), (LIGHT, "1e9")])
def test_the_picture_is_a_picture(run_dir: Path, tmp_path: Path, costs: dict[str, float], mtbf_s: str) -> None:
    """--svg writes well-formed SVG: three curves, labelled axes with several ticks, everything within its frame."""
    trained(Told(run_dir).taken(), 5, every_s=1200.0, steps=2400, **costs)
    place = tmp_path / "curve.svg"
    found = ckpt("plan", run_dir, "--mtbf-s", mtbf_s, "--svg", place, "--json").data
    assert found["svg"] == str(place)
    svg = ET.fromstring(place.read_text(encoding="utf-8"))
    assert svg.tag == f"{SVG}svg"
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    curves = [line.attrib["points"].split() for line in svg.iter(f"{SVG}polyline")]
    assert [len(curve) for curve in curves] == [241, 241, 241]
    assert all(0 <= float(point.split(",")[0]) <= width for curve in curves for point in curve)
    for text in svg.iter(f"{SVG}text"):
        assert 0 <= float(text.attrib["x"]) <= width
        assert 0 <= float(text.attrib["y"]) <= height
    said = texts(svg)
    for words in ("training between two saves", "part of all time", "waiting for saves", "together"):
        assert words in said
    assert sum(text.endswith(" %") for text in said) >= 4
    assert any(text.startswith(f"every {fine_span(found['recommended']['interval_s'])}: ") for text in said)
    assert 4 <= sum(text.endswith((" ms", " s", " min", " h", " d")) and ":" not in text for text in said) <= 16


def test_a_name_cannot_break_the_picture(run_dir: Path, tmp_path: Path) -> None:
    """The run's key is text in the picture, whatever is in it."""
    from ckpt_tasks.policy.cadence import Observed, trade_off, trade_off_at
    from ckpt_tasks.report.tradeoff import draw_curve

    observed = Observed(step_s=0.5, stall_s=0.0, flush_s=0.0, failures=0, trained_s=0.0)
    found = recommend(observed)
    at = trade_off_at(found.interval_s, observed, found.mtbf_s)
    drawn = draw_curve(trade_off(observed, found), at, found.least_s, heading='<b>&"', about="a < b")
    assert '<b>&"' in texts(ET.fromstring(drawn))


def test_a_picture_that_cannot_be_written_is_an_error(light: Path, tmp_path: Path) -> None:
    """A folder that is not there is an error of one line, not a traceback."""
    answer = ckpt("plan", light, "--svg", tmp_path / "no" / "curve.svg")
    assert (answer.status, answer.out) == (1, "")
    assert "the picture cannot be written" in answer.err


# ── the words ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 ms"),
        (0.0021, "2.1 ms"),
        (0.45, "450 ms"),
        (1.5, "1.5 s"),
        (99.2, "99 s"),
        (197.0, "3.3 min"),
        (9_700.0, "2.7 h"),
        (98_400.0, "27 h"),
        (216_000.0, "2.5 d"),
        (1e9, "11574 d"),
    ],
)
def test_durations_keep_two_digits(seconds: float, text: str) -> None:
    """A stall of 2 ms is not 0.00 s, and 3.3 min are not 3."""
    assert fine_span(seconds) == text


@pytest.mark.parametrize(
    ("part", "text"),
    [(0.0, "0.000 %"), (1e-7, "< 0.001 %"), (0.00034, "0.034 %"), (0.0034, "0.34 %"), (0.034, "3.4 %"), (0.34, "34 %")],
)
def test_parts_keep_two_digits(part: float, text: str) -> None:
    """Parts of all time are percentages with two digits, down to a thousandth of one."""
    assert percent(part) == text
