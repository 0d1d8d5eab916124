"""The queue for room: order, bound, no starvation, no lost wake-up."""

import asyncio

import pytest

from jpd.errors import OverloadedError
from jpd.router.admission import Ticket, WaitingRoom
from tests.router.virtual_time import virtual


class Pool:
    """So much room, asked for with a delay as a worker would be."""

    def __init__(self, size: int, max_waiting: int = 100, delay: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        self.free, self.delay = size, delay
        self.room = WaitingRoom(max_waiting, loop.time)
        self.order: list[str] = []
        self.max_tries = self.num_tries = 0
        self._sequence = 0

    async def admit(self, name: str, need: int = 1, priority: int = 0, seconds: float = 60.0):  # type: ignore[no-untyped-def]
        self._sequence += 1
        deadline = asyncio.get_running_loop().time() + seconds
        fits = lambda: self.free >= need  # noqa: E731
        ticket = Ticket(priority, self._sequence, fits)
        await self.room.admit(
            ticket,
            lambda: self._try(name, need),
            lambda: deadline - asyncio.get_running_loop().time(),
        )

    def give(self, amount: int) -> None:
        self.free += amount
        self.room.room_freed()

    async def _try(self, name: str, need: int) -> str | None:
        self.num_tries += 1
        self.max_tries = max(self.max_tries, self.num_tries)
        had_room = self.free >= need
        self.free -= need  # counted at once
        if had_room:
            self.order.append(name)
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.give(need)
            raise
        finally:
            self.num_tries -= 1
        if not had_room:
            self.free += need
        return name if had_room else None


async def turn() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@virtual
async def test_room_is_taken_at_once_when_nobody_waits() -> None:
    pool = Pool(2)
    await asyncio.gather(pool.admit("a"), pool.admit("b"))
    assert pool.order == ["a", "b"] and pool.room.is_idle()


@virtual
async def test_first_come_first_served_within_a_priority() -> None:
    pool = Pool(0)
    tasks = [
        asyncio.create_task(pool.admit(name, priority=priority))
        for name, priority in [("a", 0), ("b", 0), ("c", 5), ("d", -1), ("e", 5)]
    ]
    await turn()
    assert pool.room.num_waiting == 5
    for _ in range(5):
        pool.give(1)
        await turn()
        pool.room.check_integrity()
    assert pool.order == ["c", "e", "a", "b", "d"]
    await asyncio.gather(*tasks)
    assert pool.room.is_idle()


@virtual
async def test_a_large_request_is_not_starved_by_small_ones() -> None:
    pool = Pool(0)
    large = asyncio.create_task(pool.admit("large", need=3))
    await turn()
    small = [asyncio.create_task(pool.admit(f"small{i}")) for i in range(4)]
    for _ in range(3):
        pool.give(1)
        await turn()
    assert pool.order == ["large"]
    pool.give(4)
    await asyncio.gather(large, *small)


@virtual
async def test_b07_a_newcomer_of_high_priority_is_tried_before_a_blocked_low_one() -> None:
    pool = Pool(2)
    low = asyncio.create_task(pool.admit("low", need=3))
    await turn()
    await pool.admit("high", need=1, priority=1)
    assert pool.order == ["high"] and not low.done()
    pool.give(2)
    await low


@virtual
async def test_h07_room_freed_during_a_try_is_not_missed() -> None:
    pool = Pool(0, delay=1.0)
    task = asyncio.create_task(pool.admit("a"))
    await asyncio.sleep(0.5)  # the try under way will say no
    pool.give(1)
    await asyncio.sleep(5.0)
    assert task.done() and pool.order == ["a"]


@virtual
async def test_tries_overlap_only_while_the_own_count_says_there_is_room() -> None:
    pool = Pool(0, delay=1.0)
    tasks = [asyncio.create_task(pool.admit(str(i), need=i % 2 + 1)) for i in range(8)]
    await asyncio.sleep(5.0)
    pool.max_tries, start = 0, asyncio.get_running_loop().time()
    pool.give(12)
    await asyncio.gather(*tasks)
    assert pool.order == [str(i) for i in range(8)]
    assert pool.max_tries > 4, "one after the other would take a second each"
    assert asyncio.get_running_loop().time() - start < 3.0


@virtual
async def test_waiting_ends_at_the_deadline_with_a_time_to_retry() -> None:
    pool = Pool(0)
    start = asyncio.get_running_loop().time()
    with pytest.raises(OverloadedError) as caught:
        await pool.admit("a", seconds=3.0)
    assert asyncio.get_running_loop().time() - start == pytest.approx(3.0)
    assert 1.0 <= caught.value.retry_after_seconds <= 60.0
    assert pool.room.is_idle()


@virtual
async def test_one_too_many_is_refused_at_once() -> None:
    pool = Pool(0, max_waiting=3)
    tasks = [asyncio.create_task(pool.admit(str(i))) for i in range(3)]
    await turn()
    start = asyncio.get_running_loop().time()
    with pytest.raises(OverloadedError, match="3 requests are waiting"):
        await pool.admit("late")
    assert asyncio.get_running_loop().time() == start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert pool.room.is_idle()


@virtual
async def test_a_full_line_sheds_its_last_for_a_higher_priority() -> None:
    pool = Pool(0, max_waiting=2)
    low = [asyncio.create_task(pool.admit(str(i))) for i in range(2)]
    await turn()
    high = asyncio.create_task(pool.admit("high", priority=1))
    await turn()
    with pytest.raises(OverloadedError):
        await low[1]
    pool.give(2)
    await asyncio.gather(high, low[0])
    assert pool.order == ["high", "0"]


@virtual
async def test_a_cancelled_ticket_passes_its_turn_on() -> None:
    pool = Pool(0, delay=1.0)
    tasks = [asyncio.create_task(pool.admit(str(i))) for i in range(3)]
    await asyncio.sleep(5.0)
    pool.give(1)
    await asyncio.sleep(0.5)
    assert pool.order == ["0"]
    tasks[0].cancel()
    await asyncio.sleep(5.0)
    assert pool.order == ["0", "1"] and tasks[1].done(), "the turn and the room went on"
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert pool.room.is_idle()


@virtual
async def test_who_leaves_lets_those_try_who_were_refused_because_of_it() -> None:
    pool = Pool(2, delay=1.0)
    large = asyncio.create_task(pool.admit("large", need=3, seconds=5.0))
    small = asyncio.create_task(pool.admit("small"))  # refused while the large try is counted
    with pytest.raises(OverloadedError):
        await large
    await asyncio.sleep(3.0)
    assert small.done() and pool.order == ["small"]


@virtual
async def test_those_behind_a_picky_ticket_may_still_try() -> None:
    pool = Pool(0)
    ticket = Ticket(0, 0, lambda: False)
    ticket.may_skip = True
    picky = asyncio.create_task(pool.room.admit(ticket, _never, lambda: 60.0))
    await turn()
    other = asyncio.create_task(pool.admit("other"))
    await turn()
    pool.give(1)
    await other
    assert pool.order == ["other"]
    picky.cancel()
    await asyncio.gather(picky, return_exceptions=True)
    assert pool.room.is_idle()


async def _never() -> None:
    return None
