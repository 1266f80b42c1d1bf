"""Copy runs to other places (sync, fork, export), import files of other tools, and compare checkpoints."""
