"""`python -m tools.pages.packages` draws the packages in docs/internals/ARCHITECTURE.md from their imports."""

from __future__ import annotations

import re

import ckpt_tasks
from tools.sources import ROOT, files, imports, module_name, parse

# The table of packages is written once, on the page that people read.
PAGE = ROOT / "docs" / "internals" / "ARCHITECTURE.md"
_ROW = re.compile(r"^\| (\d+) \| `ckpt_tasks/(\w+)(?:/|\.py)` \|", flags=re.MULTILINE)
ROWS = [(int(level), name) for level, name in _ROW.findall(PAGE.read_text(encoding="utf-8"))]
_PICTURE = re.compile(
    r"(?<=<!-- made by python -m tools\.pages\.packages -->\n\n```text\n).*?(?=^```$)", re.DOTALL | re.MULTILINE
)


def behind(name: str) -> str:
    """Return where a public name of the package lives: `ckpt_tasks.Checkpointer` is in the package of its module."""
    package, _, attribute = name.rpartition(".")
    return ckpt_tasks._MODULES.get(attribute, name) if package == "ckpt_tasks" else name


def imported() -> dict[str, set[str]]:
    """Return which rows of the table each one imports."""
    found: dict[str, set[str]] = {name: set() for _, name in ROWS}
    for path in files("ckpt_tasks"):
        _, *own = module_name(path).split(".")
        for _, name in imports(parse(path)) if own and own[0] in found else ():
            package, *inner = behind(name).split(".")
            if package == "ckpt_tasks" and inner and inner[0] in found.keys() - {own[0]}:
                found[own[0]].add(inner[0])
    return found


def drawn() -> str:
    """Return a line for each package: its level, its name, and the packages that it imports; modules are left out."""
    levels, direct = {name: level for level, name in ROWS}, imported()
    width = max(len(name) for _, name in ROWS)
    lines = []
    for level, name in ROWS:
        if level:
            below = [one for _, one in ROWS if one in direct[name] and levels[one]]
            lines.append(f"{level}  {name:{width}}  {'→ ' if below else ''}{'  '.join(below)}".rstrip())
    return "".join(f"{line}\n" for line in lines)


def written(page: str) -> str:
    """Return the page with the picture."""
    return _PICTURE.sub(lambda _: drawn(), page, count=1)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
