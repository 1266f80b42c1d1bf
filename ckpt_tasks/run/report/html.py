"""The report of a run as one HTML file with its charts.

Texts from a run directory may be hostile, so every text is escaped, also in the data of the charts. The security policy
of the file allows only its three scripts, by digest, and no requests. A browser without scripts shows a picture.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from html import escape
from importlib.resources import files

from ckpt_tasks.run.ledger.goodput import RETURNED
from ckpt_tasks.run.report.charts import chart_data, curves_of
from ckpt_tasks.run.report.picture import draw_run
from ckpt_tasks.run.report.run_report import SHARES_MEAN, Report
from ckpt_tasks.run.report.words import fine_span, percent, printable

GENERATOR = '<meta name="generator" content="ckpt-tasks report">'
_SCRIPTS = ("uPlot.iife.min.js", "chart.js", "report.js")
_STYLES = ("uPlot.min.css", "chart.css", "report.css")
_MOST_POINTS = 2_000


def to_html(report: Report) -> str:
    """Write the report as one HTML file."""
    name, columns = escape(printable(report.run_key)), list(report.checkpoints[0]) if report.checkpoints else []
    rows = [[row[column] for column in columns] for row in report.checkpoints]
    shares = [(share, SHARES_MEAN[share], fine_span(s), percent(part)) for share, s, part in report.shares]
    words = {"kept because", "", "saved (UTC)"}
    numbers = {n for n, column in enumerate(columns) if column not in words}
    texts = {n for n, column in enumerate(columns) if column == "kept because"}
    scripts = [page_file(one) for one in _SCRIPTS]
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{name}</title>',
        GENERATOR,
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        *(f"<style>{page_file(one)}</style>" for one in _STYLES),
        "</head><body>",
        f"<h1>{name}</h1><p>{escape(printable(report.summary))}</p>",
        *(f"<p>{escape(printable(caveat))}</p>" for caveat in report.caveats()),
        '<div id="charts"></div>',
        f"<noscript>{draw_run(report.course, heading=report.run_key, curve=report.curve)}</noscript>",
        _html_table("Where the time went", ("", "", "time", "part"), shares, numbers={2, 3}, texts={1}),
        _html_table("From each restart to the first step", *report.returns(), numbers={*range(len(RETURNED) + 3)}),
        _html_table("In numbers", (), report.facts(), texts={1}),
        _html_table("What happened", ("when (UTC)", "", "why"), report.happenings(), texts={2}),
        _html_table("Checkpoints", columns, rows, numbers=numbers, texts=texts),
        f'<script type="application/json" id="data">{_data(report)}</script>',
        *(f"<script>{one}</script>" for one in scripts),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def page_file(name: str) -> str:
    """Return the text of a file that pages embed."""
    return files("ckpt_tasks.run.report").joinpath("page", name).read_text("utf-8")


def _policy(scripts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    named = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {named}"


def _data(report: Report) -> str:
    """Return the data of the charts as JSON without "<" and ">": so no text can end the script element around it."""
    curves = curves_of(report.course, report.curve)
    data = {**chart_data(curves, report.course, most=_MOST_POINTS), "label": report.run_key}
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")


def _html_table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: AbstractSet[int] = frozenset(),
    texts: AbstractSet[int] = frozenset(),
) -> str:
    """Write a table. Columns of `texts` wrap, within a word if necessary; other columns do not."""
    if not rows:
        return ""
    css = {**dict.fromkeys(numbers, ' class="n"'), **dict.fromkeys(texts, ' class="w"')}

    def line(tag: str, cells: Sequence[str]) -> str:
        marked = ((css.get(n, ""), escape(printable(cell))) for n, cell in enumerate(cells))
        return "<tr>" + "".join(f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in marked) + "</tr>"

    headings = line("th", head) if any(head) else ""
    body = "\n".join(line("td", row) for row in rows)
    return f'<h2>{title}</h2>\n<div class="wide"><table>{headings}\n{body}</table></div>'
