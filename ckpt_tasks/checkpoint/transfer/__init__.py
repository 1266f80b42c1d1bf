"""Copy runs and checkpoints to other locations (sync, fork, export), and compare checkpoints."""
