"""Benchmarks: every figure is a ratio to a peer or to a limit, taken side by side in one run."""
