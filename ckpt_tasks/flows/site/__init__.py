"""Set up a Prefect server so that runs resume by themselves."""

TAG = "ckpt-tasks"  # Flow runs of deployments with this tag are resumed.
