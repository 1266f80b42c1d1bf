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

VERBS = [  # from the lightest to the heaviest, and what each must not import; one process runs them all
    ("--help", {"torch", "prefect", "pyarrow", "numpy", "rich.table"}),
    *((line, {"torch", "prefect", "pyarrow"}) for line in ("ls DIR", "plan DIR", "doctor-store DIR")),
    *((line, {"torch", "prefect"}) for line in ("show DIR", "verify DIR", "diff DIR DIR", "prune DIR --dry-run")),
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


@pytest.mark.parametrize("verb", ["ls", "show", "verify", "prune", "watch", "plan", "report"])
def test_an_error_is_one_line_or_one_object(tmp_path: Path, verb: str) -> None:
    """An error of ours is a line on stderr with what to do, or with --json an object on stdout; nothing is made."""
    people, programs = ckpt(verb, tmp_path / "nothing"), ckpt(verb, tmp_path / "nothing", "--json")
    assert (people.status, people.out, programs.status, programs.err) == (1, "", 1, "")
    said = f"there is no run at {tmp_path / 'nothing'}: nothing is there"
    do = "A training makes its run when it starts. Check the name."
    assert people.err == f"error: {said}. {do}\n"
    error = {"type": "CheckpointNotFoundError", "message": said, "key": None, "step": None}
    assert programs.data == {"error": {**error, "hint": do}}
    assert [*tmp_path.iterdir()] == []


def test_a_run_with_a_similar_name_is_named(tmp_path: Path) -> None:
    """A mistyped run is not there, and the error names the runs beside it that have nearly this name."""
    for name in ("nets", "other"):
        save_steps(tmp_path / name, 1)
    assert f"Did you mean {tmp_path / 'nets'}?" in ckpt("ls", tmp_path / "net").err
    assert "Did you mean" not in ckpt("ls", tmp_path / "lm").err


def test_a_call_that_is_wrong_exits_with_2() -> None:
    """A missing argument is neither success nor a difference found: exit status 2, with the usage on stderr."""
    answer = ckpt("ls")
    assert answer.status == 2
    assert "Usage" in answer.err


def test_the_console_script_is_main(run_dir: Path) -> None:
    """`ckpt`, as it is installed, exits with the status of its verb."""
    script = Path(sys.executable).with_name("ckpt")
    good = subprocess.run([script, "ls", save_steps(run_dir, 3), "--json"], capture_output=True, text=True, check=False)
    bad = subprocess.run([script, "show", f"{run_dir}@4"], capture_output=True, text=True, check=False)
    assert (good.returncode, bad.returncode) == (0, 1)
    assert '"step": 3' in good.stdout
    assert "It has steps 3." in bad.stderr


def test_a_reader_that_leaves_is_no_crash(run_dir: Path) -> None:
    """`ckpt ls DIR | head -1` ends quietly."""
    script = Path(sys.executable).with_name("ckpt")
    save_steps(run_dir, 1)
    command = f"set -o pipefail; {script} ls {run_dir} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_a_verb_without_standard_descriptors() -> None:
    """No file that a verb opens gets the number of stdin, stdout or stderr, where C code prints."""
    verb = (
        "import os\nfrom ckpt_tasks.cli import main\ntry:\n    main('--version')\n"
        "finally:\n    os._exit(os.open(os.devnull, os.O_RDONLY) <= 2)"
    )
    command = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "", sys.executable, "-c", verb]
    assert subprocess.run(command, check=False).returncode == 0


def test_an_old_terminal_gets_escapes(run_dir: Path) -> None:
    """Where stdout has no sign for a bar, an arrow or a name, an escape stands in its place, and the verb ends well."""
    save_steps(run_dir, 1, 2)
    verbs = {"ascii": f"report {run_dir} --out {run_dir}.html", "latin-1": f"sync {run_dir} {run_dir}-läuft"}
    for encoding, verb in verbs.items():
        script = Path(sys.executable).with_name("ckpt")
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run([script, *verb.split()], env=env, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        assert rb"\u" in done.stdout


def test_a_working_directory_that_was_removed(tmp_path: Path) -> None:
    """In a shell whose directory is gone a verb says so in one line, and exits with 1."""
    (tmp_path / "gone").mkdir()
    command = (
        f"cd {tmp_path}/gone && rmdir ../gone && exec {Path(sys.executable).with_name('ckpt')} init {tmp_path}/new"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: the working directory has been removed. Change to another one.\n"


@pytest.mark.parametrize("form", ["", "--json"])
def test_an_answer_on_a_full_disk_is_an_error(run_dir: Path, form: str) -> None:
    """`ckpt ls DIR > file` on a full disk says so on stderr, in the form that was asked for, and exits with 1."""
    script = Path(sys.executable).with_name("ckpt")
    save_steps(run_dir, 1)
    with open("/dev/full", "w") as full:
        command = [str(script), "ls", str(run_dir), *form.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "the answer cannot be written: No space left on device"
    assert done.returncode == 1
    assert (json.loads(done.stderr)["error"]["message"] if form else done.stderr) == (
        said if form else f"error: {said}. Send it elsewhere.\n"
    )


def test_the_first_screen_has_whole_sentences() -> None:
    """At 80 columns no verb's line ends in three dots."""
    assert not [line for line in ckpt("--help").out.splitlines() if line.startswith("  ") and line.endswith("...")]


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
