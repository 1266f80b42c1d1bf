"""What a server needs, so that runs resume by themselves."""

TAG = "ckpt-tasks"  # of the deployments whose flow runs are resumed
