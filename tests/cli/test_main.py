"""The command line as a whole: quick to start, one line for an error, an exit status that can be relied on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ckpt_tasks.cli import app
from tests.support.cli_runs import ckpt, save_steps
from tests.support.sweeps import quick_first

VERBS = [  # from the lightest to the heaviest, and what each must not import; one process runs them all
    ("--help", {"torch", "prefect", "pyarrow", "numpy", "rich.table"}),
    *((line, {"torch", "prefect", "pyarrow"}) for line in ("ls DIR", "doctor-store DIR")),
    *(
        (line, {"torch", "prefect"})
        for line in ("show DIR", "report DIR --out DIR.html", "verify DIR", "diff DIR DIR", "prune DIR --dry-run")
    ),
    ("fork DIR DIR-2", {"torch", "prefect"}),
    ("prune DIR", {"prefect"}),
]


def test_a_verb_waits_only_for_what_it_needs(run_dir: Path) -> None:
    """Help imports nothing large, verbs that only look import no torch, and none imports Prefect."""
    save_steps(run_dir, 1)
    code = "import sys\nfrom contextlib import suppress\nfrom ckpt_tasks.cli import main\n"
    for line, heavy in VERBS:
        code += f"with suppress(SystemExit): main(*{line.replace('DIR', str(run_dir)).split()!r})\n"
        code += f"print({line!r}, sorted({heavy!r} & {{*sys.modules}}), file=sys.stderr)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [f"{line} []" for line, _ in VERBS]


@pytest.fixture(scope="module")
def run(fast_dir: Path) -> Path:
    """Return a run, named as a user names it."""
    return save_steps(fast_dir / "main" / "run", 1, 3)


def said(command: str, **how: Any) -> tuple[int, str, str]:
    """Call the program `ckpt`, as it is installed, from a shell."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    line = command.replace("ckpt ", f"{Path(sys.executable).with_name('ckpt')} ")
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], text=True, check=False, **how)
    return done.returncode, done.stdout, done.stderr


def test_the_console_script_is_main(run: Path) -> None:
    """`ckpt` exits with the status of its verb; a reader that leaves, as `head -1` does, is no crash."""
    status, out, _ = said(f"ckpt ls {run} --json")
    assert (status, '"step": 3' in out) == (0, True)
    assert said(f"ckpt show {run}@4")[0] == 1
    assert "Traceback" not in said(f"ckpt ls {run} | true")[2]


@pytest.mark.slow
def test_a_verb_without_standard_descriptors() -> None:
    """No file that a verb opens gets the number of stdin, stdout or stderr, where C code prints."""
    verb = (
        "import os\nfrom ckpt_tasks.cli import main\ntry:\n    main('--version')\n"
        "finally:\n    os._exit(os.open(os.devnull, os.O_RDONLY) <= 2)"
    )
    command = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "", sys.executable, "-c", verb]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "verb"), [("ascii", "report RUN --out RUN.html"), ("latin-1", "sync RUN RUN-läuft")]
)
def test_an_old_terminal_gets_escapes(run: Path, encoding: str, verb: str) -> None:
    """Where stdout has no sign for a bar, an arrow or a name, an escape stands in its place, and the verb ends well."""
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    status, out, err = said(f"ckpt {verb.replace('RUN', str(run))}", env=env, encoding="latin-1")
    assert (status, err) == (0, "")
    assert r"\u" in out


@pytest.mark.slow
def test_a_working_directory_that_was_removed(tmp_path: Path) -> None:
    """In a shell whose directory is gone a verb says so in one line, and exits with 1."""
    (tmp_path / "gone").mkdir()
    answer = said(f"cd {tmp_path}/gone && rmdir ../gone && exec ckpt init {tmp_path}/new")
    assert answer == (1, "", "error: the working directory has been removed. Change to another one.\n")


@pytest.mark.parametrize(("verb", "form"), quick_first([("ls", ""), ("ls", "--json"), ("watch", "")]))
def test_an_answer_on_a_full_disk_is_an_error(run: Path, verb: str, form: str) -> None:
    """`ckpt ls DIR > file` on a full disk says so on stderr, in the form that was asked for, and exits with 1."""
    with open("/dev/full", "w") as full:
        status, _, err = said(f"ckpt {verb} {run} {form}", stdout=full)
    message = "the answer cannot be written: No space left on device"
    assert status == 1
    assert json.loads(err)["error"]["message"] == message if form else err == f"error: {message}. Send it elsewhere.\n"


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("train --steps abc", "--steps must be a whole number, not 'abc'. See `ckpt train --help`."),
        ("serve runs --port=x", "--port must be a whole number, not 'x'. See `ckpt serve --help`."),
        ("train --stepz 3", "there is no option --stepz. Did you mean --steps?"),
        ("ls", "ckpt ls needs DIR: a run directory, or one that holds runs. `ckpt ls --help` has an example."),
        ("lz runs", "no such command 'lz'. `ckpt --help` lists them all."),
    ],
)
def test_a_wrong_command_line_is_said_in_our_words(command: str, wanted: str) -> None:
    """A mistake in the options is one line, as every other error, and the status is 2; --json has it as an object."""
    answer = ckpt(*command.split())
    assert (answer.status, answer.out, answer.err) == (2, "", f"error: {wanted}\n")
    assert ckpt(*command.split(), "--json").data["error"]["type"] == "ConfigError"


def test_every_option_says_what_it_takes() -> None:
    """Help has a word for the value of each option, names no argument of another verb, and is written in one way."""
    root: Any = get_command(app)
    for name, verb in root.commands.items():
        arguments = {str(option.metavar) for option in verb.params if option.param_type_name == "argument"}
        for option in (shown for shown in verb.params if not getattr(shown, "hidden", False)):
            assert option.param_type_name == "argument" or option.is_flag or option.metavar, (name, option.name)
            words = option.help
            assert not words[:1].isupper() or words[1:2].isupper(), (name, option.name, words)
            assert "TO" not in re.findall(r"\w+", words) or "TO" in arguments, (name, option.name, words)


def test_it_says_which_version_it_is() -> None:
    """`ckpt --version` names the package and its version, which is that of the installed one."""
    answer = ckpt("--version")
    assert (answer.status, answer.out) == (0, f"ckpt-tasks {version('ckpt-tasks')}\n")
