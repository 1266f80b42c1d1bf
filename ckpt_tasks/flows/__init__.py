"""Flows for Prefect and for a terminal: training, evaluation, upkeep, and the watch over crashed runs.

`ckpt train` and a worker run this file before they import torch: OpenMP reads its environment once, when torch loads
OpenMP. By default OpenMP's threads spin while they wait: they take the cores that Prefect's server and worker need,
and a step takes several times as long. deploying/prefect.yaml sets the same variable for deployments.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
