"""A store that is away is nobody's failure: the flow run has crashed, and is resumed.

On Prefect a failed flow run is done with. It is told to a person, who mends the program or the credentials and starts
again; a store that comes back by itself would leave a night's work to that person too. A crashed flow run is resumed by
the automations, and by the watch behind them, as often as they are told to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.runtime import deployment

from ckpt_tasks.errors import CkptError, CommitUncertainError, StoreError

__all__ = ["crashes_while_the_store_is_away"]


class _StoreAwayError(BaseException):
    """End a flow run by what Prefect takes for a crash: everything that is no Exception."""


@contextmanager
def crashes_while_the_store_is_away() -> Iterator[None]:
    """End a deployment's flow run as crashed where the block ends because the store does not answer.

    That is: with an error that another try, later, may not meet. Without a deployment nobody resumes the flow run, so
    the error passes as it is.
    """
    try:
        yield
    except CkptError as error:
        if not _is_away(error) or deployment.id is None:
            raise
        raise _StoreAwayError(f"the store is away: {error}") from error


def _is_away(error: CkptError) -> bool:
    return isinstance(error, CommitUncertainError) or (isinstance(error, StoreError) and error.transient)
