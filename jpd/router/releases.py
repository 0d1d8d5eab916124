"""Cancels under way: told to workers at once, waited for by nobody on the way out.

Tasks here outlive their request, so that no exit path, not even a cancelled one, has to wait for
a worker. Knows no requests; used by `jpd.router.holding`, settled by the router when it closes.
"""

import asyncio
import logging

from jpd.router.fleet import Fleet

CANCEL_SECONDS = 10.0
"""How long the router listens for the acknowledgement of a cancel."""

_log = logging.getLogger(__name__)


class Releases:
    """The set of cancels that were sent and not yet acknowledged."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def send(self, worker: str, attempt_id: str) -> None:
        """Tell a worker to free all that an attempt holds there."""
        task = asyncio.get_running_loop().create_task(self._cancel(worker, attempt_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Wait until every cancel was acknowledged or given up."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def _cancel(self, worker: str, attempt_id: str) -> None:
        if worker not in self._fleet:
            return  # it left in the meantime, with all that it held
        client, watch = self._fleet.client(worker), self._fleet.watch(worker)
        try:
            async with asyncio.timeout(CANCEL_SECONDS):
                await client.cancel(attempt_id)
        except Exception as error:
            # A lost worker has freed everything; from one that is up this deserves a look.
            level = logging.DEBUG if watch.is_down else logging.WARNING
            _log.log(level, "cancel of %s on worker %s: %r", attempt_id, worker, error)
