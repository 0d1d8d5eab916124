"""Who is prefilled next: one at a time, the highest priority first, then the oldest."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator


class PrefillTurns:
    """The line before one prefill engine."""

    def __init__(self) -> None:
        self._order = itertools.count()
        self._waiting: list[tuple[int, int]] = []
        self._is_over = asyncio.Condition()
        self._is_busy = False

    @contextlib.asynccontextmanager
    async def take(self, priority: int) -> AsyncIterator[None]:
        key = (-priority, next(self._order))
        self._waiting.append(key)
        try:
            async with self._is_over:
                await self._is_over.wait_for(
                    lambda: not self._is_busy and min(self._waiting) == key
                )
                self._is_busy = True
        except BaseException:
            self._waiting.remove(key)
            raise
        try:
            yield
        finally:
            self._waiting.remove(key)
            self._is_busy = False
            async with self._is_over:
                self._is_over.notify_all()
