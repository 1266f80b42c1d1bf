"""What torch.compile has built is kept in the run, and brought back on another host of its kind; never else."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.checkpoint.extensions.compiled import kind_of_host
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import Compiled, compiled_name, parse_compiled
from ckpt_tasks.process import close_descriptor
from ckpt_tasks.storage import held_directory
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import FaultyStore, located, settle
from tests.support.cli_runs import ckpt, flip
from tests.support.sweeps import quick_first

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_PROGRAM = """
import os, signal, sys, torch
from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.testing import settle
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = {"model": model, "optimizer": optimizer}
options = {"step_interval": 1, "memory_dir": None, "compile_cache": sys.argv[2] == "on"}
config = CheckpointConfig(checkpoint_dir=sys.argv[1], **options)
with Checkpointer(config) as ckpt:
    for step in range(ckpt.restore(state) + 1, 7):
        optimizer.zero_grad()
        compiled(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        ckpt.step(step, state)
        ckpt.wait()
        if f"die {step}" in sys.argv[3:]:
            settle(ckpt)
            os.kill(os.getpid(), signal.SIGKILL)
from torch._dynamo.utils import counters
print(counters["inductor"]["fxgraph_cache_miss"], [p.tolist() for p in model.parameters()])
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that makes this process a new one, on the host of a name: its /tmp, and what it holds."""
    before = dict(held_directory.held_here)

    def move(name: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
        monkeypatch.delenv(_VARIABLE, raising=False)
        _forget()

    yield move
    _forget()
    held_directory.held_here.update(before)


def _forget() -> None:
    """Let go of every directory, as the kernel does for a process that ends."""
    for lock in held_directory.held_here.values():
        close_descriptor(lock)
    held_directory.held_here.clear()


def built() -> Path:
    """Return the directory in which torch would build now."""
    return Path(os.environ[_VARIABLE])


def opened(where: Any, **options: Any) -> Checkpointer:
    return Checkpointer(CheckpointConfig(checkpoint_dir=where, memory_dir=None, **{"compile_cache": True, **options}))


def train(where: Any, step: int, *files: str, **options: Any) -> dict[str, bytes]:
    """Restore and save one step, in which `files` are built; return the files that were there before."""
    state = {"step": step}
    with opened(where, **options) as ckpt:
        ckpt.restore(state)
        place = built()
        found = {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}
        for name in files:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(name.encode() * 100)
        ckpt.save(step, state)
    return {name: content for name, content in found.items() if not name.startswith(".")}


def packs(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "compiled").glob("*")) if (run_dir / "compiled").exists() else []


@pytest.mark.slow
def test_a_killed_program_does_not_compile_again(run_dir: Path, tmp_path: Path) -> None:
    """On a host that never compiled it, all graphs come from the run, and the end is bit for bit that of no kill."""

    def train_in(host: str, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / host).mkdir()
        environment = {k: v for k, v in os.environ.items() if k != _VARIABLE} | {"TMPDIR": str(tmp_path / host)}
        command = [sys.executable, "-c", _PROGRAM, str(where), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert train_in("first", run_dir, "on", "die 2").returncode == -signal.SIGKILL
    assert train_in("second", run_dir, "on", "die 4").returncode == -signal.SIGKILL
    last = train_in("third", run_dir, "on")
    assert last.returncode == 0, last.stderr
    twin = train_in("fourth", tmp_path / "twin", "off")
    assert twin.returncode == 0, twin.stderr
    misses, _, values = last.stdout.partition(" ")
    assert (misses, values) == ("0", twin.stdout.partition(" ")[2])
    assert int(twin.stdout.partition(" ")[0]) > 0
    assert len(packs(run_dir)) == 1
    facts = ckpt("report", run_dir, "--json", "--out", tmp_path / "r.html").data["compiled"]
    assert facts["with_s"] < facts["without_s"]
    assert [
        row["compiled_s"] > 0 for row in ckpt("report", run_dir, "--json", "--out", tmp_path / "r.html").data["resumes"]
    ]


def test_code_is_brought_to_another_host(run_dir: Path, host: Any) -> None:
    """What was built before the first commit is there on a new host; locks and hidden files are not. Once is enough."""
    host("one")
    assert train(run_dir, 1, "ab/kernel.so", "fxgraph/x/y", "locks/k.lock", "ab/.1.tmp") == {}
    [kept] = packs(run_dir)
    host("two")
    found = train(run_dir, 2)
    assert found == {name: name.encode() * 100 for name in ("ab/kernel.so", "fxgraph/x/y")}
    assert packs(run_dir) == [kept]
    parsed = parse_compiled(f"compiled/{kept.name}")
    assert parsed is not None
    assert (parsed.digest, parsed.kind) == (digest_hex(kept.read_bytes()), kind_of_host())


_TABLE = b'[["../escaped",7]]'


@pytest.mark.parametrize("damage", quick_first(["flipped", "empty", "not a pack", "leads out"], 2))
def test_damaged_code_is_a_warning(
    damage: str, run_dir: Path, host: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of it is brought back and nothing is written elsewhere; what is built anew is kept."""
    host("one")
    train(run_dir, 1, "a/1")
    [kept] = packs(run_dir)
    if damage == "flipped":
        flip(kept, kept.stat().st_size - 1)
    elif damage == "empty":
        os.truncate(kept, 0)
    else:
        kept.unlink()
        data = b"noise" if damage == "not a pack" else b"ckpt-pack 1 %d\n%s" % (len(_TABLE), _TABLE) + b"payload"
        LocalStore(run_dir).put(compiled_name(Compiled(1, kind_of_host(), digest_hex(data))), [data])
    host("two")
    assert train(run_dir, 2, "a/2") == {}
    assert "builds anew" in caplog.text
    assert not list(tmp_path.rglob("*escaped*"))
    host("three")
    assert set(train(run_dir, 3)) == {"a/2"}


@pytest.mark.parametrize("verb", ["put", "names"])
def test_a_store_that_fails_is_a_warning(verb: Any, run_dir: Path, host: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever request for compiled code fails, steps are saved and restored; the next commit tries again."""
    store = FaultyStore(LocalStore(run_dir))
    store.on("refused", verb=verb, name="compiled/")
    host("one")
    train(located(store), 1, "a/1")
    with caplog.at_level(logging.WARNING):
        train(located(store), 2, "a/2")
    with opened(run_dir, compile_cache=False) as ckpt:
        assert ckpt.restore({"step": 0}) == 2
    store.off()
    host("two")
    train(run_dir, 3, "a/3")
    host("three")
    assert "a/3" in train(run_dir, 4)


@pytest.mark.parametrize(
    "why", quick_first(["the option is off", "set by the user", "others can write there", "too large"], 2)
)
def test_where_it_may_not_be_nothing_is_kept(
    why: str, host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch's directory stays what it was, and a warning says why, unless nobody has asked."""
    host("one")
    run_dir = tmp_path / "run"
    mine = str(tmp_path / "mine") if why == "set by the user" else None
    if mine:
        monkeypatch.setenv(_VARIABLE, mine)
    if why == "others can write there":  # somebody could place code
        (base := tmp_path / "one" / f"ckpt-compiled-{os.getuid()}").mkdir()
        base.chmod(0o777)
    if why == "too large":
        monkeypatch.setattr("ckpt_tasks.checkpoint.extensions.compiled.MAX_PACK_BYTES", 100)
        train(run_dir, 1, "a/1")
    else:
        with opened(run_dir, compile_cache=why != "the option is off") as ckpt:
            ckpt.save(1, {"step": 1})
        assert os.environ.get(_VARIABLE) == mine
    assert packs(run_dir) == []
    says = {"set by the user": "no effect", "too large": "is not kept", "the option is off": ""}
    assert says.get(why, "not a directory of this user's alone") in caplog.text


def test_what_a_compiler_writes_is_not_packed(run_dir: Path, host: Any) -> None:
    """While a lock of torch is held, nothing is kept; after the next commit everything is."""
    host("one")
    state = {"step": 1}
    with opened(run_dir) as ckpt:
        ckpt.restore(state)
        (built() / "locks").mkdir()
        (built() / "a.so").write_bytes(b"half")
        with (built() / "locks" / "a.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            ckpt.save(1, state)
            settle(ckpt)
            assert packs(run_dir) == []
        ckpt.save(2, state)
    assert len(packs(run_dir)) == 1
