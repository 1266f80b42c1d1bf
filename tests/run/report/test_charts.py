"""What charts draw: thinned lines, marks and strips; and the library that draws them."""

from __future__ import annotations

import math
import re
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.run.report.charts import thin
from tools.sources import ROOT

PAGE = ROOT / "ckpt_tasks/run/report/page"
# As npm has them in uplot-1.6.32.tgz.
PUBLISHED = {
    "uPlot.iife.min.js": ("19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f", 51_081),
    "uPlot.min.css": ("df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04", 1_857),
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_chart_library_is_as_it_was_published(name: str) -> None:
    """uPlot is byte for byte the file of its release, with its licence beside it."""
    data = (PAGE / name).read_bytes()
    assert (sha256(data).hexdigest(), len(data)) == PUBLISHED[name]
    licence = (PAGE / "uPlot.LICENSE").read_text()
    assert licence.startswith("The MIT License (MIT)")
    assert "Leon Sorokin" in licence


@given(st.lists(st.floats(width=32), min_size=1, max_size=400), st.integers(2, 60))
def test_a_spike_outlives_thinning(values: list[float], most: int) -> None:
    """Whatever the values: the first, the last, the lowest and the highest stay, in order, and few of them."""
    step = np.arange(1.0, len(values) + 1)
    line = thin(step, step * 2, np.array(values), most)
    assert len(line["step"]) == len(line["value"]) == len(line["at_s"]) <= 3 * most // 2 + 3
    assert line["step"] == sorted({*line["step"]})
    assert (line["step"][0], line["step"][-1]) == (1, len(values))
    finite = [value for value in values if math.isfinite(value)]
    kept = [value for value in line["value"] if value is not None]
    assert bool(finite) == bool(kept)
    if finite:
        assert (min(kept), max(kept)) == pytest.approx((min(finite), max(finite)), rel=1e-6)
    assert (None in line["value"]) == (len(finite) < len(values))


def test_the_scripts_use_no_markup_of_strings() -> None:
    """No script of ours makes HTML or code of a text: a run's texts stay texts."""
    scripts = [PAGE / "chart.js", ROOT / "ckpt_tasks/cli/serving/page/page.js"]
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc|javascript:"
    assert [path.name for path in scripts if re.search(banned, path.read_text())] == []
