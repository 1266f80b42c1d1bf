"""Tables of step metrics: what is written is read, and whatever else is there is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import Attempt, is_object_name, is_steps, steps_name
from ckpt_tasks.format.layout.arrow import write_metrics
from ckpt_tasks.format.layout.steps import StepMetrics, read_steps, write_steps

values = st.floats(allow_nan=False)
steps = st.dictionaries(
    st.integers(0, 2**40), st.tuples(values, st.dictionaries(st.text(max_size=8), values, min_size=1, max_size=4))
)


@given(steps)
def test_steps_are_read_as_they_were_written(found: dict[int, tuple[float, dict[str, float]]]) -> None:
    """Any names and finite or infinite values, in the order of their steps."""
    rows = [StepMetrics(step, at_s, metrics) for step, (at_s, metrics) in found.items()]
    data = write_steps(rows)
    assert read_steps(data, digest=digest_hex(data), name="steps") == rows


@pytest.mark.parametrize("data", [b"", b"ARROW1\0\0", write_metrics({"loss": 1.0}, {}), write_steps([])[:-9]])
def test_other_bytes_are_refused(data: bytes) -> None:
    """Bytes that are no such table raise IntegrityError, with a fitting digest and with another one."""
    with pytest.raises(IntegrityError, match="committed"):
        read_steps(data, digest="0" * 32, name="steps")
    with pytest.raises(IntegrityError, match="malformed"):
        read_steps(data, digest=digest_hex(data), name="steps")


def test_a_table_has_the_name_of_its_attempt() -> None:
    """Two tries to commit one step never write one table."""
    name = steps_name(Attempt(1500, 3, "9d30edd20d094bd9"))
    assert name == "steps/000000001500-e000003-9d30edd20d094bd9.arrow"
    assert is_object_name(name)
    assert is_steps(name, 1500)
    assert not is_steps(name, 1501)
    assert not is_steps("ledger/" + name, 1500)
