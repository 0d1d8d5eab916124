"""An event loop whose clock jumps to the next thing to happen: hours of traffic in milliseconds.

Single-threaded: no sockets, no signals, and calls from other threads are not supported. Used by the
explorer and by tests of the router.
"""

import asyncio
import selectors
from collections.abc import Callable, Mapping
from contextvars import Context
from typing import Any, TypeVarTuple

START_SECONDS = 1000.0

Ts = TypeVarTuple("Ts")


class DeadlockError(RuntimeError):
    """Everybody waits and nothing is left to happen."""


class _JumpingSelector(selectors.BaseSelector):
    """Never sleeps and watches nothing: where the loop would sleep, its clock jumps."""

    def __init__(self) -> None:
        self.now = START_SECONDS
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("everybody waits and nothing is left to happen")
        self.now += max(0.0, timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)
