"""Prove that a program resumes bit for bit: train it, kill it, resume it, compare."""
