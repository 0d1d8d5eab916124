"""The bridges to the background loop: results, errors, streams that are left, closing."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Generator

import pytest

from jpd.errors import RequestCancelledError
from jpd.frontend.loop_thread import LoopThread


@pytest.fixture
def loop_thread() -> Generator[LoopThread, None, None]:
    thread = LoopThread()
    yield thread
    thread.close()


class Numbers:
    """0, 1, 2, ... until closed; raises at `error_at`."""

    def __init__(self, count: int = 1 << 30, error_at: int = -1) -> None:
        self.count, self.error_at = count, error_at
        self.closed = threading.Event()
        self.thread_name = ""

    async def __call__(self) -> AsyncGenerator[int, None]:
        self.thread_name = threading.current_thread().name
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                if number == self.error_at:
                    raise ValueError(f"at {number}")
                yield number
        finally:
            self.closed.set()


async def double(value: int) -> int:
    await asyncio.sleep(0)
    if value < 0:
        raise ValueError("negative")
    return 2 * value


async def forever() -> None:
    await asyncio.Event().wait()


def test_run_gives_results_and_errors(loop_thread: LoopThread) -> None:
    assert loop_thread.run(double(2)) == 4
    with pytest.raises(ValueError, match="negative"):
        loop_thread.run(double(-1))


async def test_arun_gives_results_and_errors(loop_thread: LoopThread) -> None:
    assert await loop_thread.arun(double(2)) == 4
    with pytest.raises(ValueError, match="negative"):
        await loop_thread.arun(double(-1))


async def test_cancelling_arun_cancels_the_work(loop_thread: LoopThread) -> None:
    cancelled = threading.Event()

    async def work() -> None:
        try:
            await forever()
        finally:
            cancelled.set()

    task = asyncio.create_task(loop_thread.arun(work()))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(cancelled.wait, 1.0)


def test_iterate_runs_the_generator_on_the_loop(loop_thread: LoopThread) -> None:
    numbers = Numbers(3)
    assert list(loop_thread.iterate(numbers())) == [0, 1, 2]
    assert numbers.thread_name == "jpd-loop"


async def test_aiterate_runs_the_generator_on_the_loop(loop_thread: LoopThread) -> None:
    numbers = Numbers(3)
    assert [number async for number in loop_thread.aiterate(numbers())] == [0, 1, 2]
    assert numbers.thread_name == "jpd-loop"


def test_iterate_passes_errors_on(loop_thread: LoopThread) -> None:
    items = loop_thread.iterate(Numbers(error_at=1)())
    assert next(items) == 0
    with pytest.raises(ValueError, match="at 1"):
        next(items)


async def test_aiterate_passes_errors_on(loop_thread: LoopThread) -> None:
    items = loop_thread.aiterate(Numbers(error_at=1)())
    assert await anext(items) == 0
    with pytest.raises(ValueError, match="at 1"):
        await anext(items)


def test_leaving_iterate_closes_the_stream(loop_thread: LoopThread) -> None:
    numbers = Numbers()
    for number in loop_thread.iterate(numbers()):
        if number == 3:
            break
    assert numbers.closed.wait(1.0)


async def test_leaving_aiterate_closes_the_stream(loop_thread: LoopThread) -> None:
    numbers = Numbers()
    items = loop_thread.aiterate(numbers())
    await anext(items)
    await items.aclose()
    assert await asyncio.to_thread(numbers.closed.wait, 1.0)


def test_close_wakes_whoever_waits() -> None:
    thread = LoopThread()
    caught: list[Exception] = []

    def wait() -> None:
        try:
            thread.run(forever())
        except RequestCancelledError as error:
            caught.append(error)

    def read() -> None:
        async def silent() -> AsyncGenerator[int, None]:
            await forever()
            yield 1

        try:
            next(thread.iterate(silent()))
        except RequestCancelledError as error:
            caught.append(error)

    waiters = [threading.Thread(target=wait), threading.Thread(target=read)]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.05)
    thread.close()
    for waiter in waiters:
        waiter.join(1.0)
    assert len(caught) == 2
    thread.close()  # a second time is nothing
    assert not any(item.name == "jpd-loop" for item in threading.enumerate())


async def test_close_wakes_a_waiting_coroutine() -> None:
    thread = LoopThread()
    waiting = asyncio.create_task(thread.arun(forever()))
    await asyncio.sleep(0.02)
    await asyncio.to_thread(thread.close)
    with pytest.raises(RequestCancelledError):
        await waiting
