"""The example program under the name that runs have recorded: `ckpt_tasks.programs.byte_lm:ByteLM`."""

from ckpt_tasks.flows.programs.byte_lm import ByteLM

__all__ = ["ByteLM"]
