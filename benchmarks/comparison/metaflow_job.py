"""Metaflow with its extension's @checkpoint. A new run takes the newest checkpoint of the step with "eager"."""

from __future__ import annotations

import os

from benchmarks.comparison.shared import DIRECTORY, EVERY, STEPS, Steps, optimizer_of, prepare, shuffled, train_step

os.environ |= {
    "METAFLOW_DATASTORE_SYSROOT_LOCAL": DIRECTORY,
    "METAFLOW_DEFAULT_DATASTORE": "local",
    "METAFLOW_DEFAULT_METADATA": "local",
    "METAFLOW_USER": "comparison",
}
import torch
from metaflow import FlowSpec, checkpoint, current, step


class ComparisonFlow(FlowSpec):
    @step
    def start(self) -> None:
        self.next(self.train)

    @checkpoint(load_policy="eager")
    @step
    def train(self) -> None:
        net, data = prepare()
        optimizer, done = optimizer_of(net), 0
        if current.checkpoint.is_loaded:
            saved = torch.load(os.path.join(current.checkpoint.directory, "state.pt"))
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            done = saved["step"]
        said = Steps(done)
        file = os.path.join(current.checkpoint.directory, "state.pt")
        while done < STEPS:
            for batch in shuffled(data):
                train_step(net, optimizer, batch)
                done += 1
                if done % EVERY == 0:
                    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": done}, file)
                    current.checkpoint.save()
                said.step()
                if done == STEPS:
                    break
        said.end(net)
        self.next(self.end)

    @step
    def end(self) -> None:
        pass


if __name__ == "__main__":
    ComparisonFlow()
