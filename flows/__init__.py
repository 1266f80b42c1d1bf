"""The flows of a checkout: `ckpt_tasks.flows`, for `python -m flows.train` and for older deployments."""

import ckpt_tasks.flows  # noqa: F401  # it says how OpenMP's threads wait, and torch reads that once
