"""One event loop in a background thread, and the bridges to it from threads and other loops.

The async code exists once, on this loop; the synchronous and the asynchronous face of the Python
API are both thin bridges. A stream that its consumer leaves is cancelled on the loop; one who waits
when the loop is closed gets a RequestCancelledError. The loop is uvloop's: sending a token costs a
third less (`jpd bench frontend`). Knows no router.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import aclosing
from typing import Any, TypeVar

import uvloop

from jpd.errors import RequestCancelledError

CLOSED = "the server was closed"

Result = TypeVar("Result")
Item = TypeVar("Item")


class _End:
    """Last thing a pump delivers."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


_Deliver = Callable[[Item | _End], object]


class LoopThread:
    """Owns the loop and its thread, from construction to `close`."""

    def __init__(self, name: str = "jpd-loop") -> None:
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel what still runs on the loop and end the thread. Blocks; idempotent."""
        if self._loop.is_closed():
            return
        self.run(_cancel_other_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work` on the loop. Blocks; an interrupt of the caller cancels it."""
        future = self._submit(work)
        try:
            return future.result()
        except CancelledError as error:
            raise RequestCancelledError(CLOSED) from error
        finally:
            future.cancel()

    async def arun(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The same for the coroutines of another loop."""
        future = self._submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError as error:
            if future.cancelled() and not _is_being_cancelled():
                raise RequestCancelledError(CLOSED) from error
            raise
        finally:
            future.cancel()

    def iterate(self, items: AsyncGenerator[Item, None]) -> Generator[Item, None, None]:
        """Items of an async generator that lives on the loop. Leaving the iteration closes it."""
        inbox: queue.SimpleQueue[Item | _End] = queue.SimpleQueue()
        pump = self._submit(_pump(items, inbox.put))
        try:
            while True:
                item = inbox.get()
                if isinstance(item, _End):
                    if item.error is not None:
                        raise item.error
                    return
                yield item
        finally:
            pump.cancel()

    async def aiterate(self, items: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
        """The same for a consumer on another loop."""
        caller = asyncio.get_running_loop()
        inbox: asyncio.Queue[Item | _End] = asyncio.Queue()

        def deliver(item: Item | _End) -> None:
            caller.call_soon_threadsafe(inbox.put_nowait, item)

        pump = self._submit(_pump(items, deliver))
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, _End):
                    if item.error is not None:
                        raise item.error
                    return
                yield item
        finally:
            pump.cancel()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())


async def _pump(items: AsyncGenerator[Item, None], deliver: _Deliver[Item]) -> None:
    """Moves items to the consumer's side and then delivers exactly one end."""
    end = _End(RequestCancelledError(CLOSED))
    try:
        async with aclosing(items):
            async for item in items:
                deliver(item)
        end = _End(None)
    except Exception as error:
        end = _End(error)
    finally:
        with contextlib.suppress(RuntimeError):  # the consumer's loop may be closed by now
            deliver(end)


def _is_being_cancelled() -> bool:
    """Whether the caller itself is being cancelled, as against what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _cancel_other_tasks() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
