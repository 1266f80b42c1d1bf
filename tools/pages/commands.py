"""`python -m tools.pages.commands` writes docs/COMMANDS.md from the help of `ckpt` and from what its verbs answer.

The examples are run in order, in one directory, with --json: the page has what is typed, and the form of the answers.
"""

from __future__ import annotations

import os
import shlex
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from typer.main import get_command

from ckpt_tasks import Checkpointer, ResumableLoader, open_run
from ckpt_tasks.cli import app
from tests.support.cli_runs import Answer, ckpt, config, save, save_steps, some_state
from tests.support.histories import LOST, Told, trained
from tools.sources import ROOT

PAGE = ROOT / "docs" / "COMMANDS.md"
_HEAD = """# The command `ckpt`

What `ckpt VERB --help` prints, with examples. `python -m tools.pages.commands` writes this page, and a test compares
it with the help of today.

Every verb has `--json` and `--help`. With `--json` a verb prints one object; its form stands below the examples, where
a key without a type holds a string or a number. A verb that fails prints `{"error": …}` with `type`, `message`, `key`,
`step` and `hint`. The exit status is 0 if all is well, 1 if not, and 2 if the call is wrong.
"""
_FRAMEWORKS = frozenset({"lightning", "transformers", "accelerate"})  # `show` names them where they are installed.
_SHARED = 2  # What so many verbs take stands once, at the head of the page.
EXAMPLES = """
ckpt init nets
ckpt pin runs/lm@20 -m 'the paper'
ckpt ls runs/lm
ckpt ls runs --sort=-loss
ckpt ls runs/none
ckpt show runs/lm@40
ckpt samples seen/lm
ckpt diff runs/lm@30 runs/lm@40 --metrics
ckpt diff runs/lm@30 runs/lm@40 --group rng --ignore rng
ckpt verify runs/lm
ckpt report runs/long
ckpt rm runs/lm@20
ckpt rm runs/lm@10 --dry-run
ckpt rm runs/lm@10
ckpt prune runs/lm --max-num-checkpoints 1 --dry-run
ckpt prune runs/lm --max-num-checkpoints 1
ckpt unpin runs/lm@20
ckpt unpin runs/lm@20
ckpt sync runs/lm@40 copies/lm
ckpt sync runs/lm@40 copies/lm
ckpt sync runs/lm copies/lm
ckpt fork runs/lm@40 runs/lm-2
ckpt fork runs/lm@40 runs/lm-2
ckpt export runs/lm lm.safetensors --group model
ckpt import lm.safetensors runs/imported --group net --run-key lm --step 5
ckpt rollback runs/lm@20 --reason 'a spike'
ckpt doctor runs/lm
ckpt doctor-store runs/lm
""".strip().splitlines()


def make_runs() -> None:
    """Make the runs of the examples here: one that was saved, and one whose times are told."""
    run = save_steps(Path("runs/lm"), 10, 20, 30, 40, best_metric="loss", best_mode="max")
    held = open_run(str(run))
    held.record_evaluation(held.find(40), "quick", {"accuracy": 0.75})
    with Checkpointer(config(run)) as made:
        made.restore(some_state())
        made.note("failure", error="CUDA out of memory")
    loader = ResumableLoader(range(50), batch_size=4, shuffle=True, drop_last=True)  # type: ignore[arg-type]
    loader.skip_batches(2)
    for _ in loader.epochs(2):
        assert [*loader]
    save(Path("seen/lm"), {"data": loader})
    Path("runs/notes").mkdir()
    Path("runs/notes.txt").write_text("no run")
    costs = {"stall_s": 0.05, "flush_s": 0.5, "step_s": 0.5}
    told = trained(Told(Path("runs/long"), "long").taken(), 20, every_s=60.0, steps=120, **costs)
    trained(told.after(90).taken(LOST), 20, every_s=60.0, steps=120, **costs).released()


class Form(NamedTuple):
    """What JSON values have in common: names of plain ones, what lists of them hold, what objects have by key."""

    plain: frozenset[str] = frozenset()
    items: Form | None = None
    keys: dict[str, Form] | None = None

    def __str__(self) -> str:
        parts = sorted(self.plain - {"null"})
        parts += [f"[{self.items}]"] if self.items is not None else []
        parts += ["{" + ", ".join(key + one.after_key for key, one in self.keys.items()) + "}"] if self.keys else []
        return " or ".join([*parts, *({"null"} & self.plain)]) or ("{}" if self.keys is not None else "")

    @property
    def after_key(self) -> str:
        """What stands after a key of this form: nothing for a string or a number."""
        return "" if str(self) in {"string", "number"} else f": {self}"


def form(value: Any) -> Form:
    """Return the form of a JSON value."""
    if isinstance(value, dict):
        return Form(keys={key: form(one) for key, one in value.items() if key not in _FRAMEWORKS})
    if isinstance(value, list):
        return Form(items=reduce(either, map(form, value), Form()))
    names = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
    return Form(frozenset({names[type(value)]}))


def either(one: Form, other: Form) -> Form:
    """Return the form of what has one of two forms."""
    items = one.items if other.items is None else other.items if one.items is None else either(one.items, other.items)
    keys = one.keys if other.keys is None else other.keys if one.keys is None else dict(one.keys)
    if one.keys is not None and other.keys is not None and keys is not None:
        keys |= {key: either(keys[key], form) if key in keys else form for key, form in other.keys.items()}
    return Form(one.plain | other.plain, items, keys)


@contextmanager
def _world() -> Iterator[None]:
    """Work in a directory with the runs of the examples, for a screen on which no line is broken."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as place, chdir(place):
        os.environ["COLUMNS"] = "200"
        try:
            make_runs()
            yield
        finally:
            os.environ |= before
            os.environ.pop("COLUMNS") if "COLUMNS" not in before else None


def _called(line: str, *options: str) -> Answer:
    return ckpt(*shlex.split(line)[1:], *options)


def forms() -> dict[str, str]:
    """Run every example with --json; return by verb the form of its objects, but for those of errors."""
    found: dict[str, Form] = {}
    with _world():
        for line in EXAMPLES:
            verb, answer = line.split()[1], _called(line, "--json")
            assert answer.err == "", line
            if "error" not in answer.data:
                found[verb] = either(found.get(verb, Form()), form(answer.data))
    how: dict[str, Any] = {"width": 110, "subsequent_indent": " ", "break_on_hyphens": False}
    return {verb: textwrap.fill(str(one), **how) for verb, one in found.items()}


def written(forms: dict[str, str]) -> str:
    """Return the page, with the examples and these forms of their answers."""
    root: Any = get_command(app)
    context = root.make_context("ckpt", [], resilient_parsing=True)
    named = {name: root.get_command(context, name) for name in root.list_commands(context)}
    verbs = {name: (verb, verb.context_class(verb, info_name=name, parent=context)) for name, verb in named.items()}
    shown = {name: both for name, both in verbs.items() if not both[0].hidden}
    times = Counter(row for verb, about in shown.values() for _, row in _options(verb, about))
    shared = {row.split("`")[1]: row for row, count in reversed(times.most_common()) if count >= _SHARED}
    sections: dict[str, list[str]] = {}
    for name, (verb, about) in shown.items():
        section = sections.setdefault(verb.rich_help_panel, [])
        section.append("\n".join(_verb(verb, about, {*shared.values()})))
        if name in forms:
            typed = "\n".join(f"$ {line}" for line in dict.fromkeys(EXAMPLES) if line.split()[1] == name)
            section.append(f"```text\n{typed}\n{forms[name]}\n```\n")
    text = [_HEAD, f"{root.help} {root.epilog}\n", "What several verbs take:\n"]
    text.append("\n".join([*(row for row in times if row in shared.values()), ""]))
    for heading, parts in sections.items():
        text += [f"## {heading}\n", *parts]
    return "\n".join(text)


def _verb(verb: Any, context: Any, shared: set[str]) -> Iterator[str]:
    yield f"### `{verb.get_usage(context).removeprefix('Usage: ').replace(' [OPTIONS]', '')}`\n"
    for paragraph in verb.help.split("\n\n"):
        yield " ".join(paragraph.split()) + "\n"
    sections: dict[str, list[str]] = {}
    names = []
    for heading, row in _options(verb, context):
        if row in shared:
            names += [row.split("`")[1]] if row.startswith("- `-") else []
        else:
            sections.setdefault(heading, []).append(row)
    if sections.pop("Checkpoints", None):
        yield "Each [option of a run](OPTIONS.md) is an option here as well: `step_interval` is `--step-interval N`.\n"
    for heading, rows in sections.items():
        yield "\n".join([*([] if heading == "option" else [f"{heading}:\n"]), *rows, ""])
    if names:
        yield f"Also takes {', '.join(f'`{name}`' for name in names)}.\n"


def _options(verb: Any, context: Any) -> Iterator[tuple[str, str]]:
    """Yield the panel and the row of every argument and option."""
    for option in verb.get_params(context):
        if (record := option.get_help_record(context)) is not None and not {"--json", "--help"} & {*option.opts}:
            words = (option.metavar or record[0], record[1]) if option.param_type_name == "argument" else record
            panel = getattr(option, "rich_help_panel", None)
            text = " ".join(words[1].split()).replace("<", r"\<").removesuffix("[required]").rstrip()
            yield panel if isinstance(panel, str) else "option", f"- `{words[0]}`: {text}"


if __name__ == "__main__":
    PAGE.write_text(written(forms()), encoding="utf-8")
