"""Workers come, go and change their role while requests are served.

A worker that is drained takes nothing new and ends what it has; streams elsewhere never notice.
What would leave nobody to prefill or to decode is refused. Knows no requests. Made by
`jpd.router.router`, asked by operators.
"""

from dataclasses import dataclass

from jpd.errors import RequestError
from jpd.router.fleet import Fleet
from jpd.router.health import HealthMonitor
from jpd.router.worker_entry import WorkerEntry
from jpd.worker.protocol import Role, WorkerClient


@dataclass(frozen=True, slots=True)
class RosterLine:
    """One worker as operators see it."""

    name: str
    role: Role
    roles: tuple[Role, ...]  # that it can take
    state: str
    reason: str
    host: str
    num_rows: int
    num_slots: int
    num_prefills: int


class Roster:
    """The workers of one router. Everything runs on its event loop."""

    def __init__(self, fleet: Fleet, monitor: HealthMonitor) -> None:
        self._fleet, self._monitor = fleet, monitor

    def lines(self) -> list[RosterLine]:
        return [_line(entry) for entry in self._fleet.entries]

    async def add(self, client: WorkerClient) -> None:
        """Take a new worker in; requests go there as soon as it says that it is well."""
        await self._monitor.watch(self._fleet.add(client))

    async def drain(self, worker: str) -> None:
        """Give it nothing new; returns when all that it had has ended. Raises RequestError."""
        entry = self._leave(worker)
        if not entry.watch.is_down:  # one that is down has nothing
            await entry.client.drain()
        await self._monitor.check(entry)

    async def set_role(self, worker: str, role: Role) -> None:
        """Drain it, change its role, let it take part again. Raises RequestError, WorkerError."""
        entry = self._find(worker)
        roles = entry.status.roles if entry.status is not None else ()
        if role not in roles:
            able = ", ".join(roles) or "none at the moment"
            rule = f"{worker} can be {able}: it compiles what `roles` of its [[worker]] names"
            raise RequestError("role", role, rule)
        self._leave(worker, will_be=role)
        await entry.client.drain()
        await entry.client.set_role(role)
        await self._monitor.check(entry)
        self._fleet.set_leaving(worker, False)

    async def remove(self, worker: str) -> None:
        """Drain it and forget it. Raises RequestError."""
        await self.drain(worker)
        await self._monitor.unwatch(self._find(worker))
        self._fleet.remove(worker)

    def _find(self, worker: str) -> WorkerEntry:
        for entry in self._fleet.entries:
            if entry.client.name == worker:
                return entry
        known = ", ".join(entry.client.name for entry in self._fleet.entries)
        raise RequestError("worker", worker, f"no such worker; there are {known}")

    def _leave(self, worker: str, will_be: Role | None = None) -> WorkerEntry:
        """Nothing new goes there from now on. Raises RequestError when that stopped the server."""
        entry = self._find(worker)
        rest = [
            other.role
            for other in self._fleet.entries
            if other is not entry and not (other.watch.is_down or other.is_leaving)
        ]
        roles = [*rest, will_be] if will_be is not None else rest
        for verb, able in (("decode", ("decode", "colocated")), ("prefill", ("prefill",))):
            is_needed = entry.role in (*able, "colocated")
            if is_needed and not any(role in (*able, "colocated") for role in roles):
                raise RequestError("worker", worker, f"nobody else could {verb}")
        self._fleet.set_leaving(worker, True)
        return entry


def _line(entry: WorkerEntry) -> RosterLine:
    status = entry.status
    is_draining = entry.is_leaving or (status is not None and status.draining)
    state = "down" if entry.watch.is_down else "draining" if is_draining else "up"
    return RosterLine(
        name=entry.client.name,
        role=entry.role,
        roles=status.roles if status is not None else (),
        state="suspended" if state == "up" and entry.is_suspended else state,
        reason=entry.watch.down_reason,
        host=status.host if status is not None else "",
        num_rows=entry.num_rows,
        num_slots=status.num_slots if status is not None else 0,
        num_prefills=entry.num_prefills,
    )
