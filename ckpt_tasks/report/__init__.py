"""A run shown to people."""
