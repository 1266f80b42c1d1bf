"""A host that runs out of memory in the middle of a restore."""

from __future__ import annotations

from pathlib import Path

from tests.support.interpreters import python

# The address space is bounded, a little wider with each try, so that other allocations fail. No thread is started:
# CPython's Thread.start() waits for ever for a thread that has no memory to begin.
_TRIES = """
import resource, sys, threading, time
from pathlib import Path
import torch
from torch import nn
from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import CkptError
from ckpt_tasks.system import System, use

class NoThread(System):
    def start_thread(self, *arguments, **more):
        raise RuntimeError("no thread")

def made(value):
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(6)])
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "value": value}

saved, target = made(1.0), made(7.0)
for parameter in saved["model"].parameters():
    parameter.grad = torch.ones_like(parameter)
saved["optimizer"].step()
with Checkpointer(CheckpointConfig(checkpoint_dir=sys.argv[1], memory_dir=None)) as ckpt:
    ckpt.save(1, saved)
use(NoThread())
run = open_run(sys.argv[1])
newest, stream = run.find("latest"), torch.get_rng_state()
while threading.active_count() > 1:
    time.sleep(0.01)  # The last one to end gives the memory of the snapshots back.
_, hard = resource.getrlimit(resource.RLIMIT_AS)
for more_mib in range(0, 600, 20):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (more_mib << 20), hard))
    try:
        run.restore(newest, target)
        said = "restored"
    except CkptError as error:
        said = type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    same = all(bool((parameter == 7.0).all()) for parameter in target["model"].parameters())
    same = same and not target["optimizer"].state and target["value"] == 7.0
    print(said, same and torch.equal(stream, torch.get_rng_state()), flush=True)
    if said == "restored":
        break
"""


def test_a_restore_without_memory_changes_nothing(run_dir: Path) -> None:
    """P57: each try that finds no memory is an error of ours, and model, optimizer and streams are as before."""
    done = python("-c", _TRIES, run_dir)
    assert done.returncode == 0, done.stderr
    *failed, last = done.stdout.splitlines()
    assert last == "restored False"
    assert len(failed) >= 2
    assert set(failed) == {"StateError True"}
