"""Ends a wait that depends on workers: when its time is up, or as soon as one of them goes down.

A worker that died or stands still may never answer, so no call to one is awaited without a guard.
Knows no requests; used by `jpd.router.holding`, tripped by `jpd.router.fleet`.
"""

import asyncio
import math
from collections.abc import Sequence
from types import TracebackType

from jpd.errors import WorkerLostError


class Watch:
    """Whether one worker is up, and who waits on it."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.down_reason = ""
        self._guards: dict[Guard, None] = {}  # in the order in which they began to wait

    @property
    def is_down(self) -> bool:
        return bool(self.down_reason)

    def go_down(self, reason: str) -> None:
        """Mark the worker as down and end every wait on it with WorkerLostError."""
        self.down_reason = reason
        for guard in tuple(self._guards):
            guard.trip(WorkerLostError(self.worker, reason))

    def come_up(self) -> None:
        self.down_reason = ""

    def add(self, guard: "Guard") -> None:
        self._guards[guard] = None

    def discard(self, guard: "Guard") -> None:
        self._guards.pop(guard, None)


class Guard:
    """Around one wait. Raises `late` after `seconds`, WorkerLostError when tripped."""

    def __init__(self, watches: Sequence[Watch], seconds: float, late: Exception) -> None:
        self._watches, self._late = watches, late
        self._seconds = None if math.isinf(seconds) else max(0.0, seconds)
        self._lost: WorkerLostError | None = None

    async def __aenter__(self) -> None:
        for watch in self._watches:
            if watch.is_down:
                raise WorkerLostError(watch.worker, watch.down_reason)
        self._timeout = asyncio.timeout(self._seconds)
        await self._timeout.__aenter__()
        for watch in self._watches:
            watch.add(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for watch in self._watches:
            watch.discard(self)
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as timeout:
            raise (self._lost or self._late) from timeout

    def trip(self, error: WorkerLostError) -> None:
        """End the wait now. A later trip, or one after the time was up, changes nothing."""
        if self._lost is None and not self._timeout.expired():
            self._lost = error
            self._timeout.reschedule(asyncio.get_running_loop().time())
