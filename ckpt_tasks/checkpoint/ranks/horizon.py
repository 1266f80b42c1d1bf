"""The horizon: the last step that rank 0 has granted. No rank runs beyond it, so all ranks do the same at each step.

Often only one rank knows of a signal, or of a save that is due by the clock. Rank 0 then gives all ranks an order for
the step after the horizon, which no rank has passed, and grants more steps. Rank 0 grants half a second of steps ahead:
a rank reads a key about twenty times a second, and waits only if it is half a second ahead of rank 0.
"""

from __future__ import annotations

import json

from ckpt_tasks.checkpoint.ranks.exchange import SILENT, Exchange
from ckpt_tasks.errors import StoreError
from ckpt_tasks.system import system

_AHEAD_S = 0.5
_LOOK_S = 0.05
_MOST_AHEAD = 10_000
_KEPT = 8  # Keep this many orders; all ranks have carried out older orders.


class Horizon:
    """The orders of rank 0, each for one step of all ranks. All ranks must call `begin` at the same point."""

    def __init__(self, exchange: Exchange, deadline_s: float):
        self._exchange = exchange
        self._deadline_s = deadline_s
        self._begun = 0
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start again at a step to which all ranks have been restored."""
        self._begun += 1
        self._until = step
        self._orders: list[tuple[int, str]] = []
        self._done = step
        self._asked = [""]  # This rank's requests so far; the last request may still wait for its order.
        self._heard: dict[int, int] = {}  # In rank 0: how many requests of each rank were read.
        self._newest: bytes | None = None  # In rank 0: the name of the newest request, as last read from the store.
        self._looked_s = 0.0
        self._last: tuple[int, float] | None = None
        self._step_s = 1.0

    def at(self, step: int, wish: str | None) -> str | None:
        """Return the order for a step, or None; a `wish` becomes an order for this step or a later step.

        Raises StoreError if rank 0 does not grant this step within the deadline.
        """
        if self._exchange.size == 1:
            return wish
        if self._exchange.rank == 0:
            self._grant(step, wish)
        else:
            self._ask(step, wish)
        order = next((order for at, order in self._orders if self._done < at <= step), None)
        if order is not None:
            self._done, self._asked[-1] = step, ""
        return order

    def _grant(self, step: int, wish: str | None) -> None:
        now_s = system().monotonic()
        if self._last is not None and step > self._last[0]:
            self._step_s = (now_s - self._last[1]) / (step - self._last[0])
        self._last = step, now_s
        ahead = max(1, min(_MOST_AHEAD, int(_AHEAD_S / max(self._step_s, 1e-9))))
        wishes = [wish] if wish else []
        if now_s - self._looked_s > _LOOK_S or step >= self._until:
            self._looked_s = now_s
            wishes += self._hear()
        new = [wish for wish in wishes if all(at <= self._done or order != wish for at, order in self._orders)]
        if new:
            self._orders = [*self._orders[1 - _KEPT :], (max(self._until + 1, step), new[0])]
        elif step < self._until - ahead // 2:
            return
        self._until = max(self._until, step) + ahead
        self._exchange.post(f"grant/{self._begun}", json.dumps([self._until, self._orders]).encode())

    def _hear(self) -> list[str]:
        """Return the new requests of the other ranks; without new requests, one read is enough for all ranks."""
        newest = self._exchange.look(f"wish/{self._begun}")
        if newest == self._newest:
            return []
        self._newest = newest
        wishes = []
        for rank in range(1, self._exchange.size):
            number, _, wish = (self._exchange.look(f"wish/{self._begun}/{rank}") or b"0").decode().partition(" ")
            if int(number) > self._heard.get(rank, 0):
                self._heard[rank] = int(number)
                wishes.append(wish)
        return wishes

    def _ask(self, step: int, wish: str | None) -> None:
        if wish and wish != self._asked[-1]:
            self._asked.append(wish)
            rank, number = self._exchange.rank, len(self._asked)
            self._exchange.post(f"wish/{self._begun}/{rank}", f"{number} {wish}".encode())
            # Post this after the request: it makes rank 0 read the requests.
            self._exchange.post(f"wish/{self._begun}", f"{number} of {rank}".encode())
        end_s = system().monotonic() + self._deadline_s
        while step > self._until or system().monotonic() - self._looked_s > _LOOK_S:
            self._looked_s = system().monotonic()
            word = self._exchange.look(f"grant/{self._begun}")
            if word is not None:
                until, orders = json.loads(word)
                self._until, self._orders = until, [(at, order) for at, order in orders]
            if step > self._until:
                if system().monotonic() > end_s:
                    why = f"rank 0 has granted no step for {self._deadline_s:.0f} s"
                    raise StoreError(why, step=step, hint=SILENT)
                system().sleep(0.001)
