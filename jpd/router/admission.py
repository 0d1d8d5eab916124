"""The queue for room: in the order of `jpd.router.lines`; bounded in length and time; never polled.

1. A request that finds nobody waiting tries to reserve at once; one that is refused waits here.
2. Whenever room may have been freed the first in order tries again, then the next, until one is
   refused. Nobody overtakes it out of turn, so small ones cannot starve a large one.
3. Tries overlap only when the router's own count says there is room for both.
4. `seconds_of_wait` foretells the wait from the pace of late, so that who would come too late is
   refused at once.

Knows no workers: a try and the count of room are functions. Used by `jpd.router.journey`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from jpd.errors import OverloadedError
from jpd.router.lines import Key, Lines

MIN_RETRY_AFTER_SECONDS = 1.0
MAX_RETRY_AFTER_SECONDS = 60.0
_GAP_WEIGHT = 0.1  # of the newest gap in the running mean

Reserved = TypeVar("Reserved")


class Ticket:
    """A place in the queue.

    `waits_for`: the only workers that will do, while others have room. Those behind it may try the
    others, and leave these alone.
    """

    def __init__(
        self,
        due: float,
        sequence: int,
        fits: Callable[[], bool],
        *,
        line: str = "",
        weight: float = 1.0,
    ) -> None:
        self.key: Key = (due, sequence)
        self.line, self.weight = line, weight
        self.fits = fits
        self.waits_for: Collection[str] = ()
        self.tried_generation = -1
        self.is_trying = False
        self.turn: asyncio.Future[None] | None = None  # set by whoever gives the turn


class WaitingRoom:
    """All requests that wait for a reservation. One event loop only."""

    def __init__(
        self,
        max_waiting: int,
        clock: Callable[[], float],
        on_length: Callable[[int], None] = lambda length: None,
    ) -> None:
        self._max_waiting, self._clock, self._on_length = max_waiting, clock, on_length
        self._line: Lines[Ticket] = Lines()
        self._generation = 0  # counts the events that may have freed room
        self._granted: Ticket | None = None  # was given the turn, has not begun its try
        self._num_trying = 0
        self._last_admitted: float | None = None  # since somebody waits, or that began
        self._mean_gap_seconds: float | None = None  # between two admissions while some wait

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    def room_freed(self) -> None:
        """Somewhere there may be more room than before."""
        self._generation += 1
        self._give_turn()

    async def admit(
        self,
        ticket: Ticket,
        attempt: Callable[[], Awaitable[Reserved | None]],
        seconds_left: Callable[[], float],
        *,
        is_retry: bool = False,
    ) -> Reserved:
        """Wait until `attempt` gives a reservation. Raises OverloadedError when none came in time.

        A retry has its place by its first arrival and is never refused for the length of the line.
        """
        try:
            if self._line:
                self._join(ticket, is_retry)
                await self._await_turn(ticket, seconds_left())
            while True:
                reserved = await self._try(ticket, attempt)
                if reserved is not None:
                    self._note_admitted(ticket)
                    return reserved
                self._join(ticket, is_retry)
                await self._await_turn(ticket, seconds_left())
        except BaseException:
            self._generation += 1  # what it stood in the way of may have room
            raise
        finally:
            self._leave(ticket)

    def kept_before(self, ticket: Ticket) -> set[str]:
        """Workers that tickets before this one wait for: their room is not its own to take."""
        kept: set[str] = set()
        for other in self._line:
            if other is ticket:
                break
            kept.update(other.waits_for)
        return kept

    def seconds_of_wait(self, ticket: Ticket) -> float:
        """How long it would wait from now on, at the pace of late; 0.0 when nobody is before it."""
        if not self._line or self._last_admitted is None:
            return 0.0
        if ticket.fits() and all(other.waits_for for other in self._line):
            return 0.0  # all of them have use for other workers only
        gap = max(self._mean_gap_seconds or 0.0, self._clock() - self._last_admitted)
        return gap * (1 + self._line.num_before(ticket))

    def retry_after_seconds(self) -> float:
        """How long the line takes at the present pace."""
        gap = MIN_RETRY_AFTER_SECONDS if self._mean_gap_seconds is None else self._mean_gap_seconds
        return bounded_retry_after(gap * (1 + len(self._line)))

    def check_integrity(self) -> None:
        """Counts against a recount. Raises AssertionError."""
        self._line.check_integrity()
        assert self._num_trying >= sum(ticket.is_trying for ticket in self._line)
        assert self._granted is None or self._granted in self._line, "the turn is with nobody"

    def is_idle(self) -> bool:
        return not self._line and self._num_trying == 0 and self._granted is None

    async def _try(
        self, ticket: Ticket, attempt: Callable[[], Awaitable[Reserved | None]]
    ) -> Reserved | None:
        ticket.tried_generation = self._generation
        ticket.is_trying = True
        self._num_trying += 1
        if self._granted is ticket:
            self._granted = None
        # The try counts its need before it first waits; only then may the next one look for room.
        asyncio.get_running_loop().call_soon(self._give_turn)
        try:
            return await attempt()
        finally:
            ticket.is_trying = False
            self._num_trying -= 1

    def _join(self, ticket: Ticket, is_retry: bool) -> None:
        if ticket in self._line:
            return
        if len(self._line) >= self._max_waiting and not is_retry:
            self._make_place(ticket)
        if not self._line:
            self._last_admitted = self._clock()
        self._line.add(ticket)
        self._on_length(len(self._line))

    def _make_place(self, ticket: Ticket) -> None:
        """The last in order yields to who would stand before it; else the newcomer is refused."""
        error = OverloadedError(
            f"{len(self._line)} requests are waiting for room", self.retry_after_seconds()
        )
        last = self._line.last()
        is_last = last is None or self._line.num_before(ticket) >= len(self._line)
        if is_last or last is None or last.turn is None or last.turn.done():
            raise error
        last.turn.set_exception(error)
        self._remove(last)

    async def _await_turn(self, ticket: Ticket, seconds: float) -> None:
        ticket.turn = asyncio.get_running_loop().create_future()
        self._give_turn()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await ticket.turn
        except TimeoutError as error:
            reason = "no room before the deadline"
            raise OverloadedError(reason, self.retry_after_seconds()) from error
        finally:
            ticket.turn = None

    def _give_turn(self) -> None:
        """Wake the first in line that has not been refused since room was last freed."""
        if self._granted is not None:
            return
        for ticket in self._line:
            if ticket.is_trying:
                continue
            if ticket.tried_generation == self._generation:
                if ticket.waits_for:
                    continue
                return
            if ticket.turn is None or ticket.turn.done():
                return
            if self._num_trying == 0 or ticket.fits():
                self._granted = ticket
                ticket.turn.set_result(None)
            return

    def _leave(self, ticket: Ticket) -> None:
        if self._granted is ticket:
            self._granted = None
        if ticket in self._line:
            self._remove(ticket)
        self._give_turn()

    def _remove(self, ticket: Ticket, *, is_served: bool = False) -> None:
        self._line.remove(ticket, is_served=is_served)
        self._on_length(len(self._line))

    def _note_admitted(self, ticket: Ticket) -> None:
        if ticket not in self._line or self._last_admitted is None:
            return
        now = self._clock()
        gap = now - self._last_admitted
        known = gap if self._mean_gap_seconds is None else self._mean_gap_seconds
        self._mean_gap_seconds = known + _GAP_WEIGHT * (gap - known)
        self._last_admitted = now
        self._remove(ticket, is_served=True)


def bounded_retry_after(seconds: float) -> float:
    """What a client is told: neither hammering nor giving up helps anybody."""
    return min(MAX_RETRY_AFTER_SECONDS, max(MIN_RETRY_AFTER_SECONDS, seconds))
