"""The flows of a checkout: `ckpt_tasks.flows`, for `python -m flows.train` and for older deployments."""

import ckpt_tasks.flows  # noqa: F401  # sets how OpenMP's threads wait, before torch reads it
