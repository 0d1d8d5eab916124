"""Sessions of routers with a host: what their attempts hold is freed when the router is gone.

A session lives as long as its Watch call. Knows no transport; used by `jpd.worker.service`.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from jpd.errors import WorkerLostError
from jpd.worker.protocol import WorkerClient

GRACE_SECONDS = 5.0
"""From Connect to the Watch that keeps the session alive."""


@dataclass(slots=True)
class Session:
    """One router's time with this host."""

    session_id: str
    router: str
    clock_offset: float  # this host's clock − the router's
    opened_time: float
    is_watched: bool = False
    attempts: set[tuple[str, str]] = field(default_factory=set)  # worker, attempt id


class Sessions:
    """All sessions of a host. Everything runs on its event loop."""

    def __init__(self, clients: Mapping[str, WorkerClient]) -> None:
        self._clients = clients
        self._sessions: dict[str, Session] = {}

    async def open(self, router: str, clock_offset: float) -> Session:
        """A new one; the one that this router had before is over."""
        now = asyncio.get_running_loop().time()
        self._drop_unwatched(now)
        for before in [one for one in self._sessions.values() if one.router == router]:
            await self.end(before)
        session = Session(uuid.uuid4().hex, router, clock_offset, now)
        self._sessions[session.session_id] = session
        return session

    def find(self, session_id: str, worker: str) -> Session:
        """Raises WorkerLostError when the session is over: what it held is gone."""
        session = self._sessions.get(session_id)
        if session is None:
            raise WorkerLostError(worker, "the session of this router is over")
        return session

    async def end(self, session: Session) -> None:
        """Free all that its attempts hold."""
        self._sessions.pop(session.session_id, None)
        held, session.attempts = session.attempts, set()
        for worker, attempt_id in held:
            with contextlib.suppress(WorkerLostError):
                await self._clients[worker].cancel(attempt_id)

    def _drop_unwatched(self, now: float) -> None:
        for session in list(self._sessions.values()):
            if not session.is_watched and session.opened_time + GRACE_SECONDS < now:
                del self._sessions[session.session_id]  # nothing was held: calls come after Watch
