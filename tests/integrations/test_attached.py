"""integrations/attached.py: what the callbacks of all frameworks share."""

from __future__ import annotations

import pytest

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.integrations.attached import own_of_ranks


def test_another_number_of_ranks_is_told_both_numbers_and_a_way_on() -> None:
    """Two ranks' sums do not make one rank's: the error says how many to start, and how to go on without them."""
    assert own_of_ranks(["first", "second"], 1, 2) == "second"
    with pytest.raises(ConfigError, match="was 2 and is now 1") as caught:
        own_of_ranks(["first", "second"], 0, 1)
    assert "Start 2" in str(caught.value)
    assert "ckpt export" in str(caught.value)
