"""Arguments and options of verbs: runs and checkpoints, with completion in a shell; programs and options of their runs.

Completion reads only local directories: a key press never sends a request to a server. If this module has no
completion for a text, the shell completes file names.

`with_config_options` makes the options of a run from the fields of `CheckpointConfig` and their texts, so that none is
missing or written twice. Verbs import Prefect in an `importing_prefect` block, which explains unreadable settings.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer

from ckpt_tasks.errors import CkptError, ConfigError
from ckpt_tasks.run.ledger.config import CheckpointConfig, field_texts
from ckpt_tasks.run.ledger.targets import split_target

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.restore.reading import Run
    from ckpt_tasks.format.ledger import State
    from ckpt_tasks.format.records import Checkpoint

_STEPS_SHOWN = 100
# Complete only these names. A shell would split, expand or run other names; it completes and quotes those itself.
_PLAIN = re.compile(r"[\w./+,:%=-]+")


def argument(metavar: str, about: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    """Declare an argument of a verb."""
    return typer.Argument(metavar=metavar, help=about, show_default=False, autocompletion=complete)


def option(flags: str, metavar: str | None, about: str, **more: Any) -> Any:
    """Declare an option of a verb; an option without a metavar is a flag."""
    return typer.Option(*flags.split(), metavar=metavar, help=about, **more)


def complete_run(incomplete: str) -> list[str]:
    """Return the directories whose paths begin with a text; [] if none of these directories is a run."""
    if "://" in incomplete or incomplete.startswith("~"):
        return []
    begun = incomplete.rpartition("/")[2]
    before = incomplete[: len(incomplete) - len(begun)]
    try:
        with os.scandir(before or ".") as entries:
            names = sorted(e.name for e in entries if e.name.startswith(begun) and e.is_dir() and _is_shown(e, begun))
    except OSError:
        return []
    names = [name for name in names if _PLAIN.fullmatch(before + name)]
    runs = {name for name in names if os.path.isfile(os.path.join(before, name, "format.json"))}
    return [before + (name if name in runs else f"{name}/") for name in names] if runs else []


def complete_checkpoint(incomplete: str) -> list[str]:
    """Return DIR@STEP for the checkpoints of a run, newest first, or run directories if the text has no @ yet."""
    directory, at, which = incomplete.rpartition("@")
    if not at or not directory or "://" in directory or not os.path.isdir(directory):
        return complete_run(incomplete)
    from ckpt_tasks.checkpoint.restore.reading import open_run

    steps: list[str] = []
    with _quiet():
        steps = [str(checkpoint.step) for checkpoint in open_run(directory).checkpoints()]
    names = dict.fromkeys(["latest", "best", *steps[:_STEPS_SHOWN]]) if steps else {}
    return [f"{directory}@{name}" for name in names if name.startswith(which)]


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the groups of the checkpoint that the command line names first."""
    from ckpt_tasks.run.opening import open_checkpoint

    target, names = next((word for word in ctx.args if not word.startswith("-")), ""), list[str]()
    if "://" not in target:
        with _quiet():
            run, checkpoint = parse_target(target).find()
            names = [*open_checkpoint(run.history.store, checkpoint).groups]
    return [name for name in names if name.startswith(incomplete) and _PLAIN.fullmatch(name)]


def complete_choice(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a completion that offers these words."""
    return lambda incomplete: [word for word in choices if word.startswith(incomplete)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Print no warning of the block into the prompt; a run or checkpoint that cannot be read completes nothing."""
    logging.disable()
    try:
        yield
    except CkptError:
        pass
    finally:
        logging.disable(logging.NOTSET)


def _is_shown(entry: os.DirEntry[str], begun: str) -> bool:
    return begun.startswith(".") or not entry.name.startswith(".")


def _of_run(otherwise: str) -> Any:
    return argument("DIR[@STEP]", f"a step, @latest or @best; {otherwise} if none is named", complete_checkpoint)


RunArgument = Annotated[str, argument("DIR", "a run directory", complete_run)]
CheckpointArgument = Annotated[str, _of_run("the latest")]
RunOrCheckpointArgument = Annotated[str, _of_run("the whole run")]
OneArgument = Annotated[str, argument("DIR@STEP", "a step of a run, @latest or @best", complete_checkpoint)]
KeyOption = Annotated[str | None, option("--run-key", "KEY", "key of the new run [default: the last part of TO]")]
SingleOption = Annotated[
    bool,
    option("--single-writer", None, "TO has no conditional writes; you make sure that no other process writes there"),
]
DryOption = Annotated[bool, option("--dry-run", None, "only print what would happen")]
JsonOption = Annotated[bool, option("--json", None, "print one JSON object instead of tables")]


class Target(NamedTuple):
    """A run directory and a checkpoint in it: a step, "latest", "best", or None if the user named no checkpoint."""

    checkpoint_dir: str
    which: int | str | None

    def open(self) -> Run:
        """Open the run; raise CheckpointNotFoundError if the directory has no run."""
        from ckpt_tasks.checkpoint.restore.reading import open_run

        return open_run(self.checkpoint_dir)

    def find(self) -> tuple[Run, Checkpoint]:
        """Open the run and find the checkpoint; without a step, take the latest.

        Raises CheckpointNotFoundError if there is no such run or checkpoint, and ConfigError if "best" has no metric.
        """
        run = self.open()
        return run, run.find("latest" if self.which is None else self.which)


def parse_target(text: str) -> Target:
    """Split "DIR@STEP" at its last @; do not split the name of an existing directory.

    Raises ConfigError if the text after the @ is neither a step nor "latest" nor "best".
    """
    return Target(*split_target(text))


def written(value: Any) -> str:
    """Write a parameter's value in the form that --param takes."""
    return json.dumps(value)


def params_line(params: Mapping[str, Any]) -> str:
    """Write a program's parameters in one line."""
    return ", ".join(f"{name}={written(value)}" for name, value in params.items())


def lineage_facts(state: State) -> dict[str, Any]:
    """Return a run's parameters, and the run from which it was forked (None: no fork), as --json prints them."""
    origin, params = state.origin, state.params
    return {"origin": None if origin is None else vars(origin), "params": None if params is None else dict(params)}


# ── a program and the options of its run ─────────────────────────────────────────────────────────────────────────

EXAMPLE = "ckpt_tasks.programs.byte_lm:ByteLM"

ProgramArgument = Annotated[str | None, argument("MODULE:PROGRAM", "the program [default: the example ByteLM]")]
# Old commands use --program instead of the argument.
ProgramOption = Annotated[str | None, typer.Option("--program", hidden=True)]
ParamOption = Annotated[list[str], option("--param", "NAME=VALUE", "a parameter of the program; may be repeated")]
ParamsOption = Annotated[str, option("--params", "JSON", "parameters as one JSON object")]
SeedOption = Annotated[int | None, option("--seed", "N", "short for --param seed=N")]

_PANEL = "Checkpoints"
_DEFAULTS = {
    "checkpoint_dir": "runs/RUN_KEY",
    "run_key": "the program's name: byte-lm for ByteLM",
    **dict.fromkeys(("step_interval", "epoch_interval", "save_interval_secs"), ""),
    "cadence": "auto, if no interval is given",
}
_UNITS: dict[type, str] = {int: "N", float: "SECONDS", str: "NAME"}
_SWITCH = {"true": True, "false": False}


def with_config_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb with `**settings` one option for each field of CheckpointConfig; an omitted option is None."""
    signature = inspect.signature(verb, eval_str=True)
    kept = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    kinds, texts = get_type_hints(CheckpointConfig), field_texts(CheckpointConfig)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, _option(field, kinds[field.name], texts[field.name])],
        )
        for field in fields(CheckpointConfig)
    ]
    verb.__signature__ = signature.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    return verb


def config_of_options(settings: Mapping[str, str | None], program: str) -> CheckpointConfig:
    """Make the config from the options; the default run key is the program's name, the default directory runs/RUN_KEY.

    Raises ConfigError if a value is invalid or two options conflict.
    """
    kinds = get_type_hints(CheckpointConfig)
    given = {name: _value(name, text, kinds[name]) for name, text in settings.items() if text is not None}
    given.setdefault("run_key", default_key(program))
    given.setdefault("checkpoint_dir", f"runs/{given['run_key']}")
    return CheckpointConfig(**given)


def named_program(program: str | None, old: str | None) -> str:
    """Return the program that the argument names, or the old option --program; raise ConfigError for both."""
    if program is not None and old is not None:
        raise ConfigError("the program is named twice", hint="Leave --program out: it is the old form.")
    return next((name for name in (program, old) if name is not None), EXAMPLE)


def default_key(program: str) -> str:
    """Return the default run key of a program: "pkg.module:MyModel" becomes "my-model"."""
    name = program.rpartition(":")[2].rpartition(".")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()


def params_of(pairs: Sequence[str], text: str, seed: int | None) -> dict[str, Any]:
    """Return the program's parameters from --param, --params and --seed; raise ConfigError if two values conflict."""
    params = json_object("--params", text)
    given = [named_value("--param", pair) for pair in pairs] + ([("seed", seed)] if seed is not None else [])
    for name, value in given:
        if params.setdefault(name, value) != value:
            raise ConfigError(f"the parameter {name} is given twice: {params[name]!r} and {value!r}")
    return params


def name_and_text(option: str, text: str) -> tuple[str, str]:
    """Split NAME=VALUE, the text of an option; raise ConfigError for any other text."""
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise ConfigError(f"{option} {text!r:.100} is not NAME=VALUE", hint=f"Write {option} lr=1e-4, a plain name.")
    return name, value


def named_value(option: str, text: str) -> tuple[str, Any]:
    """Read NAME=VALUE, where VALUE is JSON or else a string; raise ConfigError for any other text."""
    name, value = name_and_text(option, text)
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value  # A string needs no quotes.


def json_object(option: str, text: str) -> dict[str, Any]:
    """Read an option's text as a JSON object; raise ConfigError for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option} must be a JSON object", hint=f"""For example {option} '{{"width": 128}}'.""")
    return value


@contextmanager
def importing_prefect() -> Iterator[None]:
    """Import Prefect and code that needs Prefect in the block; raise ConfigError if its settings cannot be read."""
    os.environ.setdefault("DO_NOT_TRACK", "1")  # Else Prefect prints that it collects usage data; our servers do not.
    try:
        yield
    # OSError: another user owns the file. RuntimeError: no home directory. ValueError: not TOML, or an invalid value.
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"Prefect's settings cannot be read: {error}",
            hint="Mend them, or set PREFECT_HOME to a directory of yours; without a home directory set HOME as well.",
        ) from error


def ckpt_command() -> str:
    """Return the text by which a shell calls `ckpt`: the name, or the path if the name is not on the PATH."""
    return "ckpt" if shutil.which("ckpt") else os.path.relpath(Path(sys.prefix, "bin", "ckpt"))


def repeated_command(ctx: typer.Context, *, without: Sequence[str] = (), **changed: Any) -> list[str]:
    """Return the command line of this call, less the options in `without`, and with the values in `changed`."""
    words = [ckpt_command(), str(ctx.info_name)]
    for parameter in ctx.command.params:
        name, source = str(parameter.name), ctx.get_parameter_source(str(parameter.name))
        given = source is not None and source.name == "COMMANDLINE"
        if name in without or not (given or name in changed):
            continue
        value = changed.get(name, ctx.params.get(name))
        if parameter.param_type_name == "argument":
            words.append(str(value))
        elif isinstance(value, bool):
            words.append(parameter.opts[0])
        else:
            words += [
                word
                for each in (value if isinstance(value, list) else [value])
                for word in (parameter.opts[0], str(each))
            ]
    return words


def _option(setting: Field[Any], kind: Any, text: str) -> Any:
    plain = re.sub(r"[;.] see below[^.]*(?=\.)", "", text, flags=re.IGNORECASE)  # "Below" is a text of a page.
    plain = re.sub(r"[`\"]", "", plain).replace("None", "none").rstrip(".")
    shown = (plain[0] if plain[1].isupper() else plain[0].lower()) + plain[1:]  # "URL" stays.
    default = _DEFAULTS.get(setting.name, setting.default)
    default = str(default).lower() if default in (None, False) else default
    about = f"{shown} [default: {default}]" if default else shown
    choices = _choices(kind)
    more = {"autocompletion": complete_choice(choices)} if choices else {}
    flag = "--" + setting.name.replace("_", "-")
    return option(flag, _metavar(setting.name, kind), about, rich_help_panel=_PANEL, show_default=False, **more)


def _choices(kind: Any) -> list[str]:
    words = [word for type_ in (kind, *get_args(kind)) if get_origin(type_) is Literal for word in get_args(type_)]
    return words or ([*_SWITCH] if kind is bool else [])


def _metavar(name: str, kind: Any) -> str:
    if choices := _choices(kind):
        return "|".join(choices)
    if name.endswith("dir"):
        return "DIR"
    return next(unit for type_, unit in _UNITS.items() if type_ in _types(kind))


def _types(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) or (kind,)


def _value(name: str, text: str, kind: Any) -> Any:
    types, flag = _types(kind), "--" + name.replace("_", "-")
    if text.lower() == "none" and NoneType in types:
        return None
    if bool in types:
        if text.lower() not in _SWITCH:
            raise ConfigError(f"{flag} must be true or false, not {text!r:.80}")
        return _SWITCH[text.lower()]
    for type_, words in ((int, "a whole number"), (float, "a number")):
        if type_ in types:
            try:
                return type_(text)
            except ValueError as error:
                raise ConfigError(f"{flag} must be {words}, not {text!r:.80}") from error
    return text
