"""Processes that are killed here report to a real server: an embedded one would be killed and orphaned with them."""

from tests.flows.conftest import server

__all__ = ["server"]
