"""A folder is a floor: what stands on a floor imports from the floors below it only."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.pages.floors import ROWS, behind
from tools.sources import ROOT, files, imports, module_name, parse, walk, where

LEVELS = {floor: level for level, floor in ROWS}
TOP = max(LEVELS.values()) + 1  # what a checkout has above the package

# Who may import what; a name that is not listed may be imported anywhere.
ALLOWED = {
    "prefect": ("ckpt_tasks.flows.prefect", "ckpt_tasks.flows", "ckpt_tasks.flows.site", "ckpt_tasks.cli.doctor"),
    "fsspec": ("ckpt_tasks.storage.objects",),
    "s3fs": ("ckpt_tasks.storage.objects",),
    "tenacity": ("ckpt_tasks.storage.retrying",),
    "pyarrow": ("ckpt_tasks.format.layout",),
    "safetensors": (),  # a dev dependency: the tests read with it what format/ wrote
    "typer": ("ckpt_tasks.cli",),
    "pickle": (),
    "cloudpickle": (),
    "dill": (),
    "marshal": (),
    "shelve": (),
}
# Pure decisions and pure bytes; and programs are what a user writes, plain PyTorch.
FORBIDDEN = {
    "ckpt_tasks.format.policy": ("torch", "prefect"),
    "ckpt_tasks.format": ("torch", "prefect"),
    "ckpt_tasks.format.layout": ("torch", "prefect"),
    "ckpt_tasks.flows.programs": ("prefect",),
}

SHIPPED = files("ckpt_tasks", "flows", "deployments")


def within(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


def level_of(module: str) -> int | None:
    """Return the level of a dotted name, or None for what is neither ours nor a floor (the package itself is none)."""
    first, _, rest = module.partition(".")
    if first in {"flows", "deployments"}:
        return TOP
    return LEVELS.get(rest.partition(".")[0], TOP) if first == "ckpt_tasks" and rest else None


def floor_of(module: str) -> str:
    return module.split(".")[1] if module.startswith("ckpt_tasks.") else "flows"


def upward(path: Path) -> list[str]:
    module = module_name(path)
    own = level_of(module)
    if own is None:  # the package itself names every public module, lazily
        return []
    wrong = []
    for line, name in imports(parse(path)):
        target = behind(name)
        if target == "ckpt_tasks.__version__":
            continue
        level = TOP + 1 if name.startswith(".") else level_of(target)  # relative: the floor would not be in sight
        if level is not None and (level > own or (level == own and floor_of(target) != floor_of(module))):
            wrong.append(f"{where(path, line)}: {module} imports {name}")
    return wrong


def test_imports_point_down() -> None:
    """No module imports from a floor above its own, nor from a neighbour on the same level."""
    wrong = [line for path in SHIPPED for line in upward(path)]
    assert wrong == [], "import from a lower floor only: docs/ARCHITECTURE.md has the levels"


def test_the_page_has_every_floor_once_from_the_top_down() -> None:
    """The table of docs/ARCHITECTURE.md names no floor twice, and no floor stands below a lower one."""
    assert len(ROWS) == len({floor for _, floor in ROWS})
    assert [level for level, _ in ROWS] == sorted((level for level, _ in ROWS), reverse=True)


def test_every_folder_is_a_floor() -> None:
    """The floors of the page are the folders of the package, so that a new folder cannot escape the rule."""
    paths = [path for path in files("ckpt_tasks") if path.parent != ROOT / "ckpt_tasks"]
    alone = {"checked", "errors", "logs", "system", "testing"}
    assert {module_name(path).split(".")[1] for path in paths} | alone == {*LEVELS}, (
        "a new folder needs a row in the table of docs/ARCHITECTURE.md"
    )
    assert {path.stem for path in (ROOT / "ckpt_tasks").glob("*.py")} == {"__init__", "__main__", *alone}


def test_the_tests_mirror_the_rooms() -> None:
    """Every room has its folder of tests, and CONTRIBUTING.md names each other folder of tests/."""
    floors = {path.name for path in (ROOT / "ckpt_tasks").iterdir() if (path / "__init__.py").exists()}
    tested = {path.relative_to(ROOT / "tests").parts[0] for path in files("tests") if path.name.startswith("test_")}
    assert floors - tested == set(), "a room without a folder of tests"
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    others = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"} - floors
    assert {name for name in others if f"`{name}/`" not in page} == set(), "say what is in it"


def test_only_its_own_modules_import() -> None:
    """P21: a foreign package is imported where the architecture says, and nowhere else; pickle nowhere.

    Decisions and bytes are pure: policy/, format/ and layout/ name no torch and no Prefect, programs no Prefect.
    """
    wrong = [
        f"{where(path, line)}: {name}"
        for path in SHIPPED
        for line, name in imports(parse(path))
        if not may_import(module_name(path), name.split(".")[0])
    ]
    assert wrong == [], "see ALLOWED and FORBIDDEN"


def may_import(module: str, package: str) -> bool:
    pure = not any(package in FORBIDDEN[folder] for folder in FORBIDDEN if within(module, folder))
    return pure and any(within(module, folder) for folder in ALLOWED.get(package, (module,)))


def test_nothing_is_unpickled() -> None:
    """P21: nothing unpickles: files of others are read by a machine of our own; torch pickles an export for torch."""
    banned = {"torch.load", "torch.save", "np.load", "np.save"}
    nodes = [(path, node) for path in SHIPPED for node in walk(parse(path)) if isinstance(node, ast.Attribute)]
    texts = [(path, ast.unparse(node)) for path, node in nodes if node.attr in {"load", "save"}]
    found = {f"{path.name}: {text}" for path, text in texts if text in banned}
    assert found == {"export_torch.py: torch.save", "reader.py: torch.save"}  # the second: decision 0095


# Commands, which end before the interpreter does.
COMMANDS = ("checkpoint/transfer/transfer.py",)
LASTING = ("storage", "state", "ledger", "reading", "snapshot", "upkeep", "copying", "saving", "checkpoint")


def test_a_save_needs_no_executor() -> None:
    """P72: no module that a save, a restore or the interpreter's end goes through imports an executor."""
    found = {
        str(path.relative_to(ROOT / "ckpt_tasks"))
        for path in files(*(f"ckpt_tasks/{room}" for room in LASTING))
        for _, name in imports(parse(path))
        if name.endswith("ThreadPoolExecutor")
    }
    assert found == {*COMMANDS}


PROTOCOL = ("ledger", "reading", "upkeep", "saving")
PROTOCOL_FILES = (
    "checkpoint/held_run.py",
    "checkpoint/checkpointer.py",
    "checkpoint/acquiring.py",
    "storage/retrying.py",
)
MODULES = ("time", "secrets", "random", "socket", "queue")
THREADS = ("Thread", "Lock", "RLock", "Event", "Condition", "Semaphore", "Timer", "local")


def made_elsewhere(call: ast.Call) -> bool:
    """Say whether a call goes to the standard library for what `System` gives."""
    if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
        return False
    module, name = call.func.value.id, call.func.attr
    return module in MODULES or (module == "threading" and name in THREADS)


def test_the_protocol_has_one_way_to_clocks_threads_and_chance() -> None:
    """P30, P32: no module of the protocol has a clock, a thread or a random number of its own: a seed is a schedule."""
    paths = [path for path in files("ckpt_tasks") if path.parent.name in PROTOCOL or str(path).endswith(PROTOCOL_FILES)]
    assert len(paths) > len(PROTOCOL_FILES) + 30
    calls = [(path, node) for path in paths for node in walk(parse(path)) if isinstance(node, ast.Call)]
    wrong = [where(path, call.lineno) for path, call in calls if made_elsewhere(call)]
    assert wrong == [], "call system().monotonic() and the like instead (ckpt_tasks/system.py)"
