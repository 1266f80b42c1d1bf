"""Runs to other places: sync, fork, export, and comparisons; and files of others to import."""
