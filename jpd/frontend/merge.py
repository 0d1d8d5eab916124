"""Runs several async streams at once and yields their items as they come.

Knows nothing of text or tokens. Called by TextService for n > 1 and for batches of prompts.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


class _End:
    """Last thing a source puts on the queue."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


async def merge(
    groups: Sequence[Sequence[Callable[[], AsyncGenerator[Item, None]]]],
    max_running: int,
    num_ahead: int = 1,
) -> AsyncGenerator[Item, None]:
    """Items of all sources. The first error of any of them ends the merge and cancels the others.

    The first source of a group goes ahead; the others start after its `num_ahead` items, because
    they can then share the work it has done. At most `max_running` sources run at a time.
    """
    queue: asyncio.Queue[Item | _End] = asyncio.Queue()
    room = asyncio.Semaphore(max_running)
    tasks: list[asyncio.Task[None]] = []
    try:
        for group in groups:
            leader_started = asyncio.Event()
            for number, source in enumerate(group):
                gate = leader_started if number else None
                signal = None if number else leader_started
                pump = _pump(source, queue, room, gate, signal, num_ahead)
                tasks.append(asyncio.create_task(pump))
        running = len(tasks)
        while running:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    source: Callable[[], AsyncGenerator[Item, None]],
    queue: "asyncio.Queue[Item | _End]",
    room: asyncio.Semaphore,
    gate: asyncio.Event | None,
    signal: asyncio.Event | None,
    num_ahead: int,
) -> None:
    """Moves the items of one source to the queue, between its gate and its end."""
    try:
        if gate is not None:
            await gate.wait()
        async with room, aclosing(source()) as items:
            async for item in items:
                queue.put_nowait(item)
                num_ahead -= 1
                if signal is not None and num_ahead <= 0:
                    signal.set()
    except Exception as error:
        queue.put_nowait(_End(error))
    else:
        queue.put_nowait(_End(None))
    finally:
        if signal is not None:
            signal.set()
