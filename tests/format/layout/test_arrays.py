"""Arrow arrays of Python values, made and read without pandas."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.format.layout.arrow import array, numbers_of

WHOLE = st.integers(-(2**63), 2**63 - 1)
KINDS = {
    pa.int64(): WHOLE,
    pa.float64(): st.floats(allow_nan=False),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"])),
    pa.binary(16): st.binary(min_size=16, max_size=16),
    pa.list_(pa.int64()): st.lists(WHOLE, max_size=4),
    pa.dictionary(pa.int32(), pa.string()): st.sampled_from(["a", "b", "é", ""]),
}
PROGRAM = """
import sys
from ckpt_tasks.format.layout.index import Index, IndexRow, read_index, write_index
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.layout.regions import Box
from ckpt_tasks.format.layout.steps import StepMetrics, read_steps, write_steps
row = IndexRow("model", "w", "float32", (2,), Box((0,), (2,)), "x", 64, 72, bytes(16))
data = write_index(Index.of([row]).placed("y", [bytes(16)]))
assert Index.joined([Index.of([row])]).rows == (row,)
data = write_steps([StepMetrics(1, 2.0, {"loss": 3.0})])
assert read_steps(data, digest=digest_hex(data), name="x")[0].metrics == {"loss": 3.0}
assert "pyarrow" in sys.modules
sys.exit("pandas" in sys.modules)
"""


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_array_is_what_arrow_makes_of_the_values(kind: pa.DataType) -> None:
    """Numbers, texts, bytes, lists and words are those that `pa.array` makes, and pass Arrow's full validation."""

    @given(st.lists(KINDS[kind], max_size=8))
    def same(values: list[Any]) -> None:
        made = array(values, kind)
        made.validate(full=True)
        assert made.equals(pa.array(values, kind))
        if kind in (pa.int64(), pa.float64()):
            assert numbers_of(made).tolist() == values
            assert numbers_of(made[1:]).tolist() == values[1:]

    same()


@pytest.mark.framework  # several of them bring pandas
def test_arrow_does_not_import_pandas_for_us() -> None:
    """Arrow imports pandas with its first `pa.array` or `to_numpy`; index and steps are written and read without."""
    assert find_spec("pandas") is not None
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
