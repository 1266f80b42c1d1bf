"""Resume crashed flow runs that the automations missed. The code is in ckpt_tasks/flows/watch.py."""

from ckpt_tasks.flows.watch import watch

__all__ = ["watch"]
