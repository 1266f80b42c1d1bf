"""Verify a run, apply its retention policy, and prune."""
