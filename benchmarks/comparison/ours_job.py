"""ckpt-tasks in a loop of one's own."""

from __future__ import annotations

from benchmarks.comparison.shared import BATCH, DIRECTORY, EVERY, STEPS, Steps, optimizer_of, prepare, train_step
from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableLoader

net, data = prepare()
optimizer = optimizer_of(net)
loader = ResumableLoader(data, batch_size=BATCH, shuffle=True)
state = {"model": net, "optimizer": optimizer, "data": loader}
config = CheckpointConfig(
    checkpoint_dir=DIRECTORY,
    step_interval=EVERY,
    memory_dir=None,  # what is damaged on storage would not be looked at: memory survives a kill
)
with Checkpointer(config) as ckpt:
    step = ckpt.restore(state)
    said = Steps(step)
    while step < STEPS:
        for batch in loader:
            train_step(net, optimizer, batch)
            step += 1
            ckpt.step(step, state)
            said.step()
            if step == STEPS:
                break
said.end(net)
