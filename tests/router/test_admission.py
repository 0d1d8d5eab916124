"""The queue for room: order, bound, no starvation, no lost wake-up."""

import asyncio
from collections import Counter

import pytest

from jpd.errors import OverloadedError
from jpd.router.admission import Ticket, WaitingRoom
from jpd.router.lines import PRIORITY_SECONDS
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

    async def admit(  # type: ignore[no-untyped-def]
        self,
        name: str,
        need: int = 1,
        priority: int = 0,
        seconds: float = 60.0,
        line: str = "",
        weight: float = 1.0,
    ):
        self._sequence += 1
        deadline = asyncio.get_running_loop().time() + seconds
        fits = lambda: self.free >= need  # noqa: E731
        due = asyncio.get_running_loop().time() - PRIORITY_SECONDS * priority
        ticket = Ticket(due, self._sequence, fits, line=line, weight=weight)
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
    ticket = Ticket(0.0, 0, lambda: False)
    ticket.waits_for = {"d1"}
    picky = asyncio.create_task(pool.room.admit(ticket, _never, lambda: 60.0))
    await turn()
    other = asyncio.create_task(pool.admit("other"))
    await turn()
    behind = Ticket(0.0, 9, lambda: True)
    assert pool.room.kept_before(behind) == {"d1"} and pool.room.kept_before(ticket) == set()
    pool.give(1)
    await other
    assert pool.order == ["other"]
    picky.cancel()
    await asyncio.gather(picky, return_exceptions=True)
    assert pool.room.is_idle()


async def _never() -> None:
    return None


async def fill(pool: Pool, *lines: tuple[str, float, int]) -> list["asyncio.Task[None]"]:
    """So many tickets in each line of a weight, all waiting."""
    tasks = [
        asyncio.create_task(pool.admit(f"{line}{n}", line=line, weight=weight))
        for line, weight, count in lines
        for n in range(count)
    ]
    await turn()
    return tasks


@virtual
async def test_lines_are_served_by_weight_and_none_starves() -> None:
    pool = Pool(0)
    tasks = await fill(pool, ("heavy", 3.0, 60), ("light", 1.0, 60))
    for _ in range(40):
        pool.give(1)
        await turn()
        pool.room.check_integrity()
    served = Counter(name.rstrip("0123456789") for name in pool.order)
    assert served == {"heavy": 30, "light": 10}
    await cancel_all(tasks, pool)


@virtual
async def test_a_line_that_was_empty_has_saved_up_no_turns() -> None:
    pool = Pool(0)
    tasks = await fill(pool, ("busy", 1.0, 40))
    pool.give(20)
    await turn()
    tasks += await fill(pool, ("new", 1.0, 20))
    pool.order.clear()
    pool.give(10)
    await turn()
    served = Counter(name.rstrip("0123456789") for name in pool.order)
    assert served == {"busy": 5, "new": 5}
    await cancel_all(tasks, pool)


@virtual
async def test_within_a_line_the_first_due_goes_first_and_priority_is_worth_a_minute() -> None:
    pool = Pool(0)
    early = asyncio.create_task(pool.admit("early", seconds=1e6))
    await asyncio.sleep(2 * PRIORITY_SECONDS)
    late = asyncio.create_task(pool.admit("late", priority=1, seconds=1e6))
    urgent = asyncio.create_task(pool.admit("urgent", priority=3, seconds=1e6))
    await turn()
    pool.give(3)
    await asyncio.gather(early, late, urgent)
    assert pool.order == ["urgent", "early", "late"], "an old one is not overtaken for ever"


@virtual
async def test_a_full_room_sheds_from_the_line_that_takes_more_than_its_share() -> None:
    pool = Pool(0, max_waiting=4)
    tasks = await fill(pool, ("greedy", 1.0, 4))
    modest = asyncio.create_task(pool.admit("modest", line="modest"))
    await turn()
    assert tasks[-1].done() and isinstance(tasks[-1].exception(), OverloadedError)
    pool.give(4)
    await asyncio.gather(modest, *tasks[:3])
    assert pool.room.is_idle()


@virtual
async def test_the_wait_is_foretold_from_the_pace_and_the_place() -> None:
    pool = Pool(0)
    now = asyncio.get_running_loop().time
    ticket = Ticket(now(), 1_000, lambda: False)
    assert pool.room.seconds_of_wait(ticket) == 0.0, "nobody waits"
    tasks = await fill(pool, ("", 1.0, 20))
    for _ in range(10):
        await asyncio.sleep(2.0)
        pool.give(1)
        await turn()
    last = Ticket(now(), 1_000, lambda: False)
    assert pool.room.seconds_of_wait(last) == pytest.approx(2.0 * 11)
    first = Ticket(now() - 1e4, 1_001, lambda: False)
    assert pool.room.seconds_of_wait(first) == pytest.approx(2.0)
    fresh = Ticket(now(), 1_002, lambda: False, line="other")
    assert pool.room.seconds_of_wait(fresh) <= 2.0 * 3, "another line has its own turns"
    await asyncio.sleep(600.0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert pool.room.seconds_of_wait(last) == 0.0, "a quiet hour slows no pace down"


async def cancel_all(tasks: list["asyncio.Task[None]"], pool: Pool) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert pool.room.is_idle()
