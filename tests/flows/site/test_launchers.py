"""The files for schedulers that start the ranks themselves: Slurm, JobSet and Kubeflow Trainer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from ckpt_tasks import open_run
from ckpt_tasks.errors import CkptError
from tests.servers.process import free_port
from tests.support.agents import MARK, PARALLEL, left
from tools.sources import ROOT

SBATCH = ROOT / "deployments" / "train.sbatch"
# As Slurm's: a process for each task, which gets the signals that srun gets; a bad exit kills the others.
SRUN = """
import os, signal, subprocess, sys
command = [word for word in sys.argv[1:] if word != "--kill-on-bad-exit=1"]
size = int(os.environ["SLURM_NTASKS"])
places = [{"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)} for n in range(size)]
tasks = [subprocess.Popen(command, env={**os.environ, **place}) for place in places]
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: [task.send_signal(number) for task in tasks])
statuses = []
while tasks:
    pid, status = os.wait()
    tasks = [task for task in tasks if task.pid != pid]
    statuses.append(os.waitstatus_to_exitcode(status) % 256)
sys.exit(max(statuses))
"""
SCONTROL = """
import os, sys
print("127.0.0.1") if sys.argv[1] == "show" else open(os.environ["REQUEUED"], "a").write(sys.argv[2])
"""


def documents(name: str) -> list[Any]:
    return [*yaml.safe_load_all((ROOT / "deployments" / name).read_text())]


def arguments(container: dict[str, Any]) -> dict[str, str]:
    words = [*container["command"], *container.get("args", [])]
    return dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))


def test_a_jobset_has_a_rank_for_each_device() -> None:
    """Each pod starts torchrun with its number, all know the first one's name, and one that fails restarts all.

    Read: jobset.x-k8s.io/v1alpha2 of kubernetes-sigs/jobset at 08dfbdfd. Its schema, 800 KiB, is not kept; the whole
    file was checked against it, with unknown fields refused.
    """
    [jobset] = documents("jobset.yaml")
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    [job] = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    given = arguments(container)
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"] == int(given["nnodes"])
    assert given["master-addr"] == f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    assert int(given["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert (spec["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert given["node-rank"] == f"$({container['env'][0]['name']})"
    assert "job-completion-index" in container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"]
    assert_trains(container["command"], container, pod)


def test_a_trainjob_has_a_rank_for_each_device() -> None:
    """Its runtime is one of torch, restarts all nodes if one fails, and is the one that the job names.

    Read: trainer.kubeflow.org/v1alpha1 of kubeflow/trainer at 8c0f5059; see above.
    """
    runtime, job = documents("trainjob.yaml")
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert {one["apiVersion"] for one in (runtime, job)} == {"trainer.kubeflow.org/v1alpha1"}
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    assert "torch" in runtime["spec"]["mlPolicy"]
    assert runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] > 0
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    trainer, pod = job["spec"]["trainer"], node["template"]["spec"]["template"]["spec"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert_trains([*trainer["command"], *trainer["args"]], pod["containers"][0], pod)


def assert_trains(words: list[str], container: dict[str, Any], pod: dict[str, Any]) -> None:
    assert words[0] == "torchrun"
    assert re.search(r"-m ckpt_tasks train ckpt_tasks\.\S+ --steps=\d+ --checkpoint-dir=s3://", " ".join(words))
    assert pod["terminationGracePeriodSeconds"] >= 60
    assert [each["mountPath"] for each in container["volumeMounts"]] == ["/dev/shm"]
    assert [each["emptyDir"]["medium"] for each in pod["volumes"]] == ["Memory"]


def test_the_batch_script_asks_for_a_notice() -> None:
    """Bash can read it; it is requeued, and told two minutes before its end."""
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    options = re.findall(r"^#SBATCH (\S+)$", SBATCH.read_text(), re.MULTILINE)
    assert {"--requeue", "--signal=B:USR1@120"} <= {*options}


def newest(run_dir: Path) -> int:
    try:
        return open_run(str(run_dir)).find("latest").step
    except CkptError:
        return -1


@pytest.mark.slow
def test_a_notice_is_a_commit_and_a_new_start(tmp_path: Path, server: dict[str, str]) -> None:
    """SIGUSR1 to the script: the ranks commit one step, the job is requeued, and the next start trains to the end.

    Stand-ins for srun and scontrol start real ranks. A rank that dies has the job requeued too, for so many times.
    """
    for name, source in (("srun", SRUN), ("scontrol", SCONTROL)):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!{sys.executable}\n{source}")
        program.chmod(0o755)
    run_dir, requeued = tmp_path / "run", tmp_path / "requeued"
    environment = {
        **server,
        MARK: str(tmp_path),
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": str(free_port() - 20000),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "REQUEUED": str(requeued),
    }

    def start(count: int, *, step_s: float = 0.0, told: bool = False, most: int = 20) -> int:
        plan = f'{{"step_s": {step_s}, "plan": [[15, 1, "kill"]], "folder": "{tmp_path}"}}'
        options = ["--steps", "40", "--batch-steps", "5", "--checkpoint-dir", str(run_dir), "--params", plan]
        with subprocess.Popen(
            ["bash", str(SBATCH), PARALLEL, *options],
            env={**environment, "SLURM_RESTART_COUNT": str(count), "CKPT_MOST_RESTARTS": str(most)},
        ) as job:
            while told and newest(run_dir) < 5:
                assert job.poll() is None
                time.sleep(0.05)
            if told:
                job.send_signal(signal.SIGUSR1)
            return job.wait(300)

    assert start(0, step_s=0.2, told=True) == 143
    assert requeued.read_text() == environment["SLURM_JOB_ID"]
    owner = open_run(str(run_dir)).head().state.owner
    assert owner is not None
    assert owner.released
    assert 5 <= newest(run_dir) < 15
    requeued.unlink()
    assert start(1, most=1) != 0  # a rank is killed
    assert not requeued.exists()
    assert start(1) == 0
    assert newest(run_dir) == 40
    assert left(str(tmp_path)) == []
