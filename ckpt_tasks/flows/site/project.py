"""A project that runs at once: a program, its deployments, a test that kills and resumes it, and a page."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.keys import is_run_key

PROGRAM = "training:Training"
_EXAMPLE = "ckpt_tasks.programs.byte_lm:ByteLM"
_HERE = files("ckpt_tasks.flows.site")
_IGNORED = "runs/\n__pycache__/\n.pytest_cache/\n*-report.html\n"


def write_project(directory: Path, name: str | None = None) -> tuple[str, list[str]]:
    """Write the project into a new or empty directory; return its name, and the names of its files.

    The name (default: the directory's) becomes the key of its run and the name of its deployments. Raises ConfigError
    before anything is written.
    """
    if name is None:
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", directory.absolute().name).strip("-.") or "project"
    if "/" in name or not is_run_key(name):
        raise ConfigError(f"{name!r:.80} is not a name", hint="Use letters, digits, '_', '-' and '.' with --name.")
    texts = _texts(name)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if files := sorted(path.name for path in directory.iterdir()):
            raise ConfigError(f"{directory} is not empty: it has {files[0]}", hint="Name a new or an empty directory.")
        for file, text in texts.items():
            (directory / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the project cannot be written: {error}", hint="Name another directory.") from error
    return name, list(texts)


def _texts(name: str) -> dict[str, str]:
    template = _HERE / "template"
    written = {path: (template / path).read_text("utf-8") for path in ("training.py", "test_resume.py", "README.md")}
    written["README.md"] = written["README.md"].replace("NAME", name)
    return {**written, "prefect.yaml": _deployments(name), ".gitignore": _IGNORED}


def _deployments(name: str) -> str:
    """Return our own prefect.yaml, adapted to the project's program, run and name.

    Names are quoted, since YAML reads 001, no and 2026-01-01 as other types.
    """
    text = (_HERE / "prefect.yaml").read_text("utf-8")
    text = text.replace(_EXAMPLE, PROGRAM).replace("byte-lm", name).replace("the byte-level model", name)
    tag = "          - { prefect.resource.role: tag, prefect.resource.id: prefect.tag.ckpt-tasks }\n"
    ours = f'          - {{ prefect.resource.role: deployment, prefect.resource.name: "{name}" }}\n'
    text = text.replace(tag, tag + ours).replace("ckpt-tasks.run.*", f"ckpt-tasks.run.{name}")
    text = text.replace('"following"', f'"{name}-following"').replace("total_steps: 600", "total_steps: 3000")
    return text.replace("name: ckpt-tasks\n\ndef", f'name: "{name}"\n\ndef')
