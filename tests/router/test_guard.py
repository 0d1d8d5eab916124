"""Waits on workers end: by time, by a worker going down, by cancel; each as what it is."""

import asyncio

import pytest

from jpd.errors import DeadlineError, WorkerLostError
from jpd.router.guard import Guard, Watch
from tests.router.virtual_time import virtual

LATE = DeadlineError("late")


async def wait_for_ever(guard: Guard) -> None:
    async with guard:
        await asyncio.Event().wait()


@virtual
async def test_time_is_up() -> None:
    start = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineError, match="late"):
        await wait_for_ever(Guard([Watch("w")], 3.0, LATE))
    assert asyncio.get_running_loop().time() - start == pytest.approx(3.0)


@virtual
async def test_a_worker_goes_down() -> None:
    first, second = Watch("a"), Watch("b")
    task = asyncio.create_task(wait_for_ever(Guard([first, second], float("inf"), LATE)))
    await asyncio.sleep(1.0)
    second.go_down("dead")
    first.go_down("dead too")
    with pytest.raises(WorkerLostError, match="worker b: dead$"):
        await task
    assert not first._guards and not second._guards


@virtual
async def test_a_worker_that_is_down_already() -> None:
    watch = Watch("a")
    watch.go_down("dead")
    with pytest.raises(WorkerLostError, match="dead"):
        await wait_for_ever(Guard([watch], 3.0, LATE))
    watch.come_up()
    with pytest.raises(DeadlineError):
        await wait_for_ever(Guard([watch], 3.0, LATE))


@virtual
async def test_a_cancel_stays_a_cancel() -> None:
    watch = Watch("a")
    task = asyncio.create_task(wait_for_ever(Guard([watch], 3.0, LATE)))
    await asyncio.sleep(1.0)
    task.cancel()
    watch.go_down("at the same moment")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not watch._guards


@virtual
async def test_errors_and_answers_pass_through() -> None:
    watch = Watch("a")
    with pytest.raises(KeyError):
        async with Guard([watch], 3.0, LATE):
            raise KeyError("mine")
    async with Guard([watch], 3.0, LATE):
        await asyncio.sleep(1.0)
    await asyncio.sleep(5.0)
    assert not watch._guards
