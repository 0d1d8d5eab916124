"""Attempts that a worker prefills: from its queue to the first token.

1. `start`: pages for the prompt, its cached prefix found; without room the attempt waits here.
2. What the reserving worker holds of the rest is asked for, if it shall be, and awaited.
3. `step`: one chunk; its KV pieces are offered to the reserving worker as they are computed.
4. The first token is the answer; the prompt's pages stay known as a prefix.
Twin of decode_attempts.py. Knows no router and no transport. Owned by the worker's thread.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jpd.engine.prefill import PrefillDone, PrefillEngine, PrefillTask
from jpd.errors import DeadlineError, JpdError, RequestError, TransferError, WorkerError
from jpd.guidance.guide import Mask
from jpd.transfer.protocol import ArrivedPiece, KVPiece, KVTransfer, PageRequest
from jpd.worker.page_pool import HeldPages, PagePool
from jpd.worker.pages_back import AwaitedPages
from jpd.worker.protocol import Attempt, PrefillResult, Reservation, SentBack

logger = logging.getLogger(__name__)

PrefillAnswer = Callable[[PrefillResult | Exception], None]


class PieceSender:
    """Where a prefill engine emits its pieces; what cannot be offered is kept for the worker."""

    def __init__(self, transfer: KVTransfer) -> None:
        self._transfer = transfer
        self._failures: dict[str, TransferError] = {}

    def send(self, piece: KVPiece) -> None:
        """Offer a piece. A transfer that cannot be started fails the attempt, not the worker."""
        try:
            self._transfer.offer(piece)
        except Exception as error:
            reason = f"{piece.where} cannot be sent: {error!r}"
            self._failures[piece.attempt_id] = TransferError(piece.destination, reason)

    def ask(self, request: PageRequest) -> None:
        """Ask another worker for pages that it holds. Raises OSError."""
        self._transfer.ask(request)

    def take_failures(self) -> dict[str, TransferError]:
        failures, self._failures = self._failures, {}
        return failures


@dataclass(slots=True)
class PrefillAttempt:
    """All that one attempt holds here. The pages of a local prefill belong to its reservation."""

    attempt: Attempt
    reservation: Reservation
    answer: PrefillAnswer
    pages: HeldPages | None  # None: waits for room
    is_local: bool
    mask: Mask | None = None  # of the first token's choice, when it is guided
    awaited: AwaitedPages | None = None  # not computed before these are here
    sent_back: SentBack | None = None

    @property
    def is_waiting(self) -> bool:
        """For pages of its own, or for what is in them."""
        return self.pages is None or self.awaited is not None

    @property
    def next_deadline(self) -> float:
        ends = self.attempt.deadline
        return ends if self.awaited is None else min(ends, self.awaited.deadline)


class PrefillAttempts:
    """The prefill role of a worker."""

    def __init__(
        self,
        worker: str,
        engine: PrefillEngine,
        pool: PagePool,
        sender: PieceSender,
        *,
        max_model_len: int,
        transfer_timeout_seconds: float,
        on_local_done: Callable[[str], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker, self._engine, self._pool, self._sender = worker, engine, pool, sender
        self._max_model_len = max_model_len
        self._transfer_timeout_seconds, self._clock = transfer_timeout_seconds, clock
        self._on_local_done = on_local_done
        self._held: dict[str, PrefillAttempt] = {}  # in order of arrival
        self._num_releases_seen = -1  # when a waiting attempt last found no room

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        return sum(1 for held in self._held.values() if held.pages is None)

    @property
    def num_tokens_waiting(self) -> int:
        """Prompt tokens not dispatched yet, of those that wait and of those that are computed."""
        waiting = (held.attempt for held in self._held.values() if held.is_waiting)
        num_waiting = sum(len(attempt.token_ids) for attempt in waiting)
        return num_waiting + self._engine.num_tokens_waiting

    def held_pages(self) -> Iterator[tuple[int, ...]]:
        """The pages of each attempt that holds some here; those of a reservation are not ours."""
        for held in self._held.values():
            if held.pages is not None and not held.is_local:
                yield held.pages.page_ids

    def pages_of(self, attempt_id: str) -> HeldPages | None:
        """Where its prompt is prefilled. None: it is not held, or waits for room."""
        held = self._held.get(attempt_id)
        return None if held is None else held.pages

    @property
    def next_deadline(self) -> float:
        return min((held.next_deadline for held in self._held.values()), default=float("inf"))

    def start(
        self,
        attempt: Attempt,
        reservation: Reservation,
        answer: PrefillAnswer,
        mask: Mask | None = None,
    ) -> None:
        """Prefill for another worker's reservation."""
        self._refuse_duplicate(attempt)
        num_pages = self._pool.num_pages_for(len(attempt.token_ids))
        if num_pages > self._pool.num_pages or len(attempt.token_ids) >= self._max_model_len:
            rule = (
                f"a prompt of {len(attempt.token_ids)} tokens needs {num_pages} KV pages, worker "
                f"{self._worker} has {self._pool.num_pages} and takes fewer than "
                f"{self._max_model_len} tokens"
            )
            raise RequestError("prompt", len(attempt.token_ids), rule)
        held = PrefillAttempt(attempt, reservation, answer, None, is_local=False, mask=mask)
        self._held[attempt.attempt_id] = held
        self._num_releases_seen = -1
        self._admit()

    def start_local(
        self,
        attempt: Attempt,
        reservation: Reservation,
        pages: HeldPages,
        answer: PrefillAnswer,
        mask: Mask | None = None,
    ) -> None:
        """Prefill into the pages that this worker itself reserved."""
        self._refuse_duplicate(attempt)
        held = PrefillAttempt(attempt, reservation, answer, pages, is_local=True, mask=mask)
        self._held[attempt.attempt_id] = held
        self._add_task(held, pages)

    def learn_destination(self, name: str, like: str) -> None:
        """KV for this new destination travels as that for the other one."""
        self._engine.learn_destination(name, like)

    def _refuse_duplicate(self, attempt: Attempt) -> None:
        if attempt.attempt_id in self._held:
            raise WorkerError(self._worker, f"attempt {attempt.attempt_id} is prefilled already")

    def _admit(self) -> None:
        """Give pages to waiting attempts while they last: by priority, then by time of waiting."""
        if self._num_releases_seen == self._pool.num_releases:
            return  # nothing was given back since somebody found no room
        waiting = [held for held in self._held.values() if held.pages is None]
        for held in sorted(waiting, key=lambda held: -held.attempt.priority):
            attempt = held.attempt
            held.pages = self._pool.take(
                attempt.token_ids,
                len(attempt.token_ids),
                attempt.cache_salt,
                use_prefix=attempt.may_use_prefix,
            )
            if held.pages is None:
                self._num_releases_seen = self._pool.num_releases
                return  # the others do not overtake it: it would starve
            self._begin(held, held.pages)

    def _begin(self, held: PrefillAttempt, pages: HeldPages) -> None:
        """Ask for what only the reserving worker holds, if it shall be; else compute."""
        attempt_id, reservation = held.attempt.attempt_id, held.reservation
        size = self._pool.page_size
        first, end = pages.num_cached_tokens // size, reservation.num_cached_tokens // size
        if not reservation.is_sent_back or end <= first:
            self._add_task(held, pages)
            return
        request = PageRequest(attempt_id, reservation.worker, self._worker, first, end - first)
        now = self._clock()
        deadline = now + self._transfer_timeout_seconds
        held.awaited = AwaitedPages(request, self._engine.num_layers, now, deadline)
        try:
            self._sender.ask(request)
        except OSError as error:
            self._end_waiting(held, held.awaited, str(error))

    def receive(self, piece: ArrivedPiece) -> bool:
        """Write pages that were asked for. False: nobody waits for them, and nothing is written."""
        held = self._held.get(piece.attempt_id)
        if held is None or held.pages is None or held.awaited is None:
            return False
        awaited = held.awaited
        if piece.error is not None or not piece.num_pages:
            reason = "they are not there" if piece.error is None else str(piece.error)
            self._end_waiting(held, awaited, reason)
        elif awaited.take(piece):
            places = held.pages.page_ids[piece.pages.start : piece.pages.stop]
            self._engine.write_pages(piece.arrays, places, piece.layers)
            if awaited.is_whole:
                self._end_waiting(held, awaited, "")
        else:
            return False
        return True

    def _end_waiting(self, held: PrefillAttempt, awaited: AwaitedPages, failure: str) -> None:
        """Compute what is still to be computed: all that was asked for, if it did not come."""
        assert held.pages is not None
        size = self._pool.page_size
        held.awaited, held.sent_back = None, awaited.told(self._clock(), size)
        if failure:
            attempt_id, source = held.attempt.attempt_id, held.reservation.worker
            logger.warning("%s: no pages came back from %s: %s", attempt_id, source, failure)
        else:
            held.pages = replace(held.pages, num_cached_tokens=awaited.end * size)
        self._add_task(held, held.pages)

    def _add_task(self, held: PrefillAttempt, pages: HeldPages) -> None:
        attempt = held.attempt
        try:
            self._engine.add(self._task(held, pages))
        except Exception as error:  # nothing was dispatched: the fault is this attempt's alone
            logger.exception("worker %s: attempt %s", self._worker, attempt.attempt_id)
            reason = f"{attempt.attempt_id}: {error!r}"
            self.fail(attempt.attempt_id, WorkerError(self._worker, reason))

    def _task(self, held: PrefillAttempt, pages: HeldPages) -> PrefillTask:
        attempt = held.attempt
        return PrefillTask(
            attempt_id=attempt.attempt_id,
            token_ids=attempt.token_ids,
            page_ids=pages.page_ids[: self._pool.num_pages_for(len(attempt.token_ids))],
            num_cached_tokens=pages.num_cached_tokens,
            sampling=attempt.sampling,
            stop_token_ids=attempt.stop_token_ids,
            priority=attempt.priority,
            deadline=attempt.deadline,
            destination=None if held.is_local else held.reservation.worker,
            num_output_tokens=attempt.num_output_tokens,
            send_from_token=held.reservation.num_cached_tokens,
            mask=held.mask,
        )

    def step(self) -> None:
        """One chunk; answers the prefills that the step before finished."""
        self._admit()
        if not self._engine.has_work:
            return
        done = self._engine.step()
        for attempt_id, error in self._sender.take_failures().items():
            self.fail(attempt_id, error)
        for result in done:
            self._commit(result)

    def _commit(self, done: PrefillDone) -> None:
        held = self._held.pop(done.attempt_id, None)
        if held is None or held.pages is None:
            return
        if held.is_local and self._on_local_done is not None:
            self._on_local_done(done.attempt_id)
        else:
            self._pool.keep(held.attempt.token_ids, held.pages.page_ids, held.attempt.cache_salt)
            self._pool.release(held.pages.page_ids)
        held.answer(
            PrefillResult(
                attempt_id=done.attempt_id,
                token_id=done.token_id,
                finish_reason=done.finish_reason,
                num_cached_tokens=done.num_cached_tokens,
                num_computed_tokens=done.num_computed_tokens,
                queue_seconds=done.queue_seconds,
                prefill_seconds=done.prefill_seconds,
                logprobs=done.logprobs,
                prompt_logprobs=done.prompt_logprobs,
                sent_back=held.sent_back,
            )
        )

    def remove(self, attempt_id: str) -> None:
        """Forget the attempt and give back its pages; nothing is answered. Idempotent."""
        held = self._held.pop(attempt_id, None)
        self._num_releases_seen = -1  # whoever waited behind it may have room
        if held is None or held.pages is None:
            return
        self._engine.remove(attempt_id)
        if not held.is_local:
            self._pool.release(held.pages.page_ids)

    def expire(self, now: float) -> None:
        """Fail what is past its deadline; wait no longer for pages than for any transfer."""
        for attempt_id, held in list(self._held.items()):
            if held.attempt.deadline <= now:
                self.fail(attempt_id, DeadlineError(f"attempt {attempt_id}: deadline passed"))
            elif held.awaited is not None and held.awaited.deadline <= now:
                late = f"not within {self._transfer_timeout_seconds:g} s"
                self._end_waiting(held, held.awaited, late)

    def fail_all(self, error: JpdError) -> None:
        """End every attempt with this error. The engine and the pool are lost with the worker."""
        for held in self._held.values():
            held.answer(error)
        self._held.clear()

    def fail(self, attempt_id: str, error: Exception) -> None:
        """Forget the attempt and answer with this error. Nothing when it is not held."""
        held = self._held.get(attempt_id)
        if held is not None:
            self.remove(attempt_id)
            held.answer(error)
