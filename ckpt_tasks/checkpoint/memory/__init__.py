"""Copies of the state in host memory that outlive the process."""
