"""`python -m tools.pages.floors` draws the picture of the floors in docs/ARCHITECTURE.md from the imports."""

from __future__ import annotations

import re

import ckpt_tasks
from tools.sources import ROOT, files, imports, module_name, parse

# The table of floors is written once, on the page that people read.
PAGE = ROOT / "docs" / "ARCHITECTURE.md"
_ROW = re.compile(r"^\| (\d+) \| `ckpt_tasks/(\w+)(?:/|\.py)` \|", flags=re.MULTILINE)
ROWS = [(int(level), floor) for level, floor in _ROW.findall(PAGE.read_text(encoding="utf-8"))]
_PICTURE = re.compile(
    r"(?<=<!-- made by python -m tools\.pages\.floors -->\n\n```text\n).*?(?=^```$)", re.DOTALL | re.MULTILINE
)


def behind(name: str) -> str:
    """Return where a public name of the package lives: `ckpt_tasks.Checkpointer` is on the floor of its module."""
    package, _, attribute = name.rpartition(".")
    return ckpt_tasks._MODULES.get(attribute, name) if package == "ckpt_tasks" else name


def imported() -> dict[str, set[str]]:
    """Return which floors each floor imports."""
    found: dict[str, set[str]] = {floor: set() for _, floor in ROWS}
    for path in files("ckpt_tasks"):
        _, *own = module_name(path).split(".")
        for _, name in imports(parse(path)) if own and own[0] in found else ():
            package, *inner = behind(name).split(".")
            if package == "ckpt_tasks" and inner and inner[0] in found.keys() - {own[0]}:
                found[own[0]].add(inner[0])
    return found


def drawn() -> str:
    """Return a line for each floor: its level, its name, and the floors that it stands on.

    A floor that another one of the line stands on already is left out.
    """
    direct, below = imported(), dict[str, set[str]]()
    for _, floor in reversed(ROWS):
        below[floor] = direct[floor].union(*(below[one] for one in direct[floor]))
    width = max(len(floor) for _, floor in ROWS)
    lines = []
    for level, floor in ROWS:
        through = set[str]().union(*(below[one] for one in direct[floor]))
        first = [one for _, one in ROWS if one in direct[floor] - through]
        lines.append(f"{level:2}  {floor:{width}}  {'→ ' if first else ''}{'  '.join(first)}".rstrip())
    return "".join(f"{line}\n" for line in lines)


def written(page: str) -> str:
    """Return the page with the picture."""
    return _PICTURE.sub(lambda _: drawn(), page, count=1)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
