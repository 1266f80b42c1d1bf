"""What a server needs, so that runs resume by themselves."""

TAG = "ckpt-tasks"  # The deployments with this tag have their flow runs resumed.
