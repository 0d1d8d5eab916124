"""The lines of those who wait: one for each SLO class, served in turns by weight.

    within a line   by due time: the deadline of the first token, less a minute for each priority
    between lines   by weight: one of weight 2 gives two tickets for each one of weight 1

Due times are fixed at arrival, so nobody is overtaken for ever; a line that was empty begins at
the present turn, so none saves up turns. Knows no room and no workers. Used by
`jpd.router.admission`.
"""

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

PRIORITY_SECONDS = 60.0
"""Waiting that one step of priority is worth: who came so much earlier goes first all the same."""

Key = tuple[float, int]


class Waiting(Protocol):
    """What a line has to know of a ticket."""

    @property
    def line(self) -> str: ...

    @property
    def weight(self) -> float: ...

    @property
    def key(self) -> Key:
        """Due time, and order of arrival."""
        ...


T = TypeVar("T", bound=Waiting)


def _key(ticket: Waiting) -> Key:
    return ticket.key


@dataclass(slots=True)
class _Line(Generic[T]):
    turn: float = 0.0  # of its first ticket; the next is 1 / weight later
    stride: float = 1.0
    tickets: list[T] = field(default_factory=list)


class Lines(Generic[T]):
    """All lines of one waiting room."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._turn = 0.0  # of the ticket that was served last
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, ticket: T) -> bool:
        line = self._lines.get(ticket.line)
        return line is not None and ticket in line.tickets

    def __iter__(self) -> Iterator[T]:
        """All that wait, in the order in which they are to be served."""
        heads = [
            (line.turn, line.tickets[0].key, name, 0)
            for name, line in self._lines.items()
            if line.tickets
        ]
        heapq.heapify(heads)
        while heads:
            turn, _, name, place = heapq.heappop(heads)
            line = self._lines[name]
            yield line.tickets[place]
            if place + 1 < len(line.tickets):
                following = line.tickets[place + 1].key
                heapq.heappush(heads, (turn + line.stride, following, name, place + 1))

    def add(self, ticket: T) -> None:
        line = self._lines.setdefault(ticket.line, _Line())
        line.stride = 1.0 / ticket.weight
        if not line.tickets:
            line.turn = max(line.turn, self._turn)
        bisect.insort(line.tickets, ticket, key=_key)
        self._length += 1

    def remove(self, ticket: T, *, is_served: bool = False) -> None:
        """Take a ticket out; one that is served uses up a turn of its line."""
        line = self._lines[ticket.line]
        line.tickets.remove(ticket)
        self._length -= 1
        if is_served:
            self._turn = max(self._turn, line.turn)
            line.turn += line.stride

    def num_before(self, ticket: T) -> int:
        """Tickets that would be served before this one, were it to wait from now on."""
        own = self._lines.get(ticket.line)
        place, turn = 0, self._turn
        if own is not None:
            place = bisect.bisect_left(own.tickets, ticket.key, key=_key)
            turn = own.turn if own.tickets else max(own.turn, self._turn)
        turn += place / ticket.weight
        return place + sum(
            min(len(line.tickets), max(0, 1 + int((turn - line.turn) / line.stride)))
            for name, line in self._lines.items()
            if name != ticket.line and line.tickets and line.turn <= turn
        )

    def last(self) -> T | None:
        """Who would be served after everybody else."""
        ends = [
            (line.turn + (len(line.tickets) - 1) * line.stride, line.tickets[-1].key, name)
            for name, line in self._lines.items()
            if line.tickets
        ]
        return self._lines[max(ends)[2]].tickets[-1] if ends else None

    def check_integrity(self) -> None:
        """Every line is in order, and the count is true. Raises AssertionError."""
        for line in self._lines.values():
            assert line.tickets == sorted(line.tickets, key=_key), "a line is out of order"
        assert self._length == sum(len(line.tickets) for line in self._lines.values())
