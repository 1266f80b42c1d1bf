"""The small pictures of a run's metrics."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from ckpt_tasks.ledger.curve import Curve, CurveStep
from ckpt_tasks.report.curves import draw_curves

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
