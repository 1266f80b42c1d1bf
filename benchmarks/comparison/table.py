"""The tables of the comparison, which `python -m benchmarks.comparison.table` writes into the pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.comparison.experiments import RESULTS, ROOT, SAVING_MIB, STALL_MIB, TOOLS

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "PERFORMANCE.md"
_PLACE = re.compile(r"(<!-- (?:comparison|results) -->\n).*?(?=<!-- end -->)", re.DOTALL)
_WORDS = {
    "same bits": "resumes, same bits",
    "other numbers": "resumes, other numbers",
    "anew": "begins anew",
    "continues": "resumes",
}
ROWS = {
    "killed": "killed between two saves",
    "saving": f"killed while it saves {SAVING_MIB} MiB",
    "cut": "newest file cut in half",
    "flipped": "one bit of it flipped",
    "writers": "two processes in one directory",
    "stall": f"a save of {STALL_MIB} MiB stops training for",
}

Results = dict[str, dict[str, Any]]


def cell(row: str, found: dict[str, Any], newest: int) -> str:
    """Say in a few words what became of a training whose newest checkpoint was of the step `newest`."""
    if row == "stall":
        return f"{found['outcome']:.2g} s"
    outcome: str = found["outcome"]
    if row == "saving" and outcome != "continues":
        lost, _, kills = outcome.removesuffix(" lost").partition(" of ")
        return f"error after {lost} of {kills} kills"
    if row in ("cut", "flipped") and outcome not in ("error", "anew"):
        return "resumes from the one before" if found["from"] < newest else "**not noticed**"
    return str({"error": "ends with an error", **_WORDS}.get(outcome, outcome))


def comparison(results: Results) -> str:
    """Return the table of the README."""
    tools = [tool.name for tool in TOOLS if tool.name in results]
    lines = [f"| | {' | '.join(tools)} |", f"|---|{'---|' * len(tools)}"]
    for row, title in ROWS.items():
        cells = (cell(row, results[tool][row], results[tool]["killed"].get("from", 0)) for tool in tools)
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _brief(error: str) -> str:
    """Return the first sentence of an error."""
    kind, _, text = error.partition(": ")
    sentence = text.partition(". ")[0][:90]
    return f"`{kind.rpartition('.')[2]}{': ' if sentence else ''}{sentence}`".replace("|", " ")


def errors(results: Results) -> str:
    """Return the table of versions and errors."""
    lines = ["| tool | version | errors |", "|---|---|---|"]
    for tool in (tool.name for tool in TOOLS if tool.name in results):
        found = results[tool]
        said = [(row, found[row]["error"]) for row in ("killed", "cut", "flipped") if "error" in found[row]]
        said += [("saving", kill["error"]) for kill in found["saving"]["kills"] if "error" in kill]
        said += [("writers", error) for error in found["writers"]["errors"]]
        each = dict.fromkeys(f"{ROWS[row]}: {_brief(error)}" for row, error in said)
        lines.append(f"| {tool} | {found['version']} | {' · '.join(each)} |")
    return "\n".join(lines)


def written(page: Path) -> str:
    """Return a page with its table made of results.json."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    made = comparison(results) if page == README else errors(results)
    return _PLACE.sub(lambda place: f"{place[1]}\n{made}\n\n", page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for one in (README, PAGE):
        one.write_text(written(one), encoding="utf-8")
