"""WorkerClient of a worker in another process: each verb is one call of `jpd.worker.service`.

A call never outlives the attempt's deadline, nor the connection: when that is lost every call under
way raises WorkerLostError at once. Statuses come on their own; asking for one asks nobody. Called
by the router, on its event loop.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc

from jpd.cache.prefix_log import PrefixChanges
from jpd.errors import DeadlineError, JpdError, WorkerLostError
from jpd.rpc import worker_pb2 as pb
from jpd.rpc.failures import load_error
from jpd.rpc.records import dump, load
from jpd.worker.connection import HostConnection, Session
from jpd.worker.protocol import (
    Attempt,
    DecodeEvent,
    PrefillResult,
    Reservation,
    Role,
    WorkerStatus,
)

ANSWER_SECONDS = 30.0
"""For verbs that a worker answers between two of its steps."""
NEWS_SECONDS = 2.0
ATTEMPT_SECONDS = 3600.0
"""For prefills, decodes and drains; an attempt's deadline is sooner."""


class RemoteClient:
    """Implements WorkerClient, for one event loop at a time."""

    def __init__(self, name: str, role: Role, connection: HostConnection) -> None:
        self._name, self._role = name, role
        self._connection = connection

    @property
    def name(self) -> str:
        return self._name

    @property
    def role(self) -> Role:
        return self._role

    async def reserve(self, attempt: Attempt) -> Reservation | None:
        request = pb.ReserveRequest(worker=self._name, attempt_record=dump(attempt))
        answer = await self._call("Reserve", request, *self._patience(attempt, ANSWER_SECONDS))
        if not answer.reservation_record:
            return None
        return load(answer.reservation_record, Reservation)

    async def prefill(self, attempt: Attempt, reservation: Reservation) -> PrefillResult:
        request = pb.PrefillRequest(
            worker=self._name,
            attempt_record=dump(attempt),
            reservation_record=dump(reservation),
        )
        answer = await self._call("Prefill", request, *self._patience(attempt, ATTEMPT_SECONDS))
        return load(answer.result_record, PrefillResult)

    async def decode(self, attempt_id: str, first_token_id: int) -> AsyncIterator[DecodeEvent]:
        session = self._connection.session(self._name)
        request = pb.DecodeRequest(
            worker=self._name, attempt_id=attempt_id, first_token_id=first_token_id
        )
        started = session.stub.Decode(request, timeout=ATTEMPT_SECONDS, metadata=session.metadata)
        with session.under_way(started) as call:
            try:
                while True:
                    with self._losses(session, self._silent(ATTEMPT_SECONDS)):
                        answer = await call.read()
                    if answer is grpc.aio.EOF:
                        return
                    if answer.error:
                        raise load_error(answer.error, self._name)
                    yield load(answer.event_record, DecodeEvent, session.clock_offset)
            finally:
                call.cancel()  # of nothing when it has ended

    async def cancel(self, attempt_id: str) -> None:
        request = pb.CancelRequest(worker=self._name, attempt_id=attempt_id)
        with contextlib.suppress(WorkerLostError):  # with its session all that it held is gone
            await self._call("Cancel", request, ANSWER_SECONDS, self._silent(ANSWER_SECONDS))

    async def status(self) -> WorkerStatus:
        await self._connection.start()
        session = self._connection.session(self._name)
        status = session.statuses.get(self._name)
        if status is None:
            raise WorkerLostError(self._name, f"is not on host {self._connection.host}")
        self._role = status.role
        return replace(status, host=self._connection.host)

    async def prefix_changes(self, incarnation: str, sequence: int) -> PrefixChanges:
        request = pb.TellPrefixesRequest(
            worker=self._name, incarnation=incarnation, sequence=sequence
        )
        silent = self._silent(ANSWER_SECONDS)
        answer = await self._call("TellPrefixes", request, ANSWER_SECONDS, silent)
        return load(answer.changes_record, PrefixChanges)

    async def drain(self) -> None:
        request = pb.DrainRequest(worker=self._name)
        await self._call("Drain", request, ATTEMPT_SECONDS, self._silent(ATTEMPT_SECONDS))

    async def set_role(self, role: Role) -> None:
        request = pb.SetRoleRequest(worker=self._name, role=role)
        await self._call("SetRole", request, ANSWER_SECONDS, self._silent(ANSWER_SECONDS))
        with contextlib.suppress(TimeoutError):  # statuses come on their own, a little later
            async with asyncio.timeout(NEWS_SECONDS):
                while (status := await self.status()).role != role or status.draining:
                    await self._connection.session(self._name).news.wait()

    def on_room(self, callback: Callable[[], None]) -> None:
        self._connection.on_room(self._name, callback)

    async def _call(self, verb: str, request: Any, seconds: float, late: JpdError) -> Any:
        """The answer to a verb. Raises the worker's error, WorkerLostError, or `late`."""
        session = self._connection.session(self._name)
        call = getattr(session.stub, verb)(request, timeout=seconds, metadata=session.metadata)
        with session.under_way(call), self._losses(session, late):
            answer = await call
        if answer.error:
            raise load_error(answer.error, self._name)
        return answer

    def _patience(self, attempt: Attempt, seconds: float) -> tuple[float, JpdError]:
        """How long to wait for an answer, and what is said then: whatever comes first."""
        left_seconds = attempt.deadline - time.monotonic()
        if seconds < left_seconds:
            return seconds, self._silent(seconds)
        late = DeadlineError(f"attempt {attempt.attempt_id}: deadline passed")
        return max(0.001, left_seconds), late

    def _silent(self, seconds: float) -> WorkerLostError:
        return WorkerLostError(self._name, f"no answer within {seconds:g} s")

    @contextlib.contextmanager
    def _losses(self, session: Session, late: JpdError) -> Iterator[None]:
        """What ends a call from outside, in the words of the protocol."""
        try:
            yield
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if session.lost_reason and task is not None and not task.cancelling():
                raise WorkerLostError(self._name, session.lost_reason) from error
            raise
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise late from error
            reason = session.lost_reason or f"{error.code().name.lower()}: {error.details()}"
            raise WorkerLostError(self._name, reason) from error
