"""The decode engine: slots become steady streams, one token each per step.

A step: schedule (who comes and goes) → build (the shape they need) → run (dispatch it) → commit
(read the one before it). Last tokens, positions and who is still running live on the device. Twin
of prefill.py. Knows no router and no page owner. Owned by its worker's thread.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jpd.cache.kv_cache import KVCache
from jpd.cache.page_allocator import BIN_PAGE
from jpd.engine.buckets import DecodeShape, decode_rows
from jpd.engine.compile_all import compile_all
from jpd.engine.decode_row import DecodeDone, DecodeRow, RunningRow
from jpd.engine.decode_state import DecodeState, one_row
from jpd.engine.forward import Leaves
from jpd.engine.functions import ModelFunctions
from jpd.engine.guided_rows import GuidedRows
from jpd.engine.results import FINISH_REASONS, Outcome, StepResults
from jpd.engine.token_masks import TokenMasks, make_masks
from jpd.request import FinishReason, SamplingParams
from jpd.transfer.wire import Wire

MAX_CALL_SECONDS = 0.010
"""Tokens of a call come together: several steps are taken only where that is not seen."""

SMOOTHING = 0.2
"""Weight of the newest call in the measured time of a step."""

GUIDE_WAIT_SECONDS = 0.002
"""How long a step waits for guides when no row can go on without one."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A dispatched step whose results were not read yet, and who was in which slot."""

    results: StepResults
    slots: tuple[tuple[int, int], ...]  # slot, generation
    shape: DecodeShape
    dispatch_time: float


class DecodeEngine:
    """Decodes rows over `cache` in a fixed number of slots."""

    def __init__(
        self,
        functions: ModelFunctions,
        cache: KVCache,
        leaves: Leaves,
        num_slots: int,
        wires: Iterable[Wire] = (),
    ) -> None:
        """`wires`: how KV may arrive here, over all sources."""
        if num_slots != functions.num_slots:
            raise ValueError(f"num_slots = {num_slots}, functions have {functions.num_slots}")
        self._functions, self._cache, self._leaves = functions, cache, leaves
        self._buckets = functions.buckets
        self._rows = decode_rows(num_slots)
        self._wires = tuple(wires)
        self._state = functions.new_state()
        self._free_slots = list(range(num_slots))
        self._by_slot: list[RunningRow | None] = [None] * num_slots
        self._by_attempt: dict[str, RunningRow] = {}
        self._arrived: dict[int, DecodeState] = {}  # slot → row, to insert before the next step
        self._departed: list[int] = []  # slots to stop before the next step
        self._grown: list[tuple[int, int, int]] = []  # slot, column, page; before the next step
        self._in_flight: deque[_InFlight] = deque()
        self._num_generations = 0
        self._last_finish_time = 0.0
        self._seconds_per_step = float("inf")  # until one was measured
        self._guided = GuidedRows()

    @property
    def has_work(self) -> bool:
        return bool(self._by_attempt or self._in_flight)

    @property
    def max_steps(self) -> int:
        """The most tokens of a row in one call, drafts included."""
        return max(self._buckets.max_decode_steps, 1 + self._buckets.max_drafts)

    @property
    def num_layers(self) -> int:
        """Whose KV a page holds."""
        return self._cache.spec.num_layers

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def warm_up(self, after_each: Callable[[], None] = lambda: None) -> None:
        """Compile every shape, before the first insert. Blocks. Writes to the bin page only.

        `after_each` is called between executables; what it raises ends the warm-up.
        """
        row = self._row_state(DecodeRow("warm-up", (), 0, (), SamplingParams(max_tokens=1)))
        self._state = self._functions.insert(self._state, row, 0)
        self._state = self._functions.deactivate(self._state, 0)
        self._state = self._functions.add_pages(self._state, [(0, 0, BIN_PAGE)])
        lowered = self._functions.lower_decode(self._leaves, self._cache.layers, self._state)
        with compile_all(lowered, after_each):
            for shape in self._buckets.decode_shapes(self._functions.num_slots):
                self._cache.layers, self._state, _ = self._functions.decode(
                    self._leaves, self._cache.layers, self._state, shape
                )
        self._functions.moves.warm_up_scatter(self._cache, self._wires)
        jax.block_until_ready(self._cache.layers)

    def write_pages(
        self, arrays: Sequence[jax.Array], page_ids: Sequence[int], layers: range
    ) -> None:
        """Put staging arrays that have arrived into these layers of these pages, in order."""
        self._functions.moves.scatter(self._cache, arrays, page_ids, layers)

    def insert(self, row: DecodeRow) -> None:
        """Take a free slot for a row; it joins the next step. Its pages stay the caller's."""
        if self.num_free_slots == 0:
            raise RuntimeError(f"no free slot for {row.attempt_id}: it was not reserved")
        if row.attempt_id in self._by_attempt:
            raise ValueError(f"attempt {row.attempt_id} is decoding already")
        state = self._row_state(row)
        assert row.sampling.max_tokens is not None
        last_position = row.num_tokens + row.sampling.max_tokens - 1
        if last_position <= row.num_tokens:
            raise ValueError(f"attempt {row.attempt_id} has had its only token")
        slot = heapq.heappop(self._free_slots)  # the lowest, for few rows to compute
        self._num_generations += 1
        running = RunningRow(
            row=row,
            slot=slot,
            generation=self._num_generations,
            position=row.num_tokens,
            last_position=last_position,
            num_pages=len(row.page_ids),
            capacity=len(row.page_ids) * self._buckets.page_size,
            max_drafts=self._max_drafts(row.sampling),
        )
        self._by_slot[slot] = self._by_attempt[row.attempt_id] = running
        self._arrived[slot] = state
        if row.guide is not None:
            self._guided.add(row.attempt_id, row.guide)

    def short_rows(self, num_steps: int) -> list[str]:
        """Attempts whose pages do not hold what so many steps write; see `grow`."""
        return [
            attempt_id
            for attempt_id, running in self._by_attempt.items()
            if not running.has_pages_for(num_steps)
        ]

    def is_short(self, attempt_id: str, num_steps: int) -> bool:
        return not self._by_attempt[attempt_id].has_pages_for(num_steps)

    def grow(self, attempt_id: str, page_id: int) -> None:
        """One page more, at the end of the row's table. No step may find a row without a page."""
        running = self._by_attempt[attempt_id]
        arrived = self._arrived.get(running.slot)
        if arrived is None:
            self._grown.append((running.slot, running.num_pages, page_id))
        else:
            page_table = np.asarray(arrived.page_table)  # on the host still
            page_table[0, running.num_pages] = page_id
        running.num_pages += 1
        running.capacity += self._buckets.page_size

    def _row_state(self, row: DecodeRow) -> DecodeState:
        return one_row(
            token_ids=(*row.token_ids, row.first_token_id),
            num_output_tokens=row.num_output_tokens,
            page_ids=row.page_ids,
            max_pages=self._buckets.max_pages,
            page_size=self._buckets.page_size,
            sampling=row.sampling,
            stop_token_ids=row.stop_token_ids,
            max_drafts=self._max_drafts(row.sampling),
        )

    def _max_drafts(self, sampling: SamplingParams) -> int:
        """Rows whose choice depends on the tokens just before it verify one at a time."""
        if sampling.has_penalties or sampling.grammar is not None:
            return 0
        return min(sampling.num_speculative_tokens, self._buckets.max_drafts)

    def remove(self, attempt_id: str) -> None:
        """Forget a row; its slot is free and no later step touches its pages. Idempotent."""
        running = self._by_attempt.get(attempt_id)
        if running is None:
            return
        self._release(running)
        if self._arrived.pop(running.slot, None) is None:
            self._departed.append(running.slot)

    def _release(self, running: RunningRow) -> None:
        self._guided.remove(running.row.attempt_id)
        del self._by_attempt[running.row.attempt_id]
        self._by_slot[running.slot] = None
        heapq.heappush(self._free_slots, running.slot)

    def step(self, *, nobody_waits: bool = False) -> list[DecodeDone]:
        """Dispatch one call and read the one before it; with nothing to dispatch, read them all.

        `nobody_waits`: the call may take several steps, after which whoever came can join.
        """
        nobody_waits &= not (self._arrived or self._departed or self._guided)
        done = self._judge()
        batch = self._schedule()
        if batch:
            num_steps = self._num_steps(batch) if nobody_waits else 1
            self._run(batch, self._build(batch, num_steps))
        done += self._commit(num_unread=1 if batch else 0)
        if not batch and not done:
            self._guided.wait(GUIDE_WAIT_SECONDS)
        return done

    def _judge(self) -> list[DecodeDone]:
        """Tell the tokens of guided rows whose guides have come to a verdict on them."""
        done = []
        for verdict in self._guided.settle():
            if verdict.is_complete or verdict.error is not None:
                self.remove(verdict.attempt_id)
            reason: FinishReason | None = "stop" if verdict.is_complete else None
            done.append(
                DecodeDone(
                    verdict.attempt_id,
                    verdict.token_ids,
                    reason,
                    verdict.error,
                    verdict.logprobs,
                )
            )
        return done

    def _schedule(self) -> list[RunningRow]:
        """Tell the device who left and who came. Returns the rows that need another token."""
        for slot in self._departed:
            self._state = self._functions.deactivate(self._state, slot)
        self._state = self._functions.add_pages(self._state, self._grown)
        for slot, row in self._arrived.items():  # after the pages of who was there before
            self._state = self._functions.insert(self._state, row, slot)
        self._departed.clear()
        self._grown.clear()
        self._arrived.clear()
        return [
            running
            for running in self._by_attempt.values()
            if running.num_left > 0 and self._guided.can_step(running.row.attempt_id)
        ]

    def _num_steps(self, batch: list[RunningRow]) -> int:
        """Several steps when somebody needs them and no stream is held up by them."""
        num_steps = self._buckets.max_decode_steps
        is_needed = max(running.num_left for running in batch) >= num_steps
        is_fast = self._seconds_per_step * num_steps <= MAX_CALL_SECONDS
        has_pages = all(running.has_pages_for(num_steps) for running in batch)
        return num_steps if is_needed and is_fast and has_pages else 1

    def _num_drafts(self, batch: list[RunningRow]) -> int:
        """Drafts are verified when a row speculates and all that do have pages for them."""
        num_drafts = self._buckets.max_drafts
        speculating = [running for running in batch if running.max_drafts]
        has_pages = all(running.has_pages_for(1 + num_drafts) for running in speculating)
        return num_drafts if speculating and has_pages else 0

    def _build(self, batch: list[RunningRow], num_steps: int) -> DecodeShape:
        """Rows up to the last slot in use, tables that hold every row's next tokens."""
        num_used = max(running.slot for running in batch) + 1
        num_rows = next(rows for rows in self._rows if rows >= num_used)
        num_drafts = self._num_drafts(batch)
        num_steps = 1 if num_drafts else num_steps
        longest = max(running.reach(num_steps + num_drafts) for running in batch)
        width = self._buckets.context_width(longest)
        return DecodeShape(num_rows, width, num_steps, num_drafts)

    def _run(self, batch: list[RunningRow], shape: DecodeShape) -> None:
        now = time.monotonic()
        self._cache.layers, self._state, results = self._functions.decode(
            self._leaves, self._cache.layers, self._state, shape, self._masks(batch, shape[0])
        )
        if all(running.row.sampling.logprobs is None for running in batch):
            results = results.without_logprobs()
        results.copy_to_host_async()
        slots = tuple((running.slot, running.generation) for running in batch)
        self._in_flight.append(_InFlight(results, slots, shape, now))
        for running in batch:
            running.position += min(shape.num_steps, running.num_left)
            running.num_uncertain += shape.num_drafts

    def _masks(self, batch: list[RunningRow], num_rows: int) -> TokenMasks | None:
        """Masks of the guided rows that take part; the others pause. None: no row is guided."""
        if not self._guided:
            return None
        by_attempt = self._guided.start(running.row.attempt_id for running in batch)
        by_slot = {self._by_attempt[name].slot: mask for name, mask in by_attempt.items()}
        guided_slots = {self._by_attempt[name].slot for name in self._guided}
        paused = [slot for slot in guided_slots - by_slot.keys() if slot < num_rows]
        return make_masks(num_rows, self._functions.vocab_size, by_slot, paused)

    def _commit(self, num_unread: int) -> list[DecodeDone]:
        """Read results until `num_unread` calls are left; those of removed rows are dropped."""
        done = []
        while len(self._in_flight) > num_unread:
            step = self._in_flight.popleft()
            results = step.results.to_host()  # waits for the step
            self._observe(step)
            outcomes = results.outcomes.tolist()
            for slot, generation in step.slots:
                running = self._by_slot[slot]
                if running is None or running.generation != generation:
                    continue
                if outcomes[slot] == Outcome.IDLE:
                    continue
                finish_reason = FINISH_REASONS.get(outcomes[slot])
                if finish_reason is not None:
                    self._release(running)
                row = running.row
                token_ids = results.token_ids(slot)
                num_drafts = _read_drafts(running, results, step.shape)
                logprobs = results.token_logprobs(slot, row.sampling.logprobs)
                if row.attempt_id in self._guided:  # told with the verdict on it
                    self._guided.take(row.attempt_id, token_ids[-1], logprobs)
                    continue
                done.append(
                    DecodeDone(
                        row.attempt_id,
                        token_ids,
                        finish_reason,
                        logprobs=logprobs,
                        num_drafts=num_drafts,
                    )
                )
        return done

    def _observe(self, step: _InFlight) -> None:
        """Learn from a call that has just ended how long a step takes."""
        now = time.monotonic()
        seconds = (now - max(step.dispatch_time, self._last_finish_time)) / step.shape.num_steps
        self._last_finish_time = now
        before = self._seconds_per_step
        is_first = before == float("inf")
        self._seconds_per_step = seconds if is_first else before + SMOOTHING * (seconds - before)


def _read_drafts(running: RunningRow, results: StepResults, shape: DecodeShape) -> int:
    """How many drafts were verified for a row, whose position is certain now."""
    if results.num_drafts is None:
        return 0
    running.position += int(results.num_tokens[running.slot]) - 1
    running.num_uncertain -= shape.num_drafts
    return int(results.num_drafts[running.slot])
