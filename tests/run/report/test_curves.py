"""The small pictures of a run's metrics, and the ticks of an axis."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.run.ledger.curve import Curve, CurveStep
from ckpt_tasks.run.report.curves import draw_curves
from ckpt_tasks.run.report.svg import round_ticks, tick_labels

SVG = "{http://www.w3.org/2000/svg}"


def test_a_long_name_fits_above_its_picture() -> None:
    """The small picture of each of 40 metrics says the end of its name, and the value, within its own width."""
    metrics = {f"layer_{n}/the_name_of_a_metric_that_is_long": 0.12345 for n in range(40)}
    curve = Curve(tuple(CurveStep(n=1, step=n, at_s=n, metrics=metrics, abandoned=False) for n in (1, 2)))
    svg = ET.fromstring(draw_curves(curve, heading="lm-7"))
    titles = [one.text or "" for one in svg.iter(f"{SVG}text") if one.attrib.get("class") == "ckc-ink"]
    assert len(titles) == 12
    assert {title for title in titles if not title.startswith("…") or not title.endswith("_long: 0.1235")} == set()
    assert {len(title) for title in titles} == {36}
    assert "28 more metrics" in " ".join(svg.itertext())


@given(st.floats(-1e300, 1e300), st.floats(1e-6, 1e6))
def test_ticks_are_round_and_few(lowest: float, width: float) -> None:
    """An axis has ticks between its ends, a handful, and no two are written alike."""
    highest = lowest + width * max(1.0, abs(lowest))
    ticks = round_ticks(lowest, highest)
    assert 1 <= len(ticks) <= 12
    room = (highest - lowest) * 1e-6
    assert all(lowest - room <= tick <= highest + room for tick in ticks)
    assert len({*tick_labels(ticks)}) == len(ticks)
