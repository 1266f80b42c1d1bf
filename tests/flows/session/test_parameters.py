"""What a run has recorded of parameters, and what of it a factory may be called with."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_tasks.errors import ProgramError
from ckpt_tasks.flows.session.parameters import effective_params, params_before


class Program:
    """Declare some parameters and take others by a double star; the values of one text are the record's to give."""

    recorded_params = ("mode", "hidden")

    def __init__(self, data: Any, /, place: Any = None, *, mode: str = "", rates: Any = None, **rest: Any):
        self.given = (data, place, mode, rates, rest)


@pytest.mark.parametrize(
    "value", ["/etc/passwd", ".env", "", {"a": 1}, {}, ["/etc/passwd"], [1, [None, ["x"]]], [{}], b"x", 1j]
)
@pytest.mark.parametrize("name", ["place", "rates"])
def test_what_may_name_something_is_refused(name: str, value: Any) -> None:
    """P21: a text or an object, however deep, is not taken from the record; given, it is, and wins."""
    with pytest.raises(ProgramError, match=rf"'{name}'.*may name a file"):
        effective_params(Program, {name: value}, {"mode": "x"})
    assert effective_params(Program, {name: "/etc/passwd"}, {name: value}) == {name: value}


@pytest.mark.parametrize("value", [0, 1e-4, -3, True, None, [], [0.9, [None, 2, [False]]]])
def test_what_names_nothing_goes_on_by_the_record(value: Any) -> None:
    """Numbers, booleans, null and lists of them are taken; what is given wins over them."""
    assert effective_params(Program, {"rates": value}, {"place": "/own"}) == {"rates": value, "place": "/own"}
    assert effective_params(Program, {"rates": value}, {"rates": 7}) == {"rates": 7}


@pytest.mark.parametrize("name", ["data", "rest", "hidden", "width", "self", ""])
def test_what_the_signature_does_not_declare_is_refused(name: str) -> None:
    """P21: neither `**`, nor a positional parameter, nor a name that only `recorded_params` has is declared."""
    with pytest.raises(ProgramError, match=f"'{name}'.*does not declare"):
        effective_params(Program, {name: 1}, None)
    assert effective_params(Program, {name: 1}, {name: 2}) == {name: 2}


def test_a_text_that_the_program_names_is_taken() -> None:
    """`recorded_params` opens a declared name for texts; a factory without it, or without a signature, takes none."""
    assert effective_params(Program, {"mode": "fast"}, None) == {"mode": "fast"}
    with pytest.raises(ProgramError, match="recorded_params"):
        effective_params(lambda mode: mode, {"mode": "fast"}, None)
    with pytest.raises(ProgramError, match="does not declare"):
        effective_params(iter, {"mode": 1}, None)
    assert effective_params(iter, None, None) == effective_params(iter, {}, {}) == {}


def test_the_program_of_before_has_no_path_of_the_record(caplog: pytest.LogCaptureFixture) -> None:
    """P21: its numbers are the record's, its texts those of now, with a warning where they differ."""
    recorded, given = {"place": "/etc/passwd", "rates": 1, "mode": "slow"}, {"place": "/own", "rates": 2, "mode": "x"}
    assert params_before(Program, recorded, given) == {"place": "/own", "rates": 1, "mode": "slow"}
    assert "another place than before" in caplog.text
    caplog.clear()
    assert params_before(Program, {"place": "/own"}, given) == {"place": "/own"}
    assert caplog.text == ""
    with pytest.raises(ProgramError, match="not taken from there"):
        params_before(Program, {"place": "/etc/passwd"}, {})
