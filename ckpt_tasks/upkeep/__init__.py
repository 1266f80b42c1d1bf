"""Verify, retain, prune."""
