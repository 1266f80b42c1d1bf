"""Train a program as a flow that may be killed at any time: `python -m flows.train` does what `ckpt train` does.

The flow is in ckpt_tasks/flows/train.py. It finds the program, cuts the run into batches of steps, and gives each batch
to a task that restores if needed, trains, and ends with a commit. However the flow ends, the next flow run continues.
"""

from ckpt_tasks.flows.train import TrainResult, train

__all__ = ["TrainResult", "train"]

if __name__ == "__main__":
    from ckpt_tasks.cli import main

    main("train")
