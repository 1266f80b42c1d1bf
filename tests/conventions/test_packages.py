"""A package imports from the packages of lower levels only."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tools.pages.packages import ROWS, behind, imported
from tools.sources import ROOT, files, imports, module_name, parse, walk, where

LEVELS = {name: level for level, name in ROWS}
TOP = max(LEVELS.values()) + 1  # what a checkout has above the package
# Names that users write, or that runs have recorded, for what lives in a package: nothing of ours imports them.
FACES = ("dcp", "tables", "programs")
FOLDER_FILES = 14

# Who may import what; a name that is not listed may be imported anywhere.
ALLOWED = {
    "prefect": ("ckpt_tasks.flows", "ckpt_tasks.cli.doctor"),
    "fsspec": ("ckpt_tasks.storage.objects",),
    "s3fs": ("ckpt_tasks.storage.objects",),
    "tenacity": ("ckpt_tasks.storage.retrying",),
    "pyarrow": ("ckpt_tasks.format.layout", "ckpt_tasks.state.tables.table_rows"),
    "safetensors": (),  # a dev dependency: the tests read with it what format/ wrote
    "typer": ("ckpt_tasks.cli",),
    "pickle": (),
    "cloudpickle": (),
    "dill": (),
    "marshal": (),
    "shelve": (),
}
# Pure decisions and bytes; a run is read without torch; ranks, and programs as a user writes them, need no Prefect.
FORBIDDEN = {
    "ckpt_tasks.format": ("torch", "prefect"),
    "ckpt_tasks.run": ("torch", "prefect"),
    "ckpt_tasks.flows.gang": ("prefect",),
    "ckpt_tasks.flows.programs": ("prefect",),
    "ckpt_tasks.flows.session": ("prefect",),
}

SHIPPED = files("ckpt_tasks", "flows", "deployments")


def within(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


def level_of(module: str) -> int | None:
    """Return the level of a dotted name, or None for what is not ours, and for the package itself."""
    first, _, rest = module.partition(".")
    if first in {"flows", "deployments"}:
        return TOP
    return LEVELS.get(rest.partition(".")[0], TOP) if first == "ckpt_tasks" and rest else None


def package_of(module: str) -> str:
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
        level = TOP + 1 if name.startswith(".") else level_of(target)  # relative: the package would not be in sight
        beside = level == own and level and package_of(target) != package_of(module)
        if level is not None and (level > own or beside):
            wrong.append(f"{where(path, line)}: {module} imports {name}")
    return wrong


def test_imports_point_down() -> None:
    """No module imports from a package of a higher level than its own, nor from another one of the same level."""
    wrong = [line for path in SHIPPED for line in upward(path)]
    assert wrong == [], "import from a lower level only: docs/internals/ARCHITECTURE.md has the levels"


def test_there_are_eight_packages_on_six_levels() -> None:
    """ARCHITECTURE.md names each package once, from the top; at most 45 pairs of packages import each other."""
    packages = [(level, name) for level, name in ROWS if level]
    assert len(packages) == 9  # The ninth is testing.py.
    assert {level for level, _ in packages} == {*range(1, 7)}
    assert len(ROWS) == len(LEVELS)
    assert [level for level, _ in ROWS] == sorted((level for level, _ in ROWS), reverse=True)
    names = {name for _, name in packages} - {"testing"}
    assert sum(len(found & names) for name, found in imported().items() if name in names) <= 45


def test_every_module_is_in_a_row() -> None:
    """The rows of the page are the folders and modules of the package, so that a new one cannot escape the rule."""
    there = {module_name(path).split(".")[1] for path in files("ckpt_tasks") if path.name != "__init__.py"}
    assert there - {"__main__", *FACES} == {*LEVELS}, "a new one needs a row in docs/internals/ARCHITECTURE.md"


def test_a_face_only_names_what_a_package_has() -> None:
    """A face has imports and `__all__`, and no module of ours imports it."""
    faces = [path for path in files("ckpt_tasks") if module_name(path).split(".")[1:2] in [[face] for face in FACES]]
    nodes = [(path, node) for path in faces for node in parse(path).body]
    only = ast.Expr | ast.ImportFrom | ast.Assign
    assert [where(path, node.lineno) for path, node in nodes if not isinstance(node, only)] == []
    names = [behind(name) for path in SHIPPED for _, name in imports(parse(path)) if path.parent.name != "deployments"]
    assert [name for name in names if any(within(name, f"ckpt_tasks.{face}") for face in FACES)] == []


def test_a_folder_can_be_seen_at_once() -> None:
    """A folder has at most 14 modules."""
    folders = Counter(path.parent for path in files("ckpt_tasks") if path.name != "__init__.py")
    assert {path: count for path, count in folders.items() if count > FOLDER_FILES} == {}, "which two belong together?"


def test_the_tests_mirror_the_packages() -> None:
    """Every package has its folder of tests, and CONTRIBUTING.md names each other folder of tests/."""
    packages = {path.name for path in (ROOT / "ckpt_tasks").iterdir() if (path / "__init__.py").exists()} - {*FACES}
    tested = {path.relative_to(ROOT / "tests").parts[0] for path in files("tests") if path.name.startswith("test_")}
    assert packages - tested == set(), "a package without a folder of tests"
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {name for name in folders - packages if f"`{name}/`" not in page} == set(), "say what is in it"


def test_only_its_own_modules_import() -> None:
    """P21: a foreign package is imported where the architecture says, and nowhere else; pickle nowhere.

    Decisions and bytes are pure: format/ names no torch and no Prefect, nor does run/; ranks and programs no Prefect.
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
LASTING = ("storage", "state", "run", "checkpoint")


def test_a_save_needs_no_executor() -> None:
    """P72: no module that a save, a restore or the interpreter's end goes through imports an executor."""
    found = {
        str(path.relative_to(ROOT / "ckpt_tasks"))
        for path in files(*(f"ckpt_tasks/{folder}" for folder in LASTING))
        for _, name in imports(parse(path))
        if name.endswith("ThreadPoolExecutor")
    }
    assert found == {*COMMANDS}


PROTOCOL = ("run", "ledger", "upkeep", "save", "restore")
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
