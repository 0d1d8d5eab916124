"""Several streams at once: order, the leader of a group, the limit, errors and closing."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import pytest

from jpd.frontend.merge import merge


class Source:
    """Counts 0, 1, 2, ... with a name; remembers when it was started and that it was closed."""

    def __init__(self, name: str, count: int = 2, error: Exception | None = None) -> None:
        self.name, self.count, self.error = name, count, error
        self.started = self.closed = False

    async def __call__(self) -> AsyncGenerator[str, None]:
        self.started = True
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                yield f"{self.name}{number}"
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


async def test_all_items_come_in_order_within_each_source() -> None:
    items = [item async for item in merge([[Source("a")], [Source("b", 3)]], 8)]
    assert sorted(items) == ["a0", "a1", "b0", "b1", "b2"]
    assert [item for item in items if item.startswith("b")] == ["b0", "b1", "b2"]


async def test_the_others_of_a_group_wait_for_the_leaders_first_item() -> None:
    leader_may_go = asyncio.Event()

    async def slow_leader() -> AsyncGenerator[str, None]:
        await leader_may_go.wait()
        yield "leader"

    follower = Source("f", 1)
    other_group = Source("o", 1)
    async with aclosing(merge([[slow_leader, follower], [other_group]], 8)) as merged:
        assert await anext(merged) == "o0"
        assert not follower.started
        leader_may_go.set()
        assert await anext(merged) == "leader"
        assert await anext(merged) == "f0"


async def test_the_others_can_wait_for_more_than_one_item() -> None:
    leader, follower = Source("l", 3), Source("f", 1)
    async with aclosing(merge([[leader, follower]], 8, num_ahead=2)) as merged:
        assert await anext(merged) == "l0"
        assert not follower.started
        assert await anext(merged) == "l1"
        assert sorted([item async for item in merged]) == ["f0", "l2"]
    assert [item async for item in merge([[Source("l", 1), Source("f", 1)]], 8, 2)] == ["l0", "f0"]


async def test_a_leader_without_items_does_not_hold_up_its_group() -> None:
    items = [item async for item in merge([[Source("a", 0), Source("b", 1)]], 8)]
    assert items == ["b0"]


async def test_no_more_than_the_limit_run_at_a_time() -> None:
    running = most = 0

    async def counted(index: int) -> AsyncGenerator[int, None]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        yield index

    groups = [[partial(counted, index)] for index in range(12)]
    items = [item async for item in merge(groups, 3)]
    assert sorted(items) == list(range(12))
    assert most == 3


async def test_one_error_ends_all_and_closes_the_others() -> None:
    endless = Source("e", 1 << 30)
    with pytest.raises(ValueError, match="broken"):
        async for _ in merge([[endless], [Source("b", 1, ValueError("broken"))]], 8):
            pass
    assert endless.closed


async def test_closing_closes_every_source() -> None:
    sources = [Source("a", 1 << 30), Source("b", 1 << 30)]
    merged = merge([sources], 8)
    await anext(merged)
    await merged.aclose()
    assert all(item.closed for item in sources if item.started)
    assert sources[0].closed
