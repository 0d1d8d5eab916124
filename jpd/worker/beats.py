"""Waiting for a sign of life from the other end of a connection. Used by both ends."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

BEAT_SECONDS = 0.25
"""How often both ends say that they are there."""
SILENCE_SECONDS = 1.6
"""A host without a word for this long is lost."""
ROUTER_SILENCE_SECONDS = 10.0
"""A router; nobody waits for it, and what it held is only in the way of others."""
OWN_SHARE = 0.25

Sign = TypeVar("Sign")


async def hear(sign: Coroutine[Any, Any, Sign], silence_seconds: float) -> Sign:
    """What comes within this time. Raises TimeoutError, and what the coroutine raises.

    In two waits: when this process itself stood still, the first one is over at once, and the
    second leaves time to take in what has long been here.
    """
    task = asyncio.ensure_future(sign)
    try:
        for share in (1.0 - OWN_SHARE, OWN_SHARE):
            await asyncio.wait({task}, timeout=share * silence_seconds)
            if task.done():
                return task.result()
    finally:
        task.cancel()
    raise TimeoutError
