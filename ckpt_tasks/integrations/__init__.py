"""Adapters for other frameworks' loops; each module imports its framework, so import only the one that you use."""
