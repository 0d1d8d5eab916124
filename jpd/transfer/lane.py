"""The queue and the thread of one destination: what is pulled for it, one piece after the other.

A thread of its own, so that a slow or broken destination holds up nobody else. How a piece is
pulled is its transport's. Used by all transports.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from jpd.transfer.offers import Offered
from jpd.transfer.protocol import ArrivedPiece, Deliver

Item = TypeVar("Item", bound=Offered)


class Lane(Generic[Item]):
    """Pieces in the order in which they were put, unless their attempt is cancelled."""

    def __init__(
        self,
        worker: str,
        pull: Callable[[Item], ArrivedPiece],
        deliver: Deliver,
        on_drop: Callable[[Item], None] = lambda item: None,
    ) -> None:
        """`pull` blocks and does not raise. `on_drop` hears of what is never pulled."""
        self._pull, self._deliver, self._on_drop = pull, deliver, on_drop
        self._changed = threading.Condition()
        self._queue: deque[Item] = deque()
        self._pulling: Item | None = None
        self._pulling_cancelled = False
        self._stopped = False
        self.thread = threading.Thread(target=self._run, name=f"transfer-{worker}", daemon=True)
        self.thread.start()

    def put(self, item: Item) -> None:
        with self._changed:
            if not self._stopped:
                self._queue.append(item)
                self._changed.notify()

    def cancel(self, attempt_id: str) -> None:
        with self._changed:
            dropped = [item for item in self._queue if item.attempt_id == attempt_id]
            self._queue = deque(item for item in self._queue if item.attempt_id != attempt_id)
            if self._pulling is not None and self._pulling.attempt_id == attempt_id:
                self._pulling_cancelled = True
        for item in dropped:
            self._on_drop(item)

    def queued(self) -> tuple[Item, ...]:
        """What waits to be pulled."""
        with self._changed:
            return tuple(self._queue)

    def num_in_flight(self) -> int:
        with self._changed:
            return len(self._queue) + (self._pulling is not None)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._pulling_cancelled = True
            self._changed.notify()

    def _run(self) -> None:
        while (item := self._take()) is not None:
            arrived = self._pull(item)
            del item  # the staging arrays of the source live no longer than the copy
            self._hand_over(arrived)
            del arrived

    def _take(self) -> Item | None:
        """The oldest item; waits for one. None when stopped."""
        with self._changed:
            while not self._queue and not self._stopped:
                self._changed.wait()
            if self._stopped:
                return None
            self._pulling, self._pulling_cancelled = self._queue.popleft(), False
            return self._pulling

    def _hand_over(self, arrived: ArrivedPiece) -> None:
        with self._changed:
            cancelled = self._pulling_cancelled
        if not cancelled:
            self._deliver(arrived)
        with self._changed:
            self._pulling = None
