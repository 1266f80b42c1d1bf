"""Hugging Face's Trainer with its own directories, and `resume_from_checkpoint`."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.comparison.shared import BATCH, DIRECTORY, EVERY, STEPS, Steps, prepare


class Saying(TrainerCallback):
    """Times from one step's start to the next: the save is in it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.said = Steps(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step > self.said.done:
            self.said.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step > self.said.done:
            self.said.step()


net, data = prepare()
rows = [{"x": x, "y": y} for x, y in zip(*data.tensors, strict=True)]
saying = Saying()
args = TrainingArguments(
    DIRECTORY,
    max_steps=STEPS,
    save_steps=EVERY,
    save_total_limit=3,
    per_device_train_batch_size=BATCH,
    label_names=["y"],
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model=net, args=args, train_dataset=rows, callbacks=[saying])
trainer.train(resume_from_checkpoint=get_last_checkpoint(DIRECTORY))  # type: ignore[no-untyped-call]
saying.said.end(net)
