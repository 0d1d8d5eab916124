"""The workers of this host as a gRPC service: the far end of `jpd.worker.remote`.

Each call is handed to the worker's own client and answered with its result or its error. Cancelling
a call, or losing the connection, cancels what it had asked for. Runs on the event loop of a host
process. Knows no router and no devices.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from jpd.errors import ConfigError, Problem, WorkerError
from jpd.rpc import worker_pb2 as pb
from jpd.rpc.failures import dump_error
from jpd.rpc.records import dump, load
from jpd.worker.beats import BEAT_SECONDS, ROUTER_SILENCE_SECONDS, hear
from jpd.worker.fingerprint import PROTOCOL_VERSION, Fingerprint, differences
from jpd.worker.protocol import Attempt, DecodeEvent, Reservation, Role, WorkerClient
from jpd.worker.session import Session, Sessions

DRAIN_LOOK_SECONDS = 0.05
LOGITS_PART_BYTES = 1 << 20

logger = logging.getLogger(__name__)

Context: TypeAlias = Any
Logits: TypeAlias = Callable[[Sequence[int]], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker of another host, and where KV for it goes."""

    worker: str
    kv_address: str
    like: str = ""  # a worker the host knows from its start whose KV travels alike; "": itself


@dataclass(frozen=True, slots=True)
class Peers:
    """All of them."""

    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class HostParts:
    """What a host process puts into the service."""

    name: str
    clients: Mapping[str, WorkerClient]
    fingerprint: Fingerprint
    set_peers: Callable[[Peers], None]
    logits: Logits  # blocks, compiles
    num_kv_kept: Callable[[], int] = lambda: 0  # pieces that other hosts have not read yet


class WorkerService:
    """Implements jpd.worker.v1.WorkerHost."""

    def __init__(self, parts: HostParts, silence_seconds: float = ROUTER_SILENCE_SECONDS) -> None:
        self._parts, self._silence_seconds = parts, silence_seconds
        self._sessions = Sessions(parts.clients)
        self._freed: dict[asyncio.Event, set[str]] = {}  # by Watch call
        for name, client in parts.clients.items():
            client.on_room(lambda name=name: self._note_room(name))  # type: ignore[misc]

    async def Connect(self, request: pb.ConnectRequest, context: Context) -> pb.ConnectResponse:
        answer = pb.ConnectResponse(
            protocol_version=PROTOCOL_VERSION,
            fingerprint_record=dump(self._parts.fingerprint),
            clock_seconds=time.monotonic(),
        )
        try:
            self._check_same(request)
        except ConfigError as error:
            answer.error = dump_error(error, self._parts.name)
        else:
            offset = answer.clock_seconds - request.clock_seconds
            session = await self._sessions.open(request.router, offset)
            answer.session = session.session_id
        return answer

    def _check_same(self, request: pb.ConnectRequest) -> None:
        """Raises ConfigError naming what differs, with both values."""
        number = request.protocol_version
        different = f"protocol_version = {PROTOCOL_VERSION} here, {number} there"
        if number == PROTOCOL_VERSION:
            theirs = load(request.fingerprint_record, Fingerprint)
            different = differences(self._parts.fingerprint, theirs)
        if different:
            rule = f"the router is of another release or model: {different}"
            raise ConfigError([Problem(f"host {self._parts.name}", "fingerprint", "", rule)])

    async def Watch(
        self, requests: AsyncIterator[pb.WatchRequest], context: Context
    ) -> AsyncGenerator[pb.WatchResponse, None]:
        session = self._session(context, self._parts.name)
        session.is_watched = True
        changed = asyncio.Event()
        self._freed[changed] = set()
        listener = asyncio.create_task(self._listen(requests))
        try:
            while not listener.done():
                yield await self._look(changed)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_SECONDS):
                        await changed.wait()
            logger.warning("host %s: its router is gone: %s", self._parts.name, listener.result())
        finally:
            listener.cancel()
            del self._freed[changed]
            await asyncio.shield(self._sessions.end(session))

    async def _listen(self, requests: AsyncIterator[pb.WatchRequest]) -> str:
        """Hear beats until there are none; why."""
        try:
            while await hear(_next(requests), self._silence_seconds) is not None:
                pass
        except TimeoutError:
            return f"silent for {self._silence_seconds:g} s"
        return "it closed the connection"

    async def _look(self, changed: asyncio.Event) -> pb.WatchResponse:
        changed.clear()
        freed, self._freed[changed] = self._freed[changed], set()
        statuses = [await client.status() for client in self._parts.clients.values()]
        return pb.WatchResponse(
            status_records=[dump(status) for status in statuses], freed_workers=sorted(freed)
        )

    def _note_room(self, worker: str) -> None:
        for changed, freed in self._freed.items():
            freed.add(worker)
            changed.set()

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        answer = pb.ReserveResponse()
        with self._telling(answer, request.worker):
            session = self._session(context, request.worker)
            attempt = load(request.attempt_record, Attempt, session.clock_offset)
            held = (request.worker, attempt.attempt_id)
            session.attempts.add(held)
            reservation = None
            try:
                reservation = await self._client(request.worker).reserve(attempt)
            finally:
                if reservation is None:
                    session.attempts.discard(held)
            if reservation is not None:
                answer.reservation_record = dump(reservation)
        return answer

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        answer = pb.PrefillResponse()
        with self._telling(answer, request.worker):
            session = self._session(context, request.worker)
            attempt = load(request.attempt_record, Attempt, session.clock_offset)
            reservation = load(request.reservation_record, Reservation)
            result = await self._client(request.worker).prefill(attempt, reservation)
            answer.result_record = dump(result)
        return answer

    async def Decode(
        self, request: pb.DecodeRequest, context: Context
    ) -> AsyncGenerator[pb.DecodeResponse, None]:
        failed = pb.DecodeResponse()
        with self._telling(failed, request.worker):
            session = self._session(context, request.worker)
            events = self._client(request.worker).decode(request.attempt_id, request.first_token_id)
            async with aclosing(cast(AsyncGenerator[DecodeEvent, None], events)):
                async for event in events:
                    if event.finish_reason is not None:
                        session.attempts.discard((request.worker, request.attempt_id))
                    yield pb.DecodeResponse(event_record=dump(event))
        if failed.error:
            yield failed

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        answer = pb.CancelResponse()
        with self._telling(answer, request.worker):
            session = self._session(context, request.worker)
            await self._client(request.worker).cancel(request.attempt_id)
            session.attempts.discard((request.worker, request.attempt_id))
        return answer

    async def TellPrefixes(
        self, request: pb.TellPrefixesRequest, context: Context
    ) -> pb.TellPrefixesResponse:
        answer = pb.TellPrefixesResponse()
        with self._telling(answer, request.worker):
            client = self._client(request.worker)
            changes = await client.prefix_changes(request.incarnation, request.sequence)
            answer.changes_record = dump(changes)
        return answer

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        answer = pb.DrainResponse()
        with self._telling(answer, request.worker):
            await self._client(request.worker).drain()
            while self._parts.num_kv_kept():  # a lease ends each that nobody reads
                await asyncio.sleep(DRAIN_LOOK_SECONDS)
        return answer

    async def SetRole(self, request: pb.SetRoleRequest, context: Context) -> pb.SetRoleResponse:
        answer = pb.SetRoleResponse()
        with self._telling(answer, request.worker):
            await self._client(request.worker).set_role(cast(Role, request.role))
        return answer

    async def SetPeers(self, request: pb.SetPeersRequest, context: Context) -> pb.SetPeersResponse:
        answer = pb.SetPeersResponse()
        with self._telling(answer, self._parts.name):
            self._parts.set_peers(load(request.peers_record, Peers))
        return answer

    async def Logits(
        self, request: pb.LogitsRequest, context: Context
    ) -> AsyncGenerator[pb.LogitsResponse, None]:
        failed = pb.LogitsResponse()
        with self._telling(failed, self._parts.name):
            logits = await asyncio.to_thread(self._parts.logits, list(request.token_ids))
            data = np.ascontiguousarray(logits, np.float32).tobytes()
            for start in range(0, len(data), LOGITS_PART_BYTES):
                part = data[start : start + LOGITS_PART_BYTES]
                yield pb.LogitsResponse(data=part, vocab_size=logits.shape[1])
        if failed.error:
            yield failed

    def _client(self, worker: str) -> WorkerClient:
        client = self._parts.clients.get(worker)
        if client is None:
            here = ", ".join(self._parts.clients)
            raise WorkerError(worker, f"is not on host {self._parts.name}: it has {here}")
        return client

    def _session(self, context: Context, worker: str) -> Session:
        metadata = dict(context.invocation_metadata() or ())
        return self._sessions.find(metadata.get("jpd-session", ""), worker)

    @contextlib.contextmanager
    def _telling(self, answer: Any, worker: str) -> Iterator[None]:
        """What goes wrong inside becomes the answer's error."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, WorkerError | ConfigError):
                logger.debug("host %s: %r", self._parts.name, error)
            answer.error = dump_error(error, worker)


async def _next(requests: AsyncIterator[pb.WatchRequest]) -> pb.WatchRequest | None:
    """None at the end: the end of the requests is no error here."""
    return await anext(requests, None)
