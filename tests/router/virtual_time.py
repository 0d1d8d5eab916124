"""An event loop whose clock jumps to the next thing to happen: hours of traffic in milliseconds."""

import asyncio
import functools
import selectors
from collections.abc import Awaitable, Callable
from typing import ParamSpec

START_SECONDS = 1000.0

P = ParamSpec("P")


class _JumpingSelector(selectors.DefaultSelector):
    """Never sleeps: tells the loop how far it may jump instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START_SECONDS

    def select(self, timeout=None):  # type: ignore[no-untyped-def]
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("deadlock: everybody waits and nothing is left to happen")
            self.now += max(0.0, timeout)
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def virtual(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))  # type: ignore[arg-type]

    return run
