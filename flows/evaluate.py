"""Evaluate committed checkpoints: `python -m flows.evaluate` does what `ckpt evaluate` does."""

from ckpt_tasks.flows.evaluate import evaluate

__all__ = ["evaluate"]

if __name__ == "__main__":
    from ckpt_tasks.cli import main

    main("evaluate")
