"""Is every worker there and moving, and can this server serve? Tells the truth or turns red.

1. `HealthMonitor` asks each worker for its status, again and again, each on its own.
2. A worker is down when it does not answer, says so itself, or has work and makes no progress.
3. `judge` makes the verdict for /health from one look at the fleet.

Knows no requests. Run by `jpd.router.router`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from jpd.errors import WorkerLostError
from jpd.router.fleet import Fleet
from jpd.router.prefix_feed import PrefixFeed
from jpd.router.worker_entry import WorkerEntry
from jpd.worker.protocol import Role, WorkerStatus

POLL_SECONDS = 0.25
STATUS_SECONDS = 5.0
"""A worker that has not answered by then is down."""
STUCK_SECONDS = 30.0
"""A worker with work that has not finished a turn of its loop for this long is down."""

Verdict = Literal["ok", "degraded", "failed"]
WorkerState = Literal["up", "suspended", "draining", "down"]


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """One line of the report."""

    name: str
    role: Role
    state: WorkerState
    reason: str  # why it is not up, else ""
    host: str = ""  # whose process it lives in; "": this one


@dataclass(frozen=True, slots=True)
class Health:
    """The verdict, why it is not "ok", and the workers it rests on. Ready: new work is taken."""

    status: Verdict
    reasons: tuple[str, ...]
    workers: tuple[WorkerHealth, ...]
    is_ready: bool


class HealthMonitor:
    """Keeps the fleet's view of its workers fresh. One task per worker, started by `start`."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Callable[[], float],
        *,
        poll_seconds: float = POLL_SECONDS,
        status_seconds: float = STATUS_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        self._fleet, self._clock = fleet, clock
        self._feed = PrefixFeed(fleet.prefixes)
        self._poll_seconds, self._status_seconds = poll_seconds, status_seconds
        self._stuck_seconds = stuck_seconds
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Ask every worker once, then go on asking in the background."""
        await asyncio.gather(*(self.watch(entry) for entry in self._fleet.entries))

    async def watch(self, entry: WorkerEntry) -> None:
        """Ask this worker once, then go on asking in the background."""
        await self.check(entry)
        self._tasks[entry.client.name] = asyncio.create_task(self._poll(entry))

    async def unwatch(self, entry: WorkerEntry) -> None:
        """Ask it no more."""
        await self._end(self._tasks.pop(entry.client.name))

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            await self._end(task)
        await self._feed.close()

    async def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def check(self, entry: WorkerEntry) -> None:
        """One look at one worker: marks it up or down. Never raises, so nobody stops looking."""
        name = entry.client.name
        try:
            async with asyncio.timeout(self._status_seconds):
                status = await entry.client.status()
            self._fleet.note_status(status)
            self._feed.hear(entry.client, status)
            reason = self._why_down(entry, status)
        except TimeoutError:
            reason = f"no status within {self._status_seconds:g} s"
        except WorkerLostError as error:
            reason = error.reason
        except Exception as error:
            reason = f"status failed: {error!r}"
        if reason:
            self._fleet.set_down(name, reason)
            self._feed.lose(name)
        else:
            self._fleet.set_up(name)

    async def _poll(self, entry: WorkerEntry) -> None:
        while True:
            await asyncio.sleep(self._poll_seconds)
            await self.check(entry)

    def _why_down(self, entry: WorkerEntry, status: WorkerStatus) -> str:
        if not status.healthy:
            return status.reason or "it says it is not healthy"
        if self._is_stuck(entry, status):
            return f"no progress for {self._stuck_seconds:g} s with work to do"
        return ""

    def _is_stuck(self, entry: WorkerEntry, status: WorkerStatus) -> bool:
        """Has work, and no turn of its loop ended for too long. An idle loop need not turn."""
        now = self._clock()
        if entry.stuck_since is not None:
            if entry.progress_time <= entry.stuck_since:
                return True  # whatever it says it holds: what is told to it stays undone
            entry.stuck_since = entry.busy_since = None
        reported = status.num_slots_used + status.num_prefills_waiting
        if not (entry.has_work or reported):
            entry.busy_since = None
            return False
        if entry.busy_since is None:
            entry.busy_since = now
        if now - max(entry.progress_time, entry.busy_since) <= self._stuck_seconds:
            return False
        entry.stuck_since = now
        return True


def judge(fleet: Fleet, local_prefill_tokens: int, is_draining: bool) -> Health:
    """The verdict over one look at the fleet."""
    views = [view for view in fleet.snapshot() if view.is_available]
    workers = tuple(_worker_health(entry) for entry in fleet.entries)
    reasons = [f"{worker.name} is {worker.state}: {worker.reason}" for worker in _not_up(workers)]
    reasons += [
        f"{entry.client.name}: {entry.status.num_compilations_after_ready} compilations after ready"
        for entry in fleet.entries
        if entry.status is not None and entry.status.num_compilations_after_ready
    ]
    can_decode = any(view.decodes for view in views)
    can_prefill = any(
        view.role == "prefill"
        or (view.can_prefill and (view.role == "colocated" or local_prefill_tokens > 0))
        for view in views
    )
    missing = [
        f"no {what} worker is available"
        for what, there in (("decode", can_decode), ("prefill", can_prefill))
        if not there
    ]
    status: Verdict = "failed" if missing else "degraded" if reasons else "ok"
    if is_draining:
        reasons.append("the server is draining")
    return Health(status, tuple(missing + reasons), workers, not missing and not is_draining)


def _not_up(workers: Sequence[WorkerHealth]) -> list[WorkerHealth]:
    return [worker for worker in workers if worker.state != "up"]


def _worker_health(entry: WorkerEntry) -> WorkerHealth:
    state: WorkerState = "up"
    reason = ""
    if entry.watch.is_down:
        state, reason = "down", entry.watch.down_reason
    elif entry.is_leaving or (entry.status is not None and entry.status.draining):
        state, reason = "draining", "takes no new work"
    elif entry.is_suspended:
        state, reason = "suspended", f"{entry.breaker.num_faults} faults in a row"
    host = entry.status.host if entry.status is not None else ""
    return WorkerHealth(entry.client.name, entry.role, state, reason, host)
