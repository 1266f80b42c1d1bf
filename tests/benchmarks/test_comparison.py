"""The comparison in the README is what experiments have shown, and still show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.comparison.experiments import RESULTS, TOOLS, Tool, examined
from benchmarks.comparison.table import ROWS, cell


@pytest.mark.framework
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "tool", [TOOLS[0], *(pytest.param(tool, marks=pytest.mark.soak) for tool in TOOLS[1:])], ids=lambda tool: tool.name
)
def test_the_experiments_end_as_the_table_says(tool: Tool, tmp_path: Path) -> None:
    """P30, P49, P73: killed, killed while it saves, cut, flipped, two writers: each tool does what its column says."""
    if not tool.installed:
        pytest.skip(f"make peers installs {tool.name}")
    told, found = json.loads(RESULTS.read_text(encoding="utf-8"))[tool.name], examined(tool, tmp_path)
    for row in ROWS:
        if row == "stall" or (row == "saving" and told[row]["outcome"] != "continues"):
            continue  # the one depends on the machine, the other on where each kill falls
        now, then = (cell(row, some[row], some["killed"].get("from", 0)) for some in (found, told))
        assert now == then, found[row]
