"""`python -m tools.measure` prints the figures of the structure: packages, a save, a restore, lines, names, pages."""

from __future__ import annotations

import ast
import logging
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from radon.complexity import cc_visit

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.features import FEATURES
from ckpt_tasks.testing import settle
from tools.pages.packages import ROWS, imported
from tools.sources import ROOT, files, imports, module_name, parse

_RANK_D = 21  # radon's rank D begins at this complexity.


def structure() -> Iterator[tuple[str, object]]:
    """Yield the figures of the packages and of their imports."""
    packages = {name for level, name in ROWS if level and (ROOT / "ckpt_tasks" / name).is_dir()}
    pairs = sum(len(found & packages) for name, found in imported().items() if name in packages)
    levels = {level for level, name in ROWS if level}
    yield "packages; levels; pairs that import each other", f"{len(packages)}; {len(levels)}; {pairs}"
    modules = {feature.place.partition(":")[0] for feature in FEATURES}
    named = Counter(name.rpartition(".")[0] for path in files("ckpt_tasks") for _, name in imports(parse(path)))
    yield "extensions; modules that import one of them", f"{len(modules)}; {sum(named[one] for one in modules)}"


def run_by(call: Callable[[], object], ended: Callable[[], object]) -> str:
    """Return how many functions of ours, in how many files, a call and its threads run until `ended` returns."""
    seen: set[CodeType] = set()
    ours = str(ROOT / "ckpt_tasks")

    def note(frame: FrameType, event: str, argument: Any) -> None:
        # Python 3.12 and newer run comprehensions in the frame of their function.
        is_function = frame.f_code.co_name.isidentifier() or frame.f_code.co_name == "<lambda>"
        if event == "call" and is_function and frame.f_code.co_filename.startswith(ours):
            seen.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
        ended()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return f"{len(seen)}, {len({code.co_filename for code in seen})}"


def one_save() -> Iterator[tuple[str, object]]:
    """Yield what a steady save of a model with its optimizer runs, and what its restore runs."""
    logging.getLogger("ckpt_tasks").addHandler(logging.NullHandler())
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with tempfile.TemporaryDirectory() as place:
        config = CheckpointConfig(checkpoint_dir=f"{place}/run", memory_dir=None)
        with Checkpointer(config) as ckpt:
            ckpt.restore(state)
            for step in range(1, 6):
                model(torch.ones(1, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step < 5:
                    ckpt.save(step, state)
                    settle(ckpt)
            yield "a steady save: functions, files", run_by(lambda: ckpt.save(5, state), lambda: settle(ckpt))
        with Checkpointer(config) as ckpt:
            ckpt.acquire()
            yield "a restore: functions, files", run_by(lambda: ckpt.restore(state), lambda: settle(ckpt))


def lines() -> Iterator[tuple[str, object]]:
    """Yield how many lines there are, and how complex the functions are."""
    for name, folders in {
        "lines of the product": ("ckpt_tasks", "flows", "deployments"),
        "lines of tests": ("tests",),
        "lines of benchmarks and tools": ("benchmarks", "tools"),
    }.items():
        yield name, sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files(*folders))
    functions = [one for path in files("ckpt_tasks") for one in cc_visit(path.read_text(encoding="utf-8"))]
    complex_ones = sorted(
        one.fullname for one in functions if one.complexity >= _RANK_D and not hasattr(one, "methods")
    )
    yield "functions of rank D or worse", f"{len(complex_ones)}  {', '.join(complex_ones)}"


def names() -> Iterator[tuple[str, object]]:
    """Yield the public classes and functions, and the names of files, that stand twice."""
    classes, functions, stems = defaultdict(set), defaultdict(set), defaultdict(set)
    faces = {"dcp", "tables", "programs"}
    for path in files("ckpt_tasks"):
        if path.name in {"__init__.py", "__main__.py"} or module_name(path).split(".")[1] in faces:
            continue
        stems[path.stem].add(path)
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].add(path)
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                functions[node.name].add(path)
    for what, found in {"classes": classes, "functions": functions, "file names": stems}.items():
        twice = sorted(name for name, paths in found.items() if len(paths) > 1)
        yield (
            f"public {what} twice" if what != "file names" else "file names twice",
            f"{len(twice)}  {', '.join(twice)}",
        )


def pages() -> Iterator[tuple[str, object]]:
    """Yield how many pages the docs have, and their size."""
    docs = ROOT / "docs"
    users = [*docs.glob("*.md")]
    inner = [path for path in docs.rglob("*.md") if path not in users and "decisions" not in path.parts]
    size = sum(path.stat().st_size for path in [*users, *inner])
    yield (
        "pages for users; others; decisions",
        f"{len(users)}; {len(inner)}; {len([*(docs / 'internals' / 'decisions').glob('*.md')])}",
    )
    yield "KB of pages without decisions", size // 1000


def figures() -> Iterator[tuple[str, object]]:
    """Yield every figure with its name."""
    for part in (structure, one_save, lines, names, pages):
        yield from part()


if __name__ == "__main__":
    for name, figure in figures():
        print(f"{name:50} {figure}")  # noqa: T201 (it is what this command is for)
