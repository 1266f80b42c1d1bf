"""The example program under the name that older runs know; the code is in ckpt_tasks/flows/programs/byte_lm.py."""

from ckpt_tasks.flows.programs.byte_lm import ByteLM

__all__ = ["ByteLM"]
