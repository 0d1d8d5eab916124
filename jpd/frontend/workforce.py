"""The workers as an operator changes them: the router's roster and the launcher's hosts as one.

Knows which workers share a host process, which ends with the last of them. Runs on the router's
event loop; what blocks runs on threads. Called by `jpd.frontend.admin` and `jpd.api`.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from jpd.errors import ConfigError, RequestError
from jpd.router.roster import Roster, RosterLine
from jpd.worker.protocol import Role, WorkerClient


class HostRunner(Protocol):
    """What a launcher can do at run time. Both methods block."""

    def add_host(self, name: str) -> Sequence[WorkerClient]:
        """Start a [[host]] that was added to the mesh file. Raises RequestError, ConfigError."""
        ...

    def forget_worker(self, name: str) -> None:
        """The worker is gone; a host without workers ends."""
        ...


class Workforce:
    """One change at a time, so that two cannot together stop the server."""

    def __init__(self, roster: Roster, hosts: HostRunner) -> None:
        self._roster, self._hosts = roster, hosts
        self._changing = asyncio.Lock()

    def lines(self) -> list[RosterLine]:
        return self._roster.lines()

    async def drain(self, worker: str) -> None:
        async with self._changing:
            await self._roster.drain(worker)

    async def set_role(self, worker: str, role: Role) -> None:
        async with self._changing:
            await self._roster.set_role(worker, role)

    async def remove(self, worker: str) -> None:
        async with self._changing:
            await self._roster.remove(worker)
            await asyncio.to_thread(self._hosts.forget_worker, worker)

    async def add_host(self, host: str) -> list[str]:
        """The names of its workers, which take requests from now on. Raises RequestError."""
        async with self._changing:
            try:
                clients = await asyncio.to_thread(self._hosts.add_host, host)
            except ConfigError as error:
                raise RequestError("host", host, str(error)) from error
            for client in clients:
                await self._roster.add(client)
            return [client.name for client in clients]
