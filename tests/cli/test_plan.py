"""`ckpt plan`: what a run has measured, the interval that follows, and the curve in numbers, bars and a picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ckpt_tasks.ledger.observing import observe
from ckpt_tasks.policy.cadence import recommend
from ckpt_tasks.report.words import fine_span
from tests.support.cli_runs import ckpt, tree
from tests.support.histories import Told, trained

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
    wanted, before = recommend(observed), tree(light)
    answer = ckpt("plan", light, "--json")
    assert (answer.status, tree(light)) == (0, before)
    found = answer.data
    assert found["run_key"] == "lm-7"
    assert found["observed"] == {**LIGHT, "failures": 0, "trained_s": 1200.0}
    assert found["recommended"]["interval_s"] == wanted.interval_s == pytest.approx(99.2, rel=0.01)
    assert found["recommended"]["steps"] == wanted.steps == 199
    assert (found["recommended"]["decided_by"], found["overhead_cap"]) == ("optimum", 0.03)
    assert found["svg"] is None


# ── the picture ──────────────────────────────────────────────────────────────────────────────────────────────


def texts(svg: ET.Element) -> list[str]:
    return [text.text or "" for text in svg.iter(f"{SVG}text")]


@pytest.mark.parametrize(("costs", "mtbf_s"), [(LIGHT, "86400"), (HEAVY, "600"), (LIGHT, "1e9")])
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
