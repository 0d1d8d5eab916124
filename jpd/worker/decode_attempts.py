"""Attempts that a worker decodes: from the reservation of their room to their last token.

1. `reserve`: a slot and pages for the first tokens, before anything is computed. 2. `receive`: KV
pieces, written into those pages if the attempt is still held and still lacks them. 3. `start`: the
first token is known. With the last page *and* this the attempt joins the decode batch. 4. `step`:
pages as they are needed, tokens, until the end; then the pages stay known as a prefix.
Twin of prefill_attempts.py. Knows no router and no transport. Owned by the worker's thread.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from jpd.engine.decode import DecodeEngine
from jpd.engine.decode_row import DecodeDone, DecodeRow
from jpd.engine.page_outlet import PageOutlet
from jpd.errors import (
    DeadlineError,
    JpdError,
    PreemptedError,
    TransferError,
    WorkerError,
)
from jpd.guidance.compiler import GrammarCompiler
from jpd.transfer.missing import MissingKV
from jpd.transfer.protocol import ArrivedPiece, PageRequest
from jpd.worker.guided import open_guide
from jpd.worker.page_pool import HeldPages, PagePool
from jpd.worker.pages_back import offer_back
from jpd.worker.protocol import Attempt, DecodeEvent, Reservation
from jpd.worker.room import RoomRules, by_seniority, junior

logger = logging.getLogger(__name__)

DecodeSink = Callable[[DecodeEvent | Exception], None]


@dataclass(slots=True)
class DecodeAttempt:
    """All that one attempt holds here."""

    attempt: Attempt
    pages: HeldPages
    missing: MissingKV  # of the prompt: has not arrived
    kv_bytes: int = 0
    kv_complete_time: float | None = None
    transfer_deadline: float = float("inf")  # set when the first token is known
    sink: DecodeSink | None = None
    token_ids: list[int] = field(default_factory=list)  # generated, the first one included
    failure: Exception | None = None  # told to `start`; pages and slot are given back already

    @property
    def is_decoding(self) -> bool:
        return self.sink is not None and self.kv_complete_time is not None

    @property
    def deadline(self) -> float:
        if self.kv_complete_time is not None:
            return self.attempt.deadline
        return min(self.attempt.deadline, self.transfer_deadline)


class DecodeAttempts:
    """The decode role of a worker."""

    def __init__(
        self,
        worker: str,
        engine: DecodeEngine,
        pool: PagePool,
        *,
        num_slots: int,
        max_model_len: int,
        reserve_tokens: int,
        transfer_timeout_seconds: float,
        outlet: PageOutlet | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._worker, self._engine, self._pool, self._outlet = worker, engine, pool, outlet
        self.num_slots = num_slots
        self._rules = RoomRules(
            worker, pool.page_size, pool.num_pages, max_model_len, reserve_tokens
        )
        self._transfer_timeout_seconds = transfer_timeout_seconds
        self._clock = clock
        self._grammars = grammars
        self._held: dict[str, DecodeAttempt] = {}
        self._lost: dict[str, WorkerError] = {}  # attempts whose room was taken back
        self.num_draft_tokens = 0  # of speculative decoding, verified; since the start
        self.num_accepted_tokens = 0  # of these, right

    @property
    def num_slots_used(self) -> int:
        return sum(1 for held in self._live())

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def next_deadline(self) -> float:
        return min((held.deadline for held in self._held.values()), default=float("inf"))

    def _live(self) -> Iterator[DecodeAttempt]:
        return (held for held in self._held.values() if held.failure is None)

    def held_pages(self) -> Iterator[tuple[int, ...]]:
        """The pages of each attempt that holds some."""
        return (held.pages.page_ids for held in self._live())

    def get(self, attempt_id: str) -> DecodeAttempt | None:
        """The attempt while it holds room here."""
        held = self._held.get(attempt_id)
        return held if held is not None and held.failure is None else None

    def pages_of(self, attempt_id: str) -> HeldPages | None:
        """Where its prompt is to be prefilled here. None: it is not held.

        Raises what befell the attempt while nobody listened.
        """
        held = self._held.get(attempt_id)
        if held is not None and held.failure is not None:
            raise held.failure
        return None if held is None else held.pages

    def reserve(self, attempt: Attempt) -> Reservation | None:
        """Hold a slot and the first pages. None: no room now, not even by preempting others."""
        if attempt.attempt_id in self._held:
            raise WorkerError(self._worker, f"attempt {attempt.attempt_id} is reserved already")
        self._rules.check(attempt)
        while (pages := self._take_room(attempt)) is None:
            victim = self._junior(below=attempt.priority)
            if victim is None or not self._could_have_room(attempt):
                return None
            self._preempt(victim, f"attempt {attempt.attempt_id} of a higher priority")
        first = pages.num_cached_tokens // self._pool.page_size
        lacking = range(first, self._pool.num_pages_for(len(attempt.token_ids)))
        missing = MissingKV(lacking, self._engine.num_layers)
        self._held[attempt.attempt_id] = DecodeAttempt(attempt, pages, missing)
        return Reservation(attempt.attempt_id, self._worker, pages.num_cached_tokens)

    def _take_room(self, attempt: Attempt) -> HeldPages | None:
        if self.num_slots_used >= self.num_slots:
            return None
        num_growing = sum(
            len(held.pages.page_ids) < self._rules.whole_pages(held.attempt)
            for held in self._live()
        )
        return self._pool.take(
            attempt.token_ids,
            self._rules.first_tokens(attempt),
            attempt.cache_salt,
            use_prefix=attempt.may_use_prefix,
            num_spare=num_growing,
        )

    def _could_have_room(self, attempt: Attempt) -> bool:
        """Whether the pages suffice when all of a lower priority are preempted."""
        lower = (h for h in self._live() if h.attempt.priority < attempt.priority)
        num_pages = self._pool.num_available + sum(len(held.pages.page_ids) for held in lower)
        return num_pages >= self._pool.num_pages_for(self._rules.first_tokens(attempt))

    def _junior(self, *, below: int | None = None) -> DecodeAttempt | None:
        found = junior((held.attempt for held in self._live()), below=below)
        return None if found is None else self._held[found.attempt_id]

    def _preempt(self, held: DecodeAttempt, whom: str) -> None:
        """Take back an attempt's room; its full pages stay known as a prefix for the replay."""
        attempt_id = held.attempt.attempt_id
        if held.is_decoding:
            self._engine.remove(attempt_id)
            self._keep_written(held)
        error = PreemptedError(self._worker, f"the room of {attempt_id} was needed for {whom}")
        self._fail(held, error)
        self._lost[attempt_id] = error

    def take_lost(self) -> dict[str, WorkerError]:
        """Attempts that lost their room since the last call: nothing may be written there now."""
        lost, self._lost = self._lost, {}
        return lost

    def send_back(self, request: PageRequest) -> bool:
        """Offer pages of the prefix that a reservation holds. False: they are not held here."""
        if self._outlet is None:
            return False
        held = self.get(request.attempt_id)
        return offer_back(self._outlet, None if held is None else held.pages, request)

    def learn_destination(self, name: str, like: str) -> None:
        """KV goes back to this new worker as to the other one."""
        if self._outlet is not None and like in self._outlet:
            self._outlet.learn_destination(name, like)

    def can_start(self, attempt_id: str) -> bool:
        """Whether the attempt is reserved and not started yet."""
        held = self._held.get(attempt_id)
        return held is not None and held.sink is None

    def start(self, attempt_id: str, first_token_id: int, sink: DecodeSink) -> None:
        """Decode from this token on, once the KV is complete; events and errors go to `sink`.

        Only when `can_start`. Raises what befell the attempt while nobody listened.
        """
        held = self._held[attempt_id]
        if held.failure is not None:
            del self._held[attempt_id]
            raise held.failure
        if held.attempt.sampling.max_tokens == 1:
            raise WorkerError(self._worker, f"attempt {attempt_id} has had its only token")
        held.sink = sink
        held.token_ids.append(first_token_id)
        held.transfer_deadline = self._clock() + self._transfer_timeout_seconds
        self._join_if_ready(held)

    def receive(self, piece: ArrivedPiece) -> bool:
        """Write a piece into the attempt's pages. False: nobody waits for it, it is dropped."""
        held = self.get(piece.attempt_id)
        # A page is written once: later its last positions may hold KV of generated tokens.
        if held is None or not held.missing.covers(piece):
            return False
        if piece.error is not None:
            self._fail(held, piece.error)
            return True
        places = held.pages.page_ids[piece.pages.start : piece.pages.stop]
        self._engine.write_pages(piece.arrays, places, piece.layers)
        held.missing.take(piece)
        held.kv_bytes += piece.num_bytes
        if held.missing.is_nothing:
            self._complete(held)
        return True

    def complete(self, attempt_id: str) -> None:
        """The prompt was prefilled here, into the reserved pages: nothing travels."""
        held = self.get(attempt_id)
        if held is not None:
            held.missing.clear()
            self._complete(held)

    def _complete(self, held: DecodeAttempt) -> None:
        held.kv_complete_time = self._clock()
        self._pool.keep(held.attempt.token_ids, held.pages.page_ids, held.attempt.cache_salt)
        self._join_if_ready(held)

    def _join_if_ready(self, held: DecodeAttempt) -> None:
        """Put the attempt in the decode batch when its KV and its first token are both here."""
        if held.sink is None or held.kv_complete_time is None:
            return
        attempt = held.attempt
        event = DecodeEvent(attempt.attempt_id, (), None, held.kv_complete_time, held.kv_bytes)
        held.sink(event)
        try:
            self._engine.insert(self._row(held))
        except Exception as error:  # nothing was dispatched: the fault is this attempt's alone
            logger.exception("worker %s: attempt %s", self._worker, attempt.attempt_id)
            self._fail(held, WorkerError(self._worker, f"{attempt.attempt_id}: {error!r}"))

    def _row(self, held: DecodeAttempt) -> DecodeRow:
        return DecodeRow(
            attempt_id=held.attempt.attempt_id,
            page_ids=held.pages.page_ids,
            first_token_id=held.token_ids[0],
            token_ids=held.attempt.token_ids,
            sampling=held.attempt.sampling,
            stop_token_ids=held.attempt.stop_token_ids,
            guide=open_guide(self._grammars, held.attempt, held.token_ids),
            num_output_tokens=held.attempt.num_output_tokens,
        )

    def step(self, *, nobody_waits: bool) -> None:
        """One decode call of all rows; tells the tokens of the one before.

        `nobody_waits`: for this worker's thread, besides those who wait to join the batch.
        """
        if not self._engine.has_work:
            return
        self._grow()
        nobody_waits = nobody_waits and all(held.is_decoding for held in self._live())
        for done in self._engine.step(nobody_waits=nobody_waits):
            self._commit(done)

    def _grow(self) -> None:
        """Give rows the pages of the next call: for one step at any price, for several if free."""
        for num_steps, may_preempt in ((1, True), (self._engine.max_steps, False)):
            short = (self._held[attempt_id] for attempt_id in self._engine.short_rows(num_steps))
            for held in sorted(short, key=lambda held: by_seniority(held.attempt)):
                attempt_id = held.attempt.attempt_id
                while held.failure is None and self._engine.is_short(attempt_id, num_steps):
                    if not self._add_page(held, may_preempt):
                        return

    def _add_page(self, held: DecodeAttempt, may_preempt: bool) -> bool:
        """One page more, or the attempt itself is preempted. False: there is none."""
        page = self._pool.take_page()
        while page is None and may_preempt and held.failure is None:
            victim = self._junior()
            assert victim is not None, "who asks is there"
            self._preempt(victim, f"page {len(held.pages.page_ids)} of {held.attempt.attempt_id}")
            page = self._pool.take_page() if victim is not held else None
        if page is not None:
            held.pages = replace(held.pages, page_ids=(*held.pages.page_ids, page))
            self._engine.grow(held.attempt.attempt_id, page)
        return page is not None or held.failure is not None

    def _commit(self, done: DecodeDone) -> None:
        held = self.get(done.attempt_id)
        if held is None or held.sink is None:
            return
        if done.error is not None:
            self._fail(held, done.error)
            return
        held.token_ids.extend(done.token_ids)
        if done.num_drafts:
            self.num_draft_tokens += done.num_drafts
            self.num_accepted_tokens += len(done.token_ids) - 1
        event = DecodeEvent(
            done.attempt_id,
            done.token_ids,
            done.finish_reason,
            logprobs=done.logprobs,
            num_draft_tokens=done.num_drafts,
        )
        held.sink(event)
        if done.finish_reason is not None:
            self._keep_written(held)
            self._pool.release(held.pages.page_ids)
            del self._held[done.attempt_id]

    def remove(self, attempt_id: str) -> None:
        """Forget the attempt and give back its room. Idempotent."""
        held = self._held.pop(attempt_id, None)
        if held is None or held.failure is not None:
            return
        if held.is_decoding:
            self._engine.remove(attempt_id)
            self._keep_written(held)
        self._pool.release(held.pages.page_ids)

    def _keep_written(self, held: DecodeAttempt) -> None:
        """What was written so far is a prefix for the next turn; the last token has no KV yet."""
        sequence = (*held.attempt.token_ids, *held.token_ids[:-1])
        self._pool.keep(sequence, held.pages.page_ids, held.attempt.cache_salt)

    def expire(self, now: float) -> None:
        """Fail what is past its own or its transfer's deadline."""
        late = [held for held in self._held.values() if held.deadline <= now]
        for held in late:
            attempt_id = held.attempt.attempt_id
            if held.attempt.deadline <= now:
                self._fail(held, DeadlineError(f"attempt {attempt_id}: deadline passed"))
                self._held.pop(attempt_id, None)
            else:
                reason = (
                    f"{held.missing.num_pages} KV pages of {attempt_id} did not arrive within "
                    f"{self._transfer_timeout_seconds:g} s"
                )
                self._fail(held, TransferError(self._worker, reason))
            reason = f"attempt {attempt_id} lost its reservation"
            self._lost[attempt_id] = WorkerError(self._worker, reason)

    def fail_all(self, error: JpdError) -> None:
        """End every attempt with this error. The engine and the pool are lost with the worker."""
        for held in self._live():
            if held.sink is not None:
                held.sink(error)
        self._held.clear()

    def _fail(self, held: DecodeAttempt, error: Exception) -> None:
        """Give back the attempt's room and tell its client, now or when it asks to decode."""
        if held.failure is not None:
            return
        if held.is_decoding:
            self._engine.remove(held.attempt.attempt_id)
        self._pool.release(held.pages.page_ids)
        held.failure = error
        if held.sink is not None:
            held.sink(error)
            del self._held[held.attempt.attempt_id]
