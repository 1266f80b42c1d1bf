"""Flows for Prefect and for a terminal: training, evaluation, upkeep, and the watch over crashed runs.

`python -m flows.train` runs this file before it imports torch, and OpenMP reads its environment once, when torch loads
it. By default OpenMP's threads spin while they wait. They then take the cores that Prefect's server and worker need,
and a step takes several times as long. deployments/prefect.yaml sets the same for deployments.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
