"""Attempts that a worker decodes: from the reservation of their room to their last token.

1. `reserve`: pages for prompt + max_tokens and a slot, before anything is computed. 2. `receive`:
KV pieces, written into those pages if the attempt is still held and still lacks them. 3. `start`:
the first token is known. With the last page *and* this the attempt joins the decode batch. 4.
`step`: tokens, until the end; then the pages stay known as a prefix. Twin of prefill_attempts.py.
Knows no router and no transport. Owned by the worker's thread.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from jpd.engine.decode import DecodeDone, DecodeEngine, DecodeRow
from jpd.errors import DeadlineError, JpdError, RequestError, TransferError, WorkerError
from jpd.guidance.compiler import GrammarCompiler
from jpd.transfer.protocol import ArrivedPiece
from jpd.worker.guided import open_guide
from jpd.worker.page_pool import HeldPages, PagePool
from jpd.worker.protocol import Attempt, DecodeEvent, Reservation

logger = logging.getLogger(__name__)

DecodeSink = Callable[[DecodeEvent | Exception], None]


@dataclass(slots=True)
class DecodeAttempt:
    """All that one attempt holds here."""

    attempt: Attempt
    pages: HeldPages
    missing_pages: set[int]  # of the prompt, counted in the sequence: their KV has not arrived
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
        transfer_timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._worker, self._engine, self._pool = worker, engine, pool
        self.num_slots = num_slots
        self._max_model_len = max_model_len
        self._transfer_timeout_seconds = transfer_timeout_seconds
        self._clock = clock
        self._grammars = grammars
        self._held: dict[str, DecodeAttempt] = {}

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

    def reserve(self, attempt: Attempt) -> Reservation | None:
        """Hold a slot and pages for the whole sequence. None: no room now."""
        if attempt.attempt_id in self._held:
            raise WorkerError(self._worker, f"attempt {attempt.attempt_id} is reserved already")
        num_tokens = self._check_size(attempt)
        if self.num_slots_used >= self.num_slots:
            return None
        pages = self._pool.take(
            attempt.token_ids, num_tokens, attempt.cache_salt, use_prefix=attempt.may_use_prefix
        )
        if pages is None:
            return None
        first = pages.num_cached_tokens // self._pool.page_size
        missing = set(range(first, self._pool.num_pages_for(len(attempt.token_ids))))
        self._held[attempt.attempt_id] = DecodeAttempt(attempt, pages, missing)
        return Reservation(attempt.attempt_id, self._worker, pages.num_cached_tokens)

    def _check_size(self, attempt: Attempt) -> int:
        """Tokens of the whole sequence. Raises RequestError when it can never fit here."""
        max_tokens = attempt.sampling.max_tokens
        assert max_tokens is not None, "the router resolves max_tokens"
        num_prompt_tokens = len(attempt.token_ids)
        num_tokens = num_prompt_tokens + max_tokens
        if num_tokens > self._max_model_len:
            rule = f"{num_prompt_tokens} prompt tokens + this exceed {self._max_model_len} tokens"
            raise RequestError("max_tokens", max_tokens, rule)
        num_pages = self._pool.num_pages_for(num_tokens)
        if num_pages > self._pool.num_pages:
            rule = (
                f"with {num_prompt_tokens} prompt tokens needs {num_pages} KV pages of "
                f"{self._pool.page_size}, worker {self._worker} has {self._pool.num_pages}"
            )
            raise RequestError("max_tokens", max_tokens, rule)
        return num_tokens

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
        arriving = range(piece.page_start, piece.page_start + piece.num_pages)
        # A page is written once: later its last positions may hold KV of generated tokens.
        if held is None or not held.missing_pages.issuperset(arriving):
            return False
        if piece.error is not None:
            self._fail(held, piece.error)
            return True
        self._engine.write_pages(piece.arrays, [held.pages.page_ids[index] for index in arriving])
        held.missing_pages.difference_update(arriving)
        held.kv_bytes += piece.num_bytes
        if not held.missing_pages:
            self._complete(held)
        return True

    def complete(self, attempt_id: str) -> None:
        """The prompt was prefilled here, into the reserved pages: nothing travels."""
        held = self.get(attempt_id)
        if held is not None:
            held.missing_pages.clear()
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
        nobody_waits = nobody_waits and all(held.is_decoding for held in self._live())
        for done in self._engine.step(nobody_waits=nobody_waits):
            self._commit(done)

    def _commit(self, done: DecodeDone) -> None:
        held = self.get(done.attempt_id)
        if held is None or held.sink is None:
            return
        if done.error is not None:
            self._fail(held, done.error)
            return
        held.token_ids.extend(done.token_ids)
        event = DecodeEvent(
            done.attempt_id, done.token_ids, done.finish_reason, logprobs=done.logprobs
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

    def expire(self, now: float) -> list[str]:
        """Fail what is past its own or its transfer's deadline; returns who lost their room."""
        late = [held for held in self._held.values() if held.deadline <= now]
        for held in late:
            attempt_id = held.attempt.attempt_id
            if held.attempt.deadline <= now:
                self._fail(held, DeadlineError(f"attempt {attempt_id}: deadline passed"))
                self._held.pop(attempt_id, None)
            else:
                reason = (
                    f"{len(held.missing_pages)} KV pages of {attempt_id} did not arrive within "
                    f"{self._transfer_timeout_seconds:g} s"
                )
                self._fail(held, TransferError(self._worker, reason))
        return [held.attempt.attempt_id for held in late]

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
