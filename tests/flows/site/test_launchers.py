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

from tests.servers.process import free_port
from tests.support.agents import MARK, PARALLEL, left
from tests.support.ledgers import is_released, newest_step
from tools.sources import ROOT

SBATCH = ROOT / "deployments" / "train.sbatch"
# As Slurm's: a process for each task, which gets the signals that srun gets, with all its children, as where Slurm
# has no cgroups; a bad exit kills the others.
SRUN = """
import os, signal, subprocess, sys
command = [word for word in sys.argv[1:] if word != "--kill-on-bad-exit=1"]
size = int(os.environ["SLURM_NTASKS"])
places = [{"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)} for n in range(size)]
tasks = [subprocess.Popen(command, env={**os.environ, **place}, start_new_session=True) for place in places]
open(os.environ["REQUEUED"] + "-tasks", "w").write(str(tasks[0].pid))
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: [os.killpg(task.pid, number) for task in tasks])
statuses = []
while tasks:
    pid, status = os.wait()
    tasks = [task for task in tasks if task.pid != pid]
    status = os.waitstatus_to_exitcode(status)
    statuses.append(status if status >= 0 else 128 - status)
sys.exit(max(statuses))
"""
SCONTROL = """
import os, sys
print("127.0.0.1") if sys.argv[1] == "show" else open(os.environ["REQUEUED"], "a").write(sys.argv[2])
"""
# Scripts as people write them; the rows of the data have a cost, so that a test can send its signals in the middle.
DATA = """
import hashlib, sys, time
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 48
    def __getitem__(self, n):
        time.sleep(0.02)
        return torch.full((3,), n / 48)

def end(model):
    print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
"""
PLAIN = """
from ckpt_tasks import CheckpointConfig, resumable

optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(Rows(), 4, shuffle=True, num_workers=2)
config = CheckpointConfig(checkpoint_dir=sys.argv[1], step_interval=10)
loader, epochs = resumable(config, loader, range(3), model=model, optimizer=optimizer)
for epoch in epochs:
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
end(model)
"""
LIGHTNING = """
import lightning
from ckpt_tasks import CheckpointConfig, ResumableLoader
from ckpt_tasks.integrations.lightning import CkptCallback

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model
    def training_step(self, x, _): return self.net(x).square().mean()
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters())

saving = CkptCallback(CheckpointConfig(checkpoint_dir=sys.argv[1], step_interval=10))
quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
trainer = lightning.Trainer(
    max_epochs=3, accelerator="cpu", callbacks=[saving], default_root_dir=sys.argv[1] + "-own", **quiet
)
trainer.fit(Net(), ResumableLoader(Rows(), 4, shuffle=True, num_workers=2))
end(model)
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


def slurm(place: Path, *, tasks: int) -> dict[str, str]:
    """Make stand-ins for srun and scontrol; return a job's environment, in which they are found."""
    for name, source in (("srun", SRUN), ("scontrol", SCONTROL)):
        program = place / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!{sys.executable}\n{source}")
        program.chmod(0o755)
    return {
        MARK: str(place),
        "PATH": f"{place / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": str(free_port() - 20000),
        "SLURM_JOB_NAME": "ckpt-train",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "REQUEUED": str(place / "requeued"),
    }


@pytest.mark.slow
def test_a_notice_is_a_commit_and_a_new_start(tmp_path: Path, server: dict[str, str]) -> None:
    """SIGUSR1 to the script: the ranks commit one step, the job is requeued, and the next start trains to the end.

    Stand-ins for srun and scontrol start real ranks. A rank that dies has the job requeued too, for so many times.
    """
    run_dir, requeued = tmp_path / "run", tmp_path / "requeued"
    environment = {**server, **slurm(tmp_path, tasks=2)}

    def start(count: int, *, step_s: float = 0.0, told: bool = False, most: int = 20) -> int:
        plan = f'{{"step_s": {step_s}, "plan": [[15, 1, "kill"]], "folder": "{tmp_path}"}}'
        options = ["--steps", "40", "--batch-steps", "5", "--checkpoint-dir", str(run_dir), "--params", plan]
        with subprocess.Popen(
            ["bash", str(SBATCH), PARALLEL, *options],
            env={**environment, "SLURM_RESTART_COUNT": str(count), "CKPT_MOST_RESTARTS": str(most)},
        ) as job:
            while told and newest_step(run_dir) < 5:
                assert job.poll() is None
                time.sleep(0.05)
            if told:
                job.send_signal(signal.SIGUSR1)
            return job.wait(300)

    assert start(0, step_s=0.2, told=True) == 143
    assert requeued.read_text() == environment["SLURM_JOB_ID"]
    assert is_released(run_dir)
    assert 5 <= newest_step(run_dir) < 15
    requeued.unlink()
    assert start(1, most=1) != 0  # a rank is killed
    assert not requeued.exists()
    assert start(1) == 0
    assert newest_step(run_dir) == 40
    assert left(str(tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [pytest.param(PLAIN, id="plain"), pytest.param(LIGHTNING, id="lightning", marks=pytest.mark.framework)],
)
def test_any_script_goes_on_in_a_job(source: str, tmp_path: Path) -> None:
    """P69: Slurm stops a script and requeues it, kills it and requeues it; its weights are those without a stop.

    The notice reaches its loading workers too. The step is committed, no interval is due; Lightning requeues nothing.
    """
    script, run_dir, requeued = tmp_path / "train.py", tmp_path / "run", tmp_path / "requeued"
    script.write_text(DATA + source)
    environment = {"HOME": str(tmp_path), **slurm(tmp_path, tasks=1)}

    def start(count: int, *, until: int, then: signal.Signals | None = None) -> tuple[int, str]:
        with subprocess.Popen(
            ["bash", str(SBATCH), "python", str(script), str(run_dir)],
            env={**environment, "SLURM_RESTART_COUNT": str(count)},
            stdout=subprocess.PIPE,
            text=True,
        ) as job:
            while then and newest_step(run_dir) < until:
                assert job.poll() is None
                time.sleep(0.05)
            if then == signal.SIGKILL:
                os.killpg(int(Path(f"{requeued}-tasks").read_text()), then)
            elif then:
                job.send_signal(then)
            said, _ = job.communicate(timeout=100)
            return job.returncode, said[-65:]  # the digest

    status, _ = start(0, until=10, then=signal.SIGUSR1)
    told = newest_step(run_dir)
    assert status == (0 if source == LIGHTNING else 143)
    assert is_released(run_dir)
    assert told % 10
    assert requeued.read_text() == environment["SLURM_JOB_ID"]
    assert [*tmp_path.glob("*-own/hpc_ckpt*")] == []
    requeued.unlink()
    status, _ = start(1, until=told + 1, then=signal.SIGKILL)
    assert status == 128 + signal.SIGKILL
    assert requeued.read_text() == environment["SLURM_JOB_ID"]
    requeued.unlink()
    status, ended = start(2, until=0)
    assert (status, newest_step(run_dir), requeued.exists()) == (0, 36, False)
    run_dir = tmp_path / "whole"
    assert start(0, until=0) == (0, ended)
