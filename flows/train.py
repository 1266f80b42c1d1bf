"""Train a program as a flow that may be killed at any time: `python -m flows.train` does what `ckpt train` does.

The flow is one page: ckpt_tasks/flows/train.py. It finds the program, cuts the run into batches of steps, and gives
each to a task that restores if it has to, trains, and ends with a commit. However it ends, the next flow run continues.
"""

from ckpt_tasks.flows.train import TrainResult, train

__all__ = ["TrainResult", "train"]

if __name__ == "__main__":
    from ckpt_tasks.cli import main

    main("train")
