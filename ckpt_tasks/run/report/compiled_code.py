"""The report's figures of compiled code that a run keeps (`compile_cache`)."""

from __future__ import annotations

from statistics import median
from typing import Any

from ckpt_tasks.run.ledger.goodput import Course
from ckpt_tasks.run.report.words import fine_span, size


def compiled_code(course: Course) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the newest code's size in bytes, and the median seconds of a first step with and without it; also as text.

    A note of kept code has the seconds of the first step, which built the code.
    """
    kept = [place.moment for place in course.of("compiled")]
    first_s = [parts["step_s"] for _, parts in course.returns if "compiled_s" in parts and "step_s" in parts]
    without_s = [moment.step_s for moment in kept if moment.step_s is not None]
    steps = {"with": median(first_s) if first_s else None, "without": median(without_s) if without_s else None}
    size_bytes = int(kept[-1].text) if kept and kept[-1].text.isdecimal() else 0
    data = {"size_bytes": size_bytes, "with_s": steps["with"], "without_s": steps["without"]}
    took = [f"{fine_span(steps['with'])} with it"] if steps["with"] is not None else []
    took += [f"{fine_span(steps['without'])} without"] if steps["without"] is not None else []
    text = f"{size(size_bytes)} kept; first step: {', '.join(took)}"
    return {"compiled": data}, [("compiled code", text)] if size_bytes else []
