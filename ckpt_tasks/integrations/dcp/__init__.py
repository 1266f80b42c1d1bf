"""torch.distributed.checkpoint (DCP): a StorageWriter and a StorageReader of a run."""
