"""Adapters for the loops of others; each module imports its framework, so import the one that you use."""
