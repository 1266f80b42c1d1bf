"""PyTorch's own DCP tests with its own writer and with ours: `python tools/torch_dcp_tests.py CHECKOUT [NAME …]`.

CHECKOUT is a checkout of PyTorch of the version that is installed; only its test/distributed/checkpoint/ is read, and
NAMEs are files there (default: those that write or read files by DCP's API). Each runs twice, in processes in which
FileSystemWriter and FileSystemReader are DCP's or ours. It prints what passed with which, and exits with 1 where a test
passes with DCP's and not with ours. Every save of a test counts as one after a load: such tests have no run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parent.parent
NAMES = (
    "test_file_system_checkpoint_cpu.py",
    "test_file_system_checkpoint.py",
    "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py",
    "test_tp_checkpoint.py",
    "test_planner.py",
    "test_save_load_api.py",
    "test_checkpoint.py",
    "test_nested_dict.py",
    "test_traverse.py",
    "test_utils.py",
    "test_dedup_tensors.py",
    "e2e/test_e2e_save_and_load.py",
)
_PATCH = '''
import os, time
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem
from ckpt_tasks.dcp import CkptReader, CkptWriter
from ckpt_tasks.dcp.holding import Restored, config_of, restored
from ckpt_tasks.errors import CkptError
from ckpt_tasks.reading.reading import run_of


class Writer(CkptWriter):
    """Ours, made as theirs is: by a path, each save of which is a next step."""

    def __init__(self, path, *args, **kwargs):
        super().__init__(path, step=0)
        self.path = path

    def reset(self, checkpoint_id=None):
        super().reset(None)
        if checkpoint_id is not None:
            self.path, self._config = checkpoint_id, config_of(checkpoint_id)
        self._step = int(time.time() * 100)

    def prepare_global_plan(self, plans):
        try:
            newest = run_of(self._config).checkpoints()[0]
            restored[run_of(self._config).history.store.url] = Restored(newest, newest.n)
        except (CkptError, IndexError):
            pass
        return super().prepare_global_plan(plans)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return filesystem.FileSystem.validate_checkpoint_id(checkpoint_id)


class Reader(CkptReader):
    """Ours, made as theirs is: by a path."""

    def __init__(self, path, *args, **kwargs):
        super().__init__(path)
        self.path = path

    def reset(self, checkpoint_id=None):
        super().reset(None)
        if checkpoint_id is not None:
            self.path, self._config = checkpoint_id, config_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return filesystem.FileSystem.validate_checkpoint_id(checkpoint_id)


for module in (dcp, filesystem, _storage_utils):
    module.FileSystemWriter, module.FileSystemReader = Writer, Reader
'''


def main(arguments: list[str]) -> int:
    """Run the tests both ways; return the exit status."""
    folder = Path(arguments[0]) / "test" / "distributed" / "checkpoint"
    worse = 0
    for name in arguments[1:] or [name for name in NAMES if (folder / name).exists()]:
        theirs, ours = (_outcomes(folder / name, patch) for patch in ("", _PATCH))
        lost = [test for test, outcome in theirs.items() if outcome == "passed" != ours.get(test)]
        passed = [sum(outcome == "passed" for outcome in outcomes.values()) for outcomes in (theirs, ours)]
        sys.stdout.write(f"| {name} | {len(theirs)} | {passed[0]} | {passed[1]} | {', '.join(lost)} |\n")
        worse += len(lost)
    return 1 if worse else 0


def _outcomes(path: Path, patch: str) -> dict[str, str]:
    """Run a file of tests; return the outcome of each, by its name."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "sitecustomize.py").write_text(patch, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": f"{scratch}:{ROOT}", "OMP_NUM_THREADS": "1"}
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(path)]
        subprocess.run(command, cwd=scratch, env=environment, capture_output=True, check=False)
        outcomes = {}
        for case in ET.parse(report).iter("testcase"):
            bad = [child.tag for child in case if child.tag in {"failure", "error", "skipped"}]
            outcomes[f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"] = bad[0] if bad else "passed"
        return outcomes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
