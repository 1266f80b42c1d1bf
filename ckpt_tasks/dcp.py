"""Checkpoints of a run for torch.distributed.checkpoint (DCP): a StorageWriter and a StorageReader."""

from ckpt_tasks.integrations.dcp.reader import CkptReader
from ckpt_tasks.integrations.dcp.writer import CkptWriter

__all__ = ["CkptReader", "CkptWriter"]
