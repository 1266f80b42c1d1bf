"""Evaluate committed checkpoints: `python -m flows.evaluate`. The flow is ckpt_tasks/flows/evaluate.py."""

from ckpt_tasks.flows.evaluate import evaluate

__all__ = ["evaluate"]

if __name__ == "__main__":
    from ckpt_tasks.flows.console import main_evaluate

    raise SystemExit(main_evaluate(evaluate))
