"""Ray Train: one worker that reports checkpoints, and a run that goes on under the same name."""

from __future__ import annotations

import os
import tempfile

os.environ |= {
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
    "RAY_USAGE_STATS_ENABLED": "0",
}
import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer

from tests.comparison.shared import DIRECTORY, EVERY, STEPS, Steps, optimizer_of, prepare, shuffled, train_step


def train() -> None:
    """Train as a worker does."""
    net, data = prepare()
    optimizer, done = optimizer_of(net), 0
    found = ray.train.get_checkpoint()
    if found:
        with found.as_directory() as directory:
            saved = torch.load(os.path.join(directory, "state.pt"))
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    said = Steps(done)
    while done < STEPS:
        for batch in shuffled(data):
            train_step(net, optimizer, batch)
            done += 1
            if done % EVERY == 0:
                with tempfile.TemporaryDirectory() as directory:
                    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
                    torch.save(state, os.path.join(directory, "state.pt"))
                    ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(directory))
            said.step()
            if done == STEPS:
                break
    said.end(net)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        scaling_config=ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(
            name="run", storage_path=DIRECTORY, checkpoint_config=ray.train.CheckpointConfig(num_to_keep=3)
        ),
    )
    trainer.fit()
