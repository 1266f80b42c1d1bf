"""Open, verify and restore committed checkpoints."""
