"""One run's directory: its history, its owner, and what was observed in it."""
