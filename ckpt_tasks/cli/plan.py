"""`ckpt plan`: how often a run should save, computed from its own measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.facts import RunArgument
from ckpt_tasks.cli.ls import title
from ckpt_tasks.cli.output import JsonOption, Output, output, table, write_file
from ckpt_tasks.errors import CheckpointNotFoundError
from ckpt_tasks.policy.cadence import (
    OVERHEAD_CAP,
    Observed,
    Recommendation,
    TradeOff,
    recommend,
    trade_off,
    trade_off_at,
)
from ckpt_tasks.report.svg import FONTS, INK, PALE, polyline, round_ticks, text
from ckpt_tasks.report.words import count, fine_span, percent, printable

if TYPE_CHECKING:
    from ckpt_tasks.policy.space import Forecast
    from ckpt_tasks.reading.reading import Run

__all__ = ["draw_curve", "plan"]

_BAR = 28  # characters for the largest sum that is shown
_REACH, _ROWS = 8.0, 13

CapOption = Annotated[
    float,
    typer.Option(
        "--overhead-cap", metavar="SHARE", help="the largest share of its time that training may wait for saves"
    ),
]
KeepOption = Annotated[
    int | None,
    typer.Option("--max-num-checkpoints", metavar="N", min=1, help="forecast the room for so many (default: as now)"),
]
MtbfOption = Annotated[
    float | None,
    typer.Option("--mtbf-s", metavar="SECONDS", help="mean time between failures [default: the run's own]"),
]
SvgOption = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="also draw the curve into this file")]


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """Measurements and the plan; `source` of the mean time between failures: "prior", "measured" or "given"."""

    observed: Observed
    recommended: Recommendation
    source: str
    overhead_cap: float
    space: Forecast | None  # None where the store has no limit that it tells
    keeps: int | None  # as given: the ledger does not hold a run's policy

    @property
    def at(self) -> TradeOff:
        """What the recommended interval costs."""
        return trade_off_at(self.recommended.interval_s, self.observed, self.recommended.mtbf_s)


def plan(
    directory: RunArgument,
    *,
    overhead_cap: CapOption = OVERHEAD_CAP,
    mtbf_s: MtbfOption = None,
    max_num_checkpoints: KeepOption = None,
    svg: SvgOption = None,
    as_json: JsonOption = False,
) -> None:
    """Recommend how often to save.

    Computes the interval at which waiting for saves and repeating lost work cost least together, from the cost of the
    run's newest saves and its failures so far; shows what other intervals would cost.
    """
    from ckpt_tasks.ledger.observing import observe
    from ckpt_tasks.reading.reading import open_run

    with output(as_json) as out:
        run = open_run(directory)
        observed = observe(run.history)
        if observed is None:
            raise CheckpointNotFoundError(
                "the run has no checkpoint yet, so that nothing has been measured", hint="Save once, then ask again."
            )
        planned = _Planned(
            observed=observed,
            recommended=recommend(observed, overhead_cap=overhead_cap, mtbf_s=mtbf_s),
            source="given" if mtbf_s is not None else "measured" if observed.failures else "prior",
            overhead_cap=overhead_cap,
            space=_space(run, max_num_checkpoints),
            keeps=max_num_checkpoints,
        )
        if svg is not None:
            _draw(svg, run, planned)
        out.data({**_facts(run, planned), "svg": None if svg is None else str(svg)})
        if not as_json:
            _print(out, run, planned)


def _space(run: Run, max_num_checkpoints: int | None) -> Forecast | None:
    from ckpt_tasks.policy.retention import RetentionPolicy
    from ckpt_tasks.reading.room import forecast_run
    from ckpt_tasks.storage.space import free_bytes

    free = free_bytes(run.history.store)
    policy = None if max_num_checkpoints is None else RetentionPolicy(max_num_checkpoints=max_num_checkpoints)
    return None if free is None else forecast_run(run, policy, free)


def _facts(run: Run, planned: _Planned) -> dict[str, Any]:
    observed, recommended = planned.observed, planned.recommended
    return {
        "run_key": run.run_key,
        "checkpoint_dir": run.history.store.url,
        "observed": asdict(observed),
        "mtbf_s": recommended.mtbf_s,
        "mtbf_source": planned.source,
        "overhead_cap": planned.overhead_cap,
        "recommended": {**asdict(recommended), **asdict(planned.at)},
        "space": None if planned.space is None else {**asdict(planned.space), "fits": planned.space.fits},
        "curve": [asdict(point) for point in trade_off(observed, recommended)],
    }


def _draw(place: Path, run: Run, planned: _Planned) -> None:
    observed, recommended = planned.observed, planned.recommended
    costs = f"a save stalls {fine_span(observed.stall_s)} and flushes {fine_span(observed.flush_s)}"
    drawn = draw_curve(
        trade_off(observed, recommended, points=241),
        planned.at,
        recommended.least_s,
        heading=f"{printable(run.run_key or 'run of unknown key')}: what saving every so often costs",
        about=f"{costs}, failures come every {_mtbf(planned)}",
    )
    write_file(place, drawn, what="picture", option="--svg", is_ours=lambda head: not head or b"<svg" in head)


def _print(out: Output, run: Run, planned: _Planned) -> None:
    from rich.table import Table

    facts = Table.grid(padding=(0, 3))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name, value in _lines(planned):
        facts.add_row(name, value, style="bold" if name == "save every" else "")
    out.print(title(run), "", facts, _curve(planned))


def _lines(planned: _Planned) -> list[tuple[str, str]]:
    observed, recommended, at = planned.observed, planned.recommended, planned.at
    step = f"a step takes {fine_span(observed.step_s)}, " if observed.step_s else ""
    every = f"{recommended.interval_s:,.{1 if recommended.interval_s < 99.95 else 0}f} s"
    every += f" ({fine_span(recommended.interval_s)})" if recommended.interval_s >= 120 else ""
    every += f", {count(recommended.steps, 'step')}" if recommended.steps else ""
    return [
        (
            "measured",
            f"{step}training waits {fine_span(observed.stall_s)} at a save, which takes {fine_span(observed.flush_s)}",
        ),
        ("failures", f"{observed.failures} in {fine_span(observed.trained_s)} of training"),
        ("between failures", _mtbf(planned)),
        ("save every", every),
        ("because", _why(planned)),
        ("costs", f"{percent(at.overhead)} waiting for saves, {percent(at.expected_loss)} doing lost work again"),
        *([("disk", _room(planned.space, planned.keeps))] if planned.space is not None else []),
    ]


def _room(space: Forecast, keeps: int | None) -> str:
    if space.fits:
        as_now = "" if keeps else " if the run keeps as many as now (--max-num-checkpoints asks for others)"
        return f"{space.words}: enough{as_now}"
    return f"{space.words}: not enough. Keep fewer, or use another disk"


def _mtbf(planned: _Planned) -> str:
    measured = f"{count(planned.observed.failures, 'failure')} and the prior"
    source = {"prior": "prior: no failure yet", "measured": measured, "given": "given"}[planned.source]
    return f"{fine_span(planned.recommended.mtbf_s)} ({source})"


def _why(planned: _Planned) -> str:
    observed, recommended = planned.observed, planned.recommended
    if recommended.decided_by == "optimum":
        return "no other costs less (Young/Daly)"
    if recommended.decided_by == "flush":
        return f"a flush takes that long; the optimum would be {fine_span(recommended.optimum_s)}"
    least = trade_off_at(max(recommended.optimum_s, observed.flush_s), observed, recommended.mtbf_s)
    without = f"without it every {fine_span(least.interval_s)}, at {percent(least.total)} in all"
    return f"of the overhead cap of {100 * planned.overhead_cap:g} %; {without}"


def _curve(planned: _Planned) -> Any:
    from rich.text import Text

    at = planned.at
    others = trade_off(planned.observed, planned.recommended, points=_ROWS, reach=_REACH)
    apart = [point for point in others if not at.interval_s / 1.05 < point.interval_s < at.interval_s * 1.05]
    points = sorted([*apart, at], key=lambda point: point.interval_s)
    per_cell = max(point.total for point in points) / _BAR or 1.0
    columns = ("save every", "waiting", "done again", "together")
    made = table(*columns, "", right=columns)
    for point in points:
        waiting, both = round(point.overhead / per_cell), round(point.total / per_cell)
        bar = Text.assemble(("█" * waiting, "yellow"), ("▒" * (both - waiting), "red"))
        bar.append(" ◂ recommended" if point is at else "")
        shares = (percent(share) for share in (point.overhead, point.expected_loss, point.total))
        style = "bold" if point is at else "dim" if point.interval_s < planned.recommended.least_s else ""
        made.add_row(fine_span(point.interval_s), *shares, bar, style=style)
    return made


_WIDTH, _HEIGHT = 860, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 830, 84, 410  # the axes
_WAITING, _AGAIN, _TOGETHER = "#c77700", "#c0392b", "#1f4e79"
_SHOWN = 4.5  # the top of the picture, as a multiple of what the recommended interval costs
_TICKS_S = (
    *(m * 10.0**e for e in range(-4, 2) for m in (1, 3)),
    *(60.0, 180.0, 600.0, 1_800.0, 7_200.0, 21_600.0, 64_800.0),
    *(86_400.0 * m * 10**e for e in range(6) for m in (2, 6)),
)

Scale = Callable[[float], float]


def draw_curve(points: Sequence[TradeOff], recommended: TradeOff, least_s: float, *, heading: str, about: str) -> str:
    """Draw the curve and return the SVG document; intervals below `least_s`, which are not allowed, are shaded."""
    highest = min(1.0, _SHOWN * recommended.total) or 0.01
    first_s, last_s = points[0].interval_s, points[-1].interval_s

    def x(interval_s: float) -> float:
        part = math.log(max(interval_s, first_s) / first_s) / math.log(last_s / first_s)
        return _LEFT + (_RIGHT - _LEFT) * min(1.0, part)

    def y(share: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * share / highest  # what is above the frame is clipped

    curves = [
        ("waiting for saves", _WAITING, 2, [(x(p.interval_s), y(p.overhead)) for p in points]),
        ("doing lost work again", _AGAIN, 2, [(x(p.interval_s), y(p.expected_loss)) for p in points]),
        ("together", _TOGETHER, 3, [(x(p.interval_s), y(p.total)) for p in points]),
    ]
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    frame = f'x="{_LEFT}" y="{_TOP}" width="{_RIGHT - _LEFT}" height="{_BOTTOM - _TOP}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONTS}">',
        f"<title>{escape(heading)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        text(_LEFT, 30, heading, size=17, weight="bold"),
        text(_LEFT, 50, about, fill=PALE),
        *_forbidden(x(least_s) if least_s > first_s else _LEFT),
        *_grid(x, y, highest, (first_s, last_s)),
        f'<clipPath id="frame"><rect {frame}/></clipPath>',
        *(polyline(places, colour, width) for _, colour, width, places in curves),
        *_mark(x(recommended.interval_s), y(recommended.total), recommended),
        *_legend([(name, colour, width) for name, colour, width, _ in curves]),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _grid(x: Scale, y: Scale, highest: float, ends_s: tuple[float, float]) -> Iterable[str]:
    for share in round_ticks(0.0, highest):
        at = y(share)
        yield f'<path d="M{_LEFT} {at:.1f}H{_RIGHT}" stroke="#e4e4e4"/>'
        yield text(_LEFT - 10, at + 4, f"{100 * share:.4g} %", anchor="end")
    for tick_s in (tick_s for tick_s in _TICKS_S if ends_s[0] <= tick_s <= ends_s[1]):
        at = x(tick_s)
        yield f'<path d="M{at:.1f} {_BOTTOM}v6" stroke="{INK}"/>'
        yield text(at, _BOTTOM + 23, _tick(tick_s), anchor="middle")
    yield f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="{INK}"/>'
    yield text((_LEFT + _RIGHT) / 2, _BOTTOM + 52, "training between two saves", anchor="middle")
    yield text(_LEFT, _TOP - 12, "part of all time", fill=PALE)


def _forbidden(until: float) -> Iterable[str]:
    if until > _LEFT:
        yield f'<rect x="{_LEFT}" y="{_TOP}" width="{until - _LEFT:.1f}" height="{_BOTTOM - _TOP}" fill="#f1f1f1"/>'
    if until > _LEFT + 220:
        for line, words in enumerate(("shorter than a flush", "or over the cap")):
            yield text(until - 10, _TOP + 18 + 16 * line, words, anchor="end", fill=PALE, size=12)


def _mark(at_x: float, at_y: float, recommended: TradeOff) -> Iterable[str]:
    label = f"every {fine_span(recommended.interval_s)}: {percent(recommended.total)}"
    side, anchor = (10, "start") if at_x < _RIGHT - 180 else (-10, "end")
    yield f'<path d="M{at_x:.1f} {_TOP}V{_BOTTOM}" stroke="{_TOGETHER}" stroke-dasharray="4 4"/>'
    yield f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="5" fill="{_TOGETHER}"/>'
    yield text(at_x + side, _TOP + 18, label, anchor=anchor, fill=_TOGETHER, weight="bold")


def _legend(curves: Iterable[tuple[str, str, int]]) -> Iterable[str]:
    place = _RIGHT - 460
    for name, colour, width in curves:
        yield f'<path d="M{place} 68h22" stroke="{colour}" stroke-width="{width}"/>'
        yield text(place + 28, 72, name)
        place += 50 + round(7.2 * len(name))


def _tick(seconds: float) -> str:
    return fine_span(seconds).replace(".0 ", " ")
