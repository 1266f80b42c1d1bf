"""Evaluate committed checkpoints: `python -m flows.evaluate` is `ckpt evaluate`, by ckpt_tasks/flows/evaluate.py."""

from ckpt_tasks.flows.evaluate import evaluate

__all__ = ["evaluate"]

if __name__ == "__main__":
    from ckpt_tasks.cli import main

    main("evaluate")
