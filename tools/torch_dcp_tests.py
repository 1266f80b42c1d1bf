"""PyTorch's own DCP tests with its own writer and with ours: `python -m tools.torch_dcp_tests CHECKOUT [NAME …]`.

CHECKOUT is a checkout of PyTorch; only its test/distributed/checkpoint/ is read, and NAMEs are files there (default:
those that save or load through DCP's API). Each runs twice, in processes in which FileSystemWriter and FileSystemReader
are DCP's, or ours. It prints how many there are and how many pass with which, then each test that passes with DCP's
alone and why, and exits with 1 if there is one, or if no test of a file passes with either (PyTorch's tests need
expecttest). With `--cpu` first, copies run that ask for the CPU and gloo wherever a test asks for GPUs.

Every save of a test counts as one after a load, and has a step of its own: such tests have directories, and no run.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import torch.multiprocessing

from ckpt_tasks.checkpoint.restore.reading import run_of
from ckpt_tasks.dcp import CkptReader, CkptWriter
from ckpt_tasks.errors import CheckpointNotFoundError
from ckpt_tasks.integrations.dcp.holding import RestoredState, restored
from ckpt_tasks.run.ledger.config import config_of

ROOT = Path(__file__).parent.parent
NAMES = (
    "test_file_system_checkpoint_cpu.py",
    "test_file_system_checkpoint.py",
    "test_checkpoint.py",
    "test_save_load_api.py",
    "test_planner.py",
    "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py",
    "test_tp_checkpoint.py",
    "test_hsdp_checkpoint.py",
    "test_fsdp_model_state.py",
    "test_fsdp_optim_state.py",
    "test_fsdp_tp_checkpoint_conversion.py",
    "test_compatibility.py",
    "test_format_utils.py",
    "test_async_process_executor.py",
    "test_state_dict.py",
    "e2e/test_e2e_save_and_load.py",
    "e2e/test_fine_tuning.py",
    "e2e/test_pipeline.py",
    "fsdp/test_fsdp_dsd.py",
)
_ON_CPU = (
    (r"cpu:gloo,cuda:nccl", "gloo"),
    (r"cuda:(\{[^{}]*\}|\d)", "cpu"),
    (r"\.cuda\([^()]*\)", ".cpu()"),
    (r"([\"'])cuda\1", '"cpu"'),
    (r"\bnccl\b", "gloo"),
    (r"torch\.cuda\.(current_device|set_device)\([^()]*\)", 'torch.device("cpu")'),
    (r"@(skip_if_lt_x_gpu\(\w+\)|requires_nccl\(\)|requires_accelerator_dist_backend\([^()]*\))\n", "\n"),
    (r"device_id=(\w+(\.\w+)*(\([^()]*\))?)", 'device_id=torch.device("cpu")'),
    (r"min\((\d), (\w+\.)+device_count\(\)\)", r"\1"),
    (r"\bdevice=(self\.)?rank\b", 'device="cpu"'),
)
_WITH = "TORCH_DCP_TESTS_WITH"  # In the processes of the tests: `theirs` or `ours`.


def main(arguments: list[str]) -> int:
    """Run the tests both ways; return the exit status."""
    on_cpu = arguments[0] == "--cpu"
    arguments = arguments[on_cpu:]
    folder = Path(arguments[0]).resolve() / "test" / "distributed" / "checkpoint"
    worse: dict[str, str] = {}
    for name in arguments[1:] or [name for name in NAMES if (folder / name).exists()]:
        theirs, ours = (_outcomes(folder / name, which, on_cpu=on_cpu) for which in ("theirs", "ours"))
        passed = [sum(not why for why in outcomes.values()) for outcomes in (theirs, ours)]
        sys.stdout.write(f"| {name} | {len(theirs)} | {passed[0]} | {passed[1]} |\n")
        sys.stdout.flush()
        if not passed[0]:
            why = next(iter(theirs.values()), "the file has no test")
            worse[name] = f"no test of it passes with DCP's own either: {why}"
        worse |= {
            test: ours.get(test, "did not run") for test, why in theirs.items() if not why and ours.get(test, "-")
        }
    for test, why in worse.items():
        sys.stdout.write(f"{test}: {why}\n")
    return 1 if worse else 0


def _outcomes(path: Path, which: str, *, on_cpu: bool) -> dict[str, str]:
    """Run a file of tests; return for each, by its name, why it has not passed: an empty text if it has."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, _WITH: which, "OMP_NUM_THREADS": "1", "TMPDIR": scratch}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        if on_cpu:
            text = path.read_text(encoding="utf-8")
            for found, instead in _ON_CPU:
                text = re.sub(found, instead, text)
            path = Path(scratch) / path.name
            path.write_text(text, encoding="utf-8")
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "tools.torch_dcp_tests", "-p", "no:cacheprovider"]
        command += ["-o", "junit_logging=all", f"--junitxml={report}", str(path)]
        subprocess.run(command, cwd=scratch, env=environment, capture_output=True, check=False)
        outcomes = {}
        for case in ET.parse(report).iter("testcase"):
            bad = [child for child in case if child.tag in {"failure", "error", "skipped"}]
            name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
            outcomes[name] = _reason(bad[0].tag, "\n".join(case.itertext())) if bad else ""
        return outcomes


def _reason(tag: str, text: str) -> str:
    """Return the last error of ours in the output of a test and of its ranks, else the last error."""
    errors = re.findall(r"^(?:E  )? *([\w.]*(?:Error|Exception): .*)$", text, re.MULTILINE)
    ours = [line for line in errors if line.startswith("ckpt_tasks")]
    return str((ours or errors or [tag])[-1])[:300]


# ── in the processes of the tests ────────────────────────────────────────────────────────────────────────────────────


def _prepare() -> None:
    """Start processes quickly."""
    start = torch.multiprocessing.get_context
    quick = {"get_context": lambda kind=None: start("forkserver" if kind == "spawn" else kind)}
    vars(torch.multiprocessing).update(quick)
    multiprocessing.set_forkserver_preload([__name__])


def _substitute() -> None:
    """Put our writer and reader in the place of DCP's, made as theirs are: by a path."""
    from torch.distributed.checkpoint import filesystem

    importlib.import_module("torch.distributed.checkpoint.format_utils")  # It has names of its own for both.
    theirs = {filesystem.FileSystemWriter: Writer, filesystem.FileSystemReader: Reader}
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.distributed.checkpoint")]
    for module in modules:
        for name, value in [*vars(module).items()]:
            if isinstance(value, type) and value in theirs:
                setattr(module, name, theirs[value])


class ByPath:
    """A writer or reader made by a path; DCP may give it another one."""

    path: Any
    _config: Any

    def reset(self, checkpoint_id: Any = None) -> None:
        """Go to another directory."""
        super().reset(None)  # type: ignore[misc]
        if checkpoint_id is not None:
            self.path, self._config = checkpoint_id, config_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Take a path, as theirs do."""
        return bool(checkpoint_id)


class Writer(ByPath, CkptWriter):
    """Our writer, each save of which is a next step of its directory."""

    def __init__(self, path: Any, *_: Any, **__: Any):
        CkptWriter.__init__(self, path)
        self.path = path

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Choose the step."""
        self._step = int(time.time() * 100)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_global_plan(self, plans: Any) -> Any:
        """Say that the newest checkpoint has been loaded."""
        with suppress(CheckpointNotFoundError, IndexError):  # It is the first save of this directory.
            run = run_of(self._config)
            newest = run.checkpoints()[0]
            restored[run.history.store.url] = RestoredState(newest, newest.n)
        return super().prepare_global_plan(plans)


class Reader(ByPath, CkptReader):
    """Our reader."""

    def __init__(self, path: Any, *_: Any, **__: Any):
        CkptReader.__init__(self, path)
        self.path = path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
if _WITH in os.environ:
    _prepare()
    if os.environ[_WITH] == "ours":
        _substitute()
