"""Keeps the prefix index true: asks workers what changed in their prefix caches, if anything did.

A status says how many changes there were; only a worker that has more than were heard of is asked,
in a task of its own, so that one that stands still delays nobody's health. A gap or another
incarnation is answered with a snapshot. Fed by `jpd.router.health`.
"""

import asyncio
import logging

from jpd.router.prefix_index import PrefixIndex
from jpd.worker.protocol import WorkerClient, WorkerStatus

CHANGES_SECONDS = 10.0
"""How long the router waits for the answer."""

_log = logging.getLogger(__name__)


class PrefixFeed:
    """At most one question under way to each worker."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def hear(self, client: WorkerClient, status: WorkerStatus) -> None:
        """A status came in: ask for changes unless all are known."""
        name = client.name
        self._index.settle(name)
        if not status.incarnation or name in self._tasks:
            return
        incarnation, sequence = self._index.position(name)
        if incarnation != status.incarnation:
            self._index.forget(name)  # it began anew: nothing it held before is there
        elif sequence >= status.num_prefix_changes:
            return
        task = asyncio.get_running_loop().create_task(self._ask(client))
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._tasks.pop(name))

    def lose(self, worker: str) -> None:
        """The worker is down: what it holds may be gone."""
        self._index.forget(worker)

    async def close(self) -> None:
        while self._tasks:
            tasks = tuple(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _ask(self, client: WorkerClient) -> None:
        try:
            async with asyncio.timeout(CHANGES_SECONDS):
                changes = await client.prefix_changes(*self._index.position(client.name))
            self._index.apply(client.name, changes)
        except Exception as error:  # costs hits, nothing else; the next status asks again
            _log.debug("worker %s does not tell its prefixes: %r", client.name, error)
