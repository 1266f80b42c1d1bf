"""Prove that a program goes on bit for bit: train it, kill it, resume it, compare."""
