"""Saves in the background of training are held up in several files of tests."""

from __future__ import annotations

from tests.support.pipelines import clock, gate

__all__ = ["clock", "gate"]
