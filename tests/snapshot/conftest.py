"""Saves behind training's back are held up in tests of memory, too."""

from __future__ import annotations

from tests.support.pipelines import gate

__all__ = ["gate"]
