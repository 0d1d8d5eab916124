"""Tests in virtual time: hours of traffic in milliseconds."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

from jpd.explore.virtual_time import VirtualTimeLoop

P = ParamSpec("P")


def virtual(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))  # type: ignore[arg-type]

    return run
