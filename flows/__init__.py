"""The flows in a checkout: `ckpt_tasks.flows`, under the names of `python -m flows.train` and of deployments."""

import ckpt_tasks.flows  # noqa: F401  # it says how OpenMP's threads wait, and torch reads that once
