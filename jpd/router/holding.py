"""All that one attempt holds in the fleet, and the three calls to workers that change it.

Every call is guarded, counted while it lasts, and its errors are told as faults of the failure
table. `release` gives back whatever is still held, on every way out. Knows no request; used by
`jpd.router.journey`.
"""

import contextlib
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

from jpd.errors import DeadlineError, JpdError, TransferError, WorkerError, WorkerLostError
from jpd.router.failure import AttemptFailedError, classify
from jpd.router.guard import Guard
from jpd.router.parts import RouterParts
from jpd.router.policy import Row
from jpd.worker.protocol import Attempt, DecodeEvent, PrefillResult, Reservation

_log = logging.getLogger(__name__)


class Holding:
    """Rows, pages and calls of one attempt."""

    def __init__(self, parts: RouterParts, attempt: Attempt, row: Row) -> None:
        self._parts, self._fleet = parts, parts.fleet
        self.attempt, self.row = attempt, row
        self.decode_worker = ""  # holds a row and pages there
        self.prefill_worker = ""  # may hold pages there
        self.num_prefill_tokens = 0  # counted against the prefill worker while it computes
        self.is_kv_complete = False

    async def reserve(self, worker: str) -> Reservation | None:
        """Ask for room; the row and its pages are counted from the first moment. None: no room now.

        Raises WorkerError, RequestError.
        """
        self._fleet.take_row(worker, self.row)
        self.decode_worker = worker
        try:
            with _worker_errors(worker):
                async with self._guard(worker):
                    reservation = await self._fleet.client(worker).reserve(self.attempt)
        except BaseException:
            self.release()  # the answer may be lost while the room is taken
            raise
        if reservation is None:
            self._give_row(was_held=False)
        return reservation

    async def prefill(
        self, worker: str, reservation: Reservation, num_uncached_tokens: int
    ) -> PrefillResult:
        """Prefill on `worker`; its load is given back as it answers. Raises AttemptFailedError."""
        self.prefill_worker = worker
        self.num_prefill_tokens = num_uncached_tokens
        self._fleet.take_prefill(worker, self.num_prefill_tokens)
        try:
            with self._faults(worker):
                async with self._guard(worker, self.decode_worker):
                    result = await self._fleet.client(worker).prefill(self.attempt, reservation)
                self._check_id(worker, result.attempt_id)
        finally:
            self._give_prefill()
        return result

    async def decode(
        self,
        first_token_id: int,
        transfer_seconds: float,
        on_kv: Callable[[DecodeEvent], None],
        on_event: Callable[[DecodeEvent], bool],
    ) -> None:
        """Hand on events until `on_event` says the last one was there. Raises AttemptFailedError.

        `on_kv` gets the first event before `on_event` does: it means that the KV is whole.
        """
        worker = self.decode_worker
        events = self._fleet.client(worker).decode(self.attempt.attempt_id, first_token_id)
        try:
            with self._faults(worker):
                event = await self._first_event(events, transfer_seconds)
                self.is_kv_complete = True
                on_kv(event)
                async with self._guard(worker):
                    while not on_event(event):
                        event = await self._next_own(events)
            if event.finish_reason is not None:
                self._give_row()  # the worker ended the attempt itself and has freed it
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()

    def release(self) -> None:
        """Give back all that is still held; workers are told, not waited for. Idempotent."""
        self._give_prefill()
        sender, self.prefill_worker = self.prefill_worker, ""
        if sender and sender != self.decode_worker and not self.is_kv_complete:
            self._parts.releases.send(sender, self.attempt.attempt_id)
        if self.decode_worker:
            self._parts.releases.send(self.decode_worker, self.attempt.attempt_id)
            self._give_row()

    async def _first_event(
        self, events: AsyncIterator[DecodeEvent], transfer_seconds: float
    ) -> DecodeEvent:
        """Wait for the KV: for `transfer_seconds`, and only while both workers are up."""
        worker, sender = self.decode_worker, self.prefill_worker
        late = TransferError(worker, f"KV did not arrive within {transfer_seconds:g} s")
        try:
            async with self._guard(worker, sender, seconds=transfer_seconds, late=late):
                return await self._next_own(events)
        except WorkerLostError as error:
            if error.worker != sender or sender == worker:
                raise
            reason = f"{sender} was lost while it sent: {error.reason}"
            raise TransferError(worker, reason) from error

    async def _next_own(self, events: AsyncIterator[DecodeEvent]) -> DecodeEvent:
        """The next event of this attempt; one of another attempt is counted and dropped."""
        async for event in events:
            if event.attempt_id == self.attempt.attempt_id:
                return event
            self._parts.metrics.unknown_attempts.inc()
            _log.warning("event of %s came to %s", event.attempt_id, self.attempt.attempt_id)
        raise WorkerLostError(self.decode_worker, "its stream ended without a last token")

    def _check_id(self, worker: str, attempt_id: str) -> None:
        if attempt_id != self.attempt.attempt_id:
            self._parts.metrics.unknown_attempts.inc()
            raise WorkerLostError(worker, f"answered {self.attempt.attempt_id} as {attempt_id}")

    def _guard(
        self, *workers: str, seconds: float = math.inf, late: Exception | None = None
    ) -> Guard:
        """Bounded by the request's deadline, or by `seconds` with `late` when that comes first."""
        watches = [self._fleet.watch(worker) for worker in dict.fromkeys(workers)]
        seconds_left = self.attempt.deadline - self._parts.clock()
        if late is not None and seconds < seconds_left:
            return Guard(watches, seconds, late)
        return Guard(watches, seconds_left, DeadlineError("the request's deadline has passed"))

    @contextlib.contextmanager
    def _faults(self, worker: str) -> Iterator[None]:
        """Tell worker errors of a call to `worker` as faults."""
        try:
            with _worker_errors(worker):
                yield
        except WorkerError as error:
            fault = classify(error, worker, self.decode_worker)
            raise AttemptFailedError(fault, error) from error

    def _give_row(self, was_held: bool = True) -> None:
        if self.decode_worker:
            self._fleet.give_row(self.decode_worker, self.row, was_held=was_held)
            self.decode_worker = ""

    def _give_prefill(self) -> None:
        if self.num_prefill_tokens:
            self._fleet.give_prefill(self.prefill_worker, self.num_prefill_tokens)
            self.num_prefill_tokens = 0


@contextlib.contextmanager
def _worker_errors(worker: str) -> Iterator[None]:
    """What is neither an error of the tree nor a bug of the router is the worker's fault."""
    try:
        yield
    except (JpdError, AssertionError):
        raise
    except Exception as error:
        _log.exception("worker %s raised", worker)
        raise WorkerLostError(worker, repr(error)) from error
