"""Numbers as people read them: sizes, ages, durations, metrics; they live with the pages, which show the same."""

from __future__ import annotations

from ckpt_tasks.pages.words import age, count, number, size, span, when

__all__ = ["age", "count", "number", "size", "span", "when"]
