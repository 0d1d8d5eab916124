"""A worker: one mesh, one thread, one role. Only this thread dispatches work on the mesh's KV pool.

A turn of its loop: deadlines → calls from the inbox → decode step → prefill step → publish. It
waits only between turns, when there is nothing to do. An exception in a turn makes the worker
unhealthy and ends all its attempts with WorkerLostError; the process and the other workers live on.
Knows no event loop and no transport: client.py does. Built by a launcher.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from jpd.cache.prefix_log import PrefixChanges
from jpd.errors import JpdError, WorkerError, WorkerLostError
from jpd.guidance.guide import Mask
from jpd.transfer.protocol import ArrivedPiece, PageRequest
from jpd.worker.decode_attempts import DecodeSink
from jpd.worker.idle_check import IdleCheck
from jpd.worker.inbox import Call, Inbox
from jpd.worker.parts import WorkerParts
from jpd.worker.prefill_attempts import PrefillAnswer
from jpd.worker.protocol import Attempt, Reservation, Role, UnknownAttemptError, WorkerStatus

logger = logging.getLogger(__name__)

STALL_SECONDS = 60.0
"""While a turn takes longer than this the worker is unhealthy."""

DrainAnswer = Callable[[None | Exception], None]


class Worker:
    """The first methods may be called from any thread, those after `_run` only through `submit`."""

    def __init__(
        self,
        name: str,
        role: Role,
        parts: WorkerParts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._clock = clock
        self.ready: Future[None] = Future()
        self._parts = parts
        self._role = role
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self._run, name=f"worker-{name}", daemon=True)
        self._turn_listeners: list[Callable[[], None]] = []
        self._possible_roles = parts.possible_roles()
        self._destinations = set(parts.destinations)
        self._room_listeners: list[Callable[[], None]] = []
        self._must_stop = threading.Event()
        self._is_draining = False
        self._drain_answers: list[DrainAnswer] = []
        self._failure = ""
        self._num_unknown_attempts = 0
        self._num_late_pieces = 0
        self._num_releases_told = 0
        self._idle_check = IdleCheck(self.check_integrity, lambda: parts.pool.num_releases)
        self._turn_start_time: float | None = None
        self._last_step_time = clock()
        self._status = self._look()

    @property
    def role(self) -> Role:
        return self._role

    def start(self) -> None:
        """Start the thread: warm up, resolve `ready`, then serve."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end after its current turn or compilation; what it holds fails."""
        self._must_stop.set()
        self.submit(Call(lambda: None, lambda error: None))  # to wake it

    def close(self, timeout_seconds: float = 120.0) -> None:
        """Stop, and block until the thread has ended."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    def submit(self, call: Call) -> bool:
        """Let the worker's thread do this. False: it has ended, and nothing will come of it."""
        return self._inbox.post(call)

    def deliver(self, piece: ArrivedPiece) -> None:
        """Take a piece from a transfer thread."""
        self.submit(Call(lambda: self._receive(piece), lambda error: None))

    def serve(self, request: PageRequest) -> None:
        """Offer pages to another worker; asked on a transfer's or another worker's thread."""
        self.submit(Call(lambda: self._send_back(request), lambda error: None))

    def lost_error(self) -> WorkerLostError:
        """What is said of a worker that has ended."""
        return WorkerLostError(self.name, self._failure or "closed")

    def on_turn_end(self, listener: Callable[[], None]) -> None:
        """Call this on the worker's thread after each turn. To be set before `start`."""
        self._turn_listeners.append(listener)

    def on_room(self, listener: Callable[[], None]) -> None:
        """Call this on the worker's thread after a turn that freed room."""
        self._room_listeners.append(listener)

    def status(self) -> WorkerStatus:
        """The state after the last turn; a thread that is stuck shows as unhealthy."""
        status, turn_start = self._status, self._turn_start_time
        in_flight = self._parts.transfer.num_in_flight(self.name)
        status = dataclasses.replace(status, num_transfers_in_flight=in_flight)
        stalled_seconds = 0.0 if turn_start is None else self._clock() - turn_start
        if status.healthy and stalled_seconds > STALL_SECONDS:
            reason = f"one turn of its loop takes {stalled_seconds:.0f} s already"
            status = dataclasses.replace(status, healthy=False, reason=reason)
        return status

    def check_integrity(self) -> None:
        """Pool and tables agree. Called through `submit` or after the thread has ended."""
        held = [pages for role in self._parts.roles for pages in role.held_pages()]
        self._parts.pool.check_integrity(held)

    # The worker's thread.

    def _run(self) -> None:
        try:
            self._parts.warm_up(self._check_stop)
            self._publish()
            self.ready.set_result(None)
            while not self._must_stop.is_set():
                self._turn(self._inbox.take(self._idle_seconds()))
        except Exception as error:
            self._fail(error)
        self._end()

    @property
    def has_work(self) -> bool:
        """Whether a turn has something to do but for deadlines."""
        return bool(self._inbox) or any(role.has_work for role in self._parts.roles)

    def turn(self) -> None:
        """One round of the loop without waiting, for who drives a worker without its thread."""
        try:
            self._turn(self._inbox.take(0.0))
        except Exception as error:
            self._fail(error)
            self._end()

    def _fail(self, error: Exception) -> None:
        if not self._must_stop.is_set():
            logger.exception("worker %s: its engine raised", self.name)
        self._failure = f"{type(error).__name__}: {error}"
        if not self.ready.done():
            self.ready.set_exception(error)

    def _turn(self, calls: list[Call]) -> None:
        """One round of the loop."""
        self._turn_start_time = self._clock()
        self._expire(self._turn_start_time)
        self._handle(calls)
        if self._parts.decode is not None:
            prefill = self._parts.prefill
            self._parts.decode.step(nobody_waits=prefill is None or not prefill.has_work)
            self._abandon_prefills(self._parts.decode.take_lost())
        if self._parts.prefill is not None:
            self._parts.prefill.step()
        if not self._parts.is_holding:
            self._idle_check.run(self._turn_start_time)
        self._publish()
        self._turn_start_time = None

    def _idle_seconds(self) -> float | None:
        """How long the inbox may be waited on: until the next deadline. None: for ever."""
        if self.has_work:
            return 0.0
        deadlines = (role.next_deadline for role in self._parts.roles)
        deadline = min(self._parts.pool.next_expiry, *deadlines)
        if not self._parts.is_holding:
            deadline = min(deadline, self._idle_check.next_time)
        return None if deadline == float("inf") else max(deadline - self._clock(), 0.001)

    def _handle(self, calls: list[Call]) -> None:
        """Do what was asked. Errors of jpd's tree are the asker's; all others are the worker's.

        They go without their traceback: its frames hold arrays, and a traceback in a cycle of the
        asker's would keep those until the garbage collector comes.
        """
        for index, call in enumerate(calls):
            try:
                call.action()
            except JpdError as error:
                call.fail(error.with_traceback(None))
            except Exception as error:
                for undone in calls[index:]:
                    undone.fail(WorkerLostError(self.name, f"{type(error).__name__}: {error}"))
                raise

    def _expire(self, now: float) -> None:
        for role in self._parts.roles:
            role.expire(now)
        if self._parts.pool.next_expiry <= now:
            self._parts.pool.expire()

    def _abandon_prefills(self, lost: Mapping[str, WorkerError]) -> None:
        """A local prefill must not outlive its reservation: the pages are somebody else's then."""
        if self._parts.prefill is not None:
            for attempt_id, error in lost.items():
                self._parts.prefill.fail(attempt_id, error)

    def _publish(self) -> None:
        """Tell what this turn did: answers of a finished drain, freed room, the status."""
        if self._drain_answers and not self._parts.is_holding:
            answers, self._drain_answers = self._drain_answers, []
            for answer in answers:
                answer(None)
        if self._parts.pool.num_releases != self._num_releases_told:
            self._num_releases_told = self._parts.pool.num_releases
            for listener in self._room_listeners:
                listener()
        self._last_step_time = self._clock()
        self._status = self._look()
        for listener in self._turn_listeners:
            listener()

    def _end(self) -> None:
        """The last act of the thread: everybody who waits for something hears that it is over."""
        error = self.lost_error()
        for call in self._inbox.close():
            call.fail(error)
        for role in self._parts.roles:
            role.fail_all(error)
        for answer in self._drain_answers:
            answer(error)
        self._failure = self._failure or "closed"
        self._status = self._look()
        self._turn_start_time = None
        for listener in self._turn_listeners:
            listener()

    def _check_stop(self) -> None:
        if self._must_stop.is_set():
            raise WorkerLostError(self.name, "closed while it compiled")

    # What clients ask for.

    def reserve(self, attempt: Attempt) -> Reservation | None:
        """Hold room for the whole sequence; None when there is none now, or when draining."""
        if self._parts.decode is None or self._role == "prefill":
            raise WorkerError(self.name, f"role {self._role} reserves nothing")
        if self._is_draining:
            return None
        return self._parts.decode.reserve(attempt)

    def prefill(
        self,
        attempt: Attempt,
        reservation: Reservation,
        answer: PrefillAnswer,
        mask: Mask | None = None,
    ) -> None:
        """Prefill for a reservation, here or elsewhere; the answer comes when it is done.

        `mask`: what the first token is chosen from, when it is guided.
        """
        is_local = reservation.worker == self.name
        prefill = self._parts.prefill
        can_send = self._role != "decode" and reservation.worker in self._destinations
        if prefill is None or not (is_local or can_send):
            whom = "itself" if is_local else reservation.worker
            raise WorkerError(self.name, f"role {self._role} cannot prefill for {whom}")
        if not is_local:
            if self._is_draining:
                raise WorkerLostError(self.name, "draining, takes no new attempts")
            prefill.start(attempt, reservation, answer, mask)
            return
        pages = self._parts.decode.pages_of(attempt.attempt_id) if self._parts.decode else None
        if pages is None:
            raise self._unknown(attempt.attempt_id)
        prefill.start_local(attempt, reservation, pages, answer, mask)

    def decode(self, attempt_id: str, first_token_id: int, sink: DecodeSink) -> None:
        """Decode a reserved attempt; events and at last an error or a finish go to the sink."""
        if self._parts.decode is None or not self._parts.decode.can_start(attempt_id):
            raise self._unknown(attempt_id)
        self._parts.decode.start(attempt_id, first_token_id, sink)

    def cancel(self, attempt_id: str) -> None:
        """Forget the attempt and free all it holds here. Idempotent."""
        self._parts.transfer.cancel(attempt_id)
        if self._parts.prefill is not None:
            self._parts.prefill.remove(attempt_id)
        if self._parts.decode is not None:
            self._parts.decode.remove(attempt_id)

    def prefix_changes(self, incarnation: str, sequence: int) -> PrefixChanges:
        """Cached pages that came and went since that change, or all there are."""
        return self._parts.pool.prefix_changes(incarnation, sequence)

    def drain(self, answer: DrainAnswer) -> None:
        """Take no new attempts; the answer comes when the running ones have ended."""
        self._is_draining = True
        self._drain_answers.append(answer)

    def set_role(self, role: Role) -> None:
        """Change the role of an idle worker and end its draining."""
        if self._parts.is_holding:
            raise WorkerError(
                self.name, f"set_role({role!r}): it still holds attempts, drain first"
            )
        if role not in self._possible_roles:
            able = ", ".join(self._possible_roles)
            reason = f"its executables are those of {able}; `roles` of its [[worker]] names others"
            raise WorkerError(self.name, f"set_role({role!r}): {reason}")
        self._role = role
        self._is_draining = False
        self._num_releases_told = -1  # there is room again

    def learn_destination(self, name: str, like: str) -> None:
        """A new worker to which this one may send; its KV travels as that of the other."""
        if self._parts.decode is not None:
            self._parts.decode.learn_destination(name, like)
        if self._parts.prefill is not None and like in self._destinations:
            self._destinations.add(name)
            self._parts.prefill.learn_destination(name, like)

    def _receive(self, piece: ArrivedPiece) -> None:
        if not any(role.receive(piece) for role in self._parts.roles):
            self._num_late_pieces += 1

    def _send_back(self, request: PageRequest) -> None:
        if self._parts.decode is None or not self._parts.decode.send_back(request):
            self._num_unknown_attempts += 1

    def _unknown(self, attempt_id: str) -> UnknownAttemptError:
        self._num_unknown_attempts += 1
        return UnknownAttemptError(self.name, f"attempt {attempt_id} is not held here")

    def _look(self) -> WorkerStatus:
        pool, prefill, decode = self._parts.pool, self._parts.prefill, self._parts.decode
        return WorkerStatus(
            name=self.name,
            role=self._role,
            healthy=not self._failure,
            reason=self._failure,
            draining=self._is_draining,
            num_slots=decode.num_slots if decode else 0,
            num_slots_used=decode.num_slots_used if decode else 0,
            num_pages=pool.num_pages,
            num_pages_used=pool.num_held,
            num_pages_cached=pool.num_cached,
            num_prefills_waiting=prefill.num_held if prefill else 0,
            num_prefill_tokens_waiting=prefill.num_tokens_waiting if prefill else 0,
            num_transfers_in_flight=0,  # filled by `status`
            num_compilations_after_ready=self._parts.num_compilations(),
            last_step_time=self._last_step_time,
            can_prefill=prefill is not None,
            num_late_pieces=self._num_late_pieces,
            num_draft_tokens=decode.num_draft_tokens if decode else 0,
            num_accepted_tokens=decode.num_accepted_tokens if decode else 0,
            incarnation=pool.incarnation,
            num_prefix_changes=pool.num_prefix_changes,
            roles=self._possible_roles,
            num_unknown_attempts=self._num_unknown_attempts,
        )
