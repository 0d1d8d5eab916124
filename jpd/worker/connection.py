"""The router's connection to one host: kept up, watched, and begun anew after every loss.

1. Connect: versions, fingerprints, clocks. 2. Watch: statuses and freed room, beats both ways.
3. When the other end is silent or the connection breaks, every call under way ends at once.
4. After a pause the same again, at whatever address the host has by then.
Runs on the router's event loop. Used by `jpd.worker.remote`.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from jpd.errors import JpdError, WorkerLostError
from jpd.rpc import worker_pb2 as pb
from jpd.rpc.failures import load_error
from jpd.rpc.records import dump, load
from jpd.rpc.security import Security, open_channel, why_no_connection
from jpd.rpc.worker_pb2_grpc import WorkerHostStub
from jpd.worker.beats import BEAT_SECONDS, SILENCE_SECONDS, hear
from jpd.worker.fingerprint import PROTOCOL_VERSION, Fingerprint
from jpd.worker.protocol import WorkerStatus

CONNECT_SECONDS = 2.0
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 1.0

logger = logging.getLogger(__name__)


class Place(Protocol):
    """Where a host is at the moment, as its launcher knows."""

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str | None:
        """None while it does not run."""
        ...

    @property
    def reason(self) -> str:
        """Why it does not."""
        ...


@dataclass(slots=True)
class Session:
    """One unbroken time with the host."""

    stub: Any
    metadata: tuple[tuple[str, str], ...]
    clock_offset: float  # this process's clock − the host's
    statuses: dict[str, WorkerStatus] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)  # set for a moment by each status
    calls: set[Any] = field(default_factory=set)
    lost_reason: str = ""

    @contextlib.contextmanager
    def under_way(self, call: Any) -> Iterator[Any]:
        """The call ends when the session does."""
        self.calls.add(call)
        try:
            yield call
        finally:
            self.calls.discard(call)

    def end(self, reason: str) -> None:
        self.lost_reason = reason
        self.news.set()
        for call in tuple(self.calls):
            call.cancel()


class HostConnection:
    """All clients of one host share it. `start` is idempotent."""

    def __init__(
        self,
        place: Place,
        fingerprint: Fingerprint,
        security: Security,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._place, self._fingerprint, self._security = place, fingerprint, security
        self._silence_seconds = silence_seconds
        self._router = uuid.uuid4().hex
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._session: Session | None = None
        self._reason = "not connected yet"
        self._tried = asyncio.Event()
        self._room_callbacks: dict[str, list[Callable[[], None]]] = {}

    @property
    def host(self) -> str:
        return self._place.name

    async def start(self) -> None:
        """Connect and stay so; returns when the first try has succeeded or failed."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._loop is not loop:
            self._loop, self._tried = loop, asyncio.Event()
            self._task = loop.create_task(self._run(), name=f"host-{self.host}")
        await self._tried.wait()

    async def stop(self) -> None:
        """End the session; nothing is tried again."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def session(self, worker: str) -> Session:
        """Raises WorkerLostError while there is none."""
        if self._session is None:
            raise WorkerLostError(worker, f"host {self.host}: {self._reason}")
        return self._session

    def on_room(self, worker: str, callback: Callable[[], None]) -> None:
        self._room_callbacks.setdefault(worker, []).append(callback)

    async def _run(self) -> None:
        pause_seconds = FIRST_PAUSE_SECONDS
        while True:
            try:
                async with self._connected() as session:
                    pause_seconds = FIRST_PAUSE_SECONDS
                    await self._watch(session)
            except Exception as error:
                self._reason = self._why(error)
                logger.debug("host %s: %s", self.host, self._reason)
            self._tried.set()
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, MAX_PAUSE_SECONDS)

    def _why(self, error: Exception) -> str:
        if self._place.address is None:
            return self._place.reason
        if isinstance(error, TimeoutError):
            return f"silent for {self._silence_seconds:g} s"
        if isinstance(error, grpc.aio.AioRpcError):
            details = str(error.details())
            said = why_no_connection(details, self._security) or details
            return f"{error.code().name.lower().replace('_', ' ')}: {said}"
        return str(error) if isinstance(error, JpdError) else repr(error)

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Session]:
        """A session from its opening to its loss, when all its calls end."""
        address = self._place.address
        if address is None:
            raise WorkerLostError(self.host, self._place.reason)
        async with open_channel(address, self._security) as channel:
            session = await self._connect(WorkerHostStub(channel))
            try:
                yield session
            except Exception as error:
                self._reason = self._why(error)
                logger.warning("host %s is lost: %s", self.host, self._reason)
                raise
            finally:
                self._session = None
                session.end(self._reason)

    async def _connect(self, stub: Any) -> Session:
        asked = time.monotonic()
        request = pb.ConnectRequest(
            protocol_version=PROTOCOL_VERSION,
            fingerprint_record=dump(self._fingerprint),
            clock_seconds=asked,
            router=self._router,
        )
        answer = await stub.Connect(
            request, timeout=CONNECT_SECONDS, metadata=self._security.metadata
        )
        if answer.error:
            raise load_error(answer.error, self.host)
        halfway = (asked + time.monotonic()) / 2
        metadata = (*self._security.metadata, ("jpd-session", answer.session))
        return Session(stub, metadata, halfway - answer.clock_seconds)

    async def _watch(self, session: Session) -> None:
        """Take in what the host says until it says nothing more. Raises what ended it."""
        call = session.stub.Watch(self._beats(), metadata=session.metadata)
        try:
            while True:
                seen = await hear(call.read(), self._silence_seconds)
                if seen is grpc.aio.EOF:
                    raise WorkerLostError(self.host, "it ended the connection")
                self._take(session, seen)
        finally:
            call.cancel()

    async def _beats(self) -> AsyncIterator[pb.WatchRequest]:
        while True:
            yield pb.WatchRequest()
            await asyncio.sleep(BEAT_SECONDS)

    def _take(self, session: Session, seen: pb.WatchResponse) -> None:
        for record in seen.status_records:
            status = load(record, WorkerStatus, session.clock_offset)
            session.statuses[status.name] = status
        session.news.set()
        session.news.clear()
        if self._session is None:
            self._session = session
            self._tried.set()
            logger.info("host %s is connected", self.host)
        for worker in seen.freed_workers:
            for callback in self._room_callbacks.get(worker, ()):
                callback()
