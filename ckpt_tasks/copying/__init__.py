"""Runs to other places: sync, fork, export, and comparisons."""
