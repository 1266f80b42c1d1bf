"""The flows of a checkout: `ckpt_tasks.flows`, for `python -m flows.train` and for older deployments."""

import ckpt_tasks.flows  # noqa: F401  # This sets OMP_WAIT_POLICY before torch is imported.
