"""The report of a run: its facts, and their form as markdown; `html.py` writes them as one HTML file.

Texts from a run directory (keys, names of metrics, reasons) may be hostile. Every such text is escaped.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ckpt_tasks.features import FEATURES, found_at
from ckpt_tasks.format.ledger import State, lineage
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.ledger.curve import Curve
from ckpt_tasks.run.ledger.goodput import RETURNED, Course, follow
from ckpt_tasks.run.ledger.ownership import NEVER_OWNED
from ckpt_tasks.run.ledger.timeline import Moment, Timeline
from ckpt_tasks.run.report.curves import draw_curves
from ckpt_tasks.run.report.picture import draw_run, sort_metrics
from ckpt_tasks.run.report.words import count, fine_span, number, percent, printable, size, utc

SHARES_MEAN = {
    "useful": "training of steps that the result is made of",
    "lost": "training that was discarded, and repeated",
    "data": "waiting for the next batch",
    "saving": "waiting for snapshots",
    "starting": "from a start or a failure until training continued",
    "down": "from the last entry of a process that died until the next one trained",
    "idle": "released, and held by no process",
    "unattributed": "not measured: between steps, or behind the last commit",
}
_SAID = {
    "failure": "an attempt failed",
    "lost": "taken over from a dead process",
    "taken": "resumed",
    "fallback": "fell back",
    "rollback": "rolled back",
    "gang": "a worker group began",
    "copied": "copied",
}
# Headings for the parts in RETURNED.
_RETURNED_SAID = {name: name.rpartition("_")[0] for name in RETURNED} | {
    "step_s": "first step",
    "noticed_s": "since its last entry",
}
_HAPPENINGS_SHOWN = 40
_CHECKPOINTS_SHOWN = 200
_METRICS_SHOWN = 4
_TEXT_SHOWN = 200
# Match what markdown could interpret: a mark anywhere, a list at the start, a bare link; but no numbers and times.
_MARKDOWN = re.compile(r"[\\`*_\[\]<>#|~&@]|^[-+](?=[-\s]|$)|(?<=\d)[.)](?=\s|$)|:(?=//)|(?<=www)\.", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The facts of one run's report. Its texts are not escaped: the functions that write the report escape them."""

    run_key: str
    url: str
    timeline: Timeline
    course: Course
    checkpoints: Sequence[Mapping[str, str]]
    curve: Curve = field(default_factory=Curve)
    life: str = ""
    """The run's state and the reason, as `life_of` returns them; empty if the caller has not asked."""

    @property
    def summary(self) -> str:
        """The run's step and its goodput, in one line."""
        commits = [commit.moment for commit in self.course.of("commit")]
        at = f"step {commits[-1].step:,}" if commits and commits[-1].step is not None else "no checkpoint yet"
        good = self.course.goodput
        share = f", goodput {percent(good)} of {fine_span(self.course.wall_s)}" if good is not None else ""
        return at + share

    @property
    def shares(self) -> list[tuple[str, float, float]]:
        """The name, the seconds and the part of the wall time of every share above zero."""
        wall_s = self.course.wall_s or 1.0
        return [(name, s, s / wall_s) for name, s in self.course.seconds.items() if s > 0]

    def facts(self) -> list[tuple[str, str]]:
        """Return the run's figures: (name, text)."""
        course, commits = self.course, [moment.moment for moment in self.course.of("commit")]
        deaths, failures = len(course.deaths), len(course.of("failure"))
        resumed = count(len(course.resumes), "time")
        runs = len({moment.moment.flow_run_id for moment in course.of("taken", "lost") if moment.moment.flow_run_id})
        dead = count(deaths, "process", "processes")
        again = f"; {count(course.redone_steps, 'step')} trained again" if course.redone_steps else ""
        rows = [
            ("commits", f"{len(commits):,}, {len(commits) - len(course.line):,} of them on discarded branches"),
            ("failures", f"{count(failures, 'failed attempt')}, {dead} that died and had a successor"),
            ("resumed", (f"{resumed}, in {count(runs, 'flow run')}" if runs else resumed) + again),
        ]
        if evaluations := len(course.of("evaluation")):  # Those of `ckpt evaluate` and flows, not of the loop.
            rows.append(("evaluations", f"{evaluations:,}"))
        if course.placed:
            first, last = course.placed[0].moment, course.placed[-1].moment
            rows.insert(0, ("from, to", f"{utc(first.at_s)}, {utc(last.at_s)} UTC"))
        if self.life:
            rows.insert(0, ("state", self.life))
        steps_s = [moment.step_s for moment in commits if moment.step_s is not None]
        if steps_s:
            stalls_s = sorted(moment.stall_s for moment in commits)
            rows.append(("a step takes", f"{fine_span(median(steps_s))} (median){self._average()}"))
            most = f", {fine_span(stalls_s[-1])} at most, {fine_span(sum(stalls_s))} in all"
            rows.append(("a save blocks training", f"{fine_span(median(stalls_s))} (median){most}"))
        rows += self.of_features[1]
        if commits and commits[-1].metrics:
            shown = sort_metrics(commits[-1].metrics)[:_METRICS_SHOWN]
            rows.append(("last metrics", ", ".join(f"{n} {number(commits[-1].metrics[n])}" for n in shown)))
        return [*rows, ("checkpoints in", self.url)]

    def _average(self) -> str:
        """Return words for what all steps between the first and the last commit of the final line took, shared out."""
        line = [place.moment for place in self.course.of("commit") if place.moment.n in self.course.line]
        steps = (line[-1].step or 0) - (line[0].step or 0) if line else 0  # A fork does not begin at step 0.
        trained_s = sum(moment.trained_s for moment in line[1:])
        return f", {fine_span(trained_s / steps)} on average" if steps > 0 and trained_s > 0 else ""

    @property
    def of_features(self) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        """What features add: JSON data by name, and rows."""
        made = [found_at(one.figures)(self.course) for one in FEATURES if one.figures]
        return {name: data for one, _ in made for name, data in one.items()}, [row for _, rows in made for row in rows]

    def caveats(self) -> list[str]:
        """Return sentences about what this report cannot know."""
        lines = []
        if self.timeline.copied:
            lines.append("This is a copy: times are those of the copying, not of the training.")
        if self.timeline.older:
            lines.append(f"{count(self.timeline.older, 'older ledger entry', 'older ledger entries')} were left out.")
        if self.timeline.damaged:
            entries = count(self.timeline.damaged, "ledger entry", "ledger entries")
            lines.append(f"{entries} cannot be read; ckpt verify names them.")
        if self.curve.damaged:
            lines.append(f"{count(self.curve.damaged, 'table')} of steps cannot be read; ckpt verify names them.")
        return lines

    def happenings(self) -> list[tuple[str, str, str]]:
        """Return (time, what, why) of the newest failures, resumes and fall-backs, newest first."""
        moments = [moment.moment for moment in self.course.of(*_SAID)]
        return [(utc(moment.at_s), *_said(moment)) for moment in reversed(moments[-_HAPPENINGS_SHOWN:])]

    def returns(self) -> tuple[list[str], list[list[str]]]:
        """Return the headings and the rows of a table of the newest restores, newest first.

        A row has the step of the checkpoint, the step of the first commit after the restore, the time of each phase
        (start, read, verify and so on) and the sum of these times. Omits a phase that no restore has.
        """
        newest = self.course.returns[: -_HAPPENINGS_SHOWN - 1 : -1]
        had = {name: head for name, head in _RETURNED_SAID.items() if any(name in parts for _, parts in newest)}
        steps = {place.moment.identity: place.moment.step for place in self.course.of("commit")}
        rows = [
            [
                "" if (restored := steps.get(moment.parent)) is None else f"{restored:,}",
                f"{moment.step or 0:,}",
                *(fine_span(parts[name]) if name in parts else "" for name in had),
                fine_span(sum(parts.values())),
            ]
            for moment, parts in newest
        ]
        return ["resumed from", "first saved at", *had.values(), "together"], rows

    def data(self) -> dict[str, Any]:
        """Return the facts of the report as JSON data."""
        course = self.course
        return {
            "run_key": self.run_key,
            "checkpoint_dir": self.url,
            "wall_s": course.wall_s,
            "goodput": course.goodput,
            "seconds": course.seconds,
            "step": next((commit.moment.step for commit in reversed(course.of("commit"))), None),
            "commits": len(course.of("commit")),
            "left_behind": len(course.of("commit")) - len(course.line),
            "failed_attempts": len(course.of("failure")),
            "deaths": len(course.deaths),
            "evaluations": len(course.of("evaluation")),
            "resumes": [{"step": moment.step, **parts} for moment, parts in course.returns],
            **self.of_features[0],
            "copied": self.timeline.copied,
            "entries": {"damaged": self.timeline.damaged, "older": self.timeline.older},
        }


def _said(moment: Moment) -> tuple[str, str]:
    """Return what happened and why; for the first start of a run, "started" instead of "resumed"."""
    if moment.kind == "taken" and moment.text == NEVER_OWNED:
        return "started", ""
    return _SAID[moment.kind] + (f" at step {moment.step:,}" if moment.step is not None else ""), moment.text


def make_report(
    run_key: str | None,
    url: str,
    timeline: Timeline,
    state: State,
    kept: Mapping[str, str] | None = None,
    *,
    life: str = "",
    read_curve: Callable[[Course], Curve] = lambda course: Curve(),
) -> Report:
    """Make the report of a run; `kept` maps manifest digests to reasons, `read_curve` reads the metrics of steps."""
    course = follow(timeline.moments)
    return Report(
        run_key=run_key or "run of unknown key",
        url=url,
        timeline=timeline,
        course=course,
        checkpoints=checkpoint_rows(state, kept),
        curve=read_curve(course),
        life=life,
    )


def checkpoint_rows(state: State, kept: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Return the newest checkpoints as rows of texts, newest first; every row has the same columns."""
    newest_first = lineage(state.live)[:_CHECKPOINTS_SHOWN]
    metrics = sort_metrics({name for record in newest_first for name in record.metrics})[:_METRICS_SHOWN]
    evaluated: dict[str, dict[tuple[str, str], float]] = {}
    for record in state.evaluations:
        values = evaluated.setdefault(record.manifest_digest, {})
        values.update({(record.suite, name): value for name, value in record.metrics.items()})
    measured = sorted(
        {key for values in evaluated.values() for key in values}, key=lambda key: ("loss" not in key[1], key)
    )
    shown = measured[:_METRICS_SHOWN]

    def row(record: Checkpoint) -> dict[str, str]:
        results = evaluated.get(record.manifest_digest, {})
        return {
            "step": f"{record.step:,}",
            "saved (UTC)": record.saved_at[:19].replace("T", " "),
            **{name: number(record.metrics[name]) if name in record.metrics else "" for name in metrics},
            **{f"{s}: {name}": number(results[s, name]) if (s, name) in results else "" for s, name in shown},
            "size": size(record.size_bytes),
            "waited": fine_span(record.cost_s),
            **({} if kept is None else {"kept because": kept.get(record.manifest_digest, "")}),
            **({"": "discarded branch" if record.abandoned else ""} if any(c.abandoned for c in newest_first) else {}),
        }

    return [row(record) for record in newest_first]


# ── markdown ──────────────────────────────────────────────────────────────────────────────────────────────────────


def in_markdown(words: str) -> str:
    """Escape a text so that markdown shows it literally, on one line and in a table cell; outer spaces are lost."""
    return _MARKDOWN.sub(r"\\\g<0>", printable(words).strip())


def to_markdown(report: Report) -> str:
    """Write the report as markdown, with its pictures embedded."""
    pictures = [
        (draw_run(report.course, heading=report.run_key, curve=report.curve), "the run on a time line"),
        (draw_curves(report.curve, heading=report.run_key), "metrics by step"),
    ]
    shares = [(name, SHARES_MEAN[name], fine_span(s), percent(part)) for name, s, part in report.shares]
    return "\n\n".join(
        [
            f"## {in_markdown(report.run_key)}",
            f"**{report.summary}**",
            *(
                f"![{what}](data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()})"
                for picture, what in pictures
                if picture
            ),
            *report.caveats(),
            "### Where the time went",
            _markdown_table(("", "", "time", "part"), shares, right=2),
            *(
                ["### From each restart to the first step", _markdown_table(*report.returns(), right=0)]
                if report.course.returns
                else []
            ),
            "### In numbers",
            "\n".join(f"- {name}: {in_markdown(value[:_TEXT_SHOWN])}" for name, value in report.facts()),
            *(
                ["### What happened", _markdown_table(("when (UTC)", "", "why"), report.happenings())]
                if report.happenings()
                else []
            ),
        ]
    )


def _markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int | None = None) -> str:
    """Write a table; the columns from number `right` on contain numbers, which do not wrap."""
    first = len(head) if right is None else right
    lines = [head, ["---:" if n >= first else "---" for n in range(len(head))]]
    for row in rows:
        cells = [in_markdown(cell[:_TEXT_SHOWN]) for cell in row]
        lines.append([*cells[:first], *(cell.replace(" ", "\u00a0") for cell in cells[first:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
