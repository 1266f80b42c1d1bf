"""Verify and prune a run. The flow is ckpt_tasks/flows/upkeep.py."""

from ckpt_tasks.flows.upkeep import upkeep

__all__ = ["upkeep"]
