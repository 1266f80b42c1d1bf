"""Verify and prune a run. The code is in ckpt_tasks/flows/upkeep.py."""

from ckpt_tasks.flows.upkeep import upkeep

__all__ = ["upkeep"]
