"""The prefill engine: prompts become pages and first tokens, one chunk at a time.

A step: schedule (who shares it) → build (padded inputs) → run (dispatch it, send its pages) →
commit (read the chunk before it). The host never waits for the chunk it has just dispatched. Twin
of decode.py. Knows no router and no page owner. Owned by its worker's thread.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from jpd.cache.kv_cache import KVCache
from jpd.engine.buckets import ChunkLayout, ChunkShape
from jpd.engine.functions import ModelFunctions
from jpd.engine.packing import pack
from jpd.engine.prefill_chunk import PrefillChunk, empty_chunk, make_chunk, prompt_rows
from jpd.engine.results import FINISH_REASONS, StepResults
from jpd.engine.sampling import SamplingRows, sampling_row
from jpd.engine.scheduler import PrefillScheduler
from jpd.engine.steps import Leaves
from jpd.engine.token_masks import TokenMasks, make_masks
from jpd.guidance.guide import Mask
from jpd.request import FinishReason, SamplingParams
from jpd.transfer.protocol import KVPiece

NUM_MEASURED = 2
"""Runs of each chunk layout before the first prompt; the faster one counts."""


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """One prompt to prefill. Sampling is resolved: max_tokens and seed are set."""

    attempt_id: str
    token_ids: tuple[int, ...]
    page_ids: tuple[int, ...]  # of this worker's pool, enough for the prompt
    num_cached_tokens: int  # a multiple of the page size: in the pages already
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    deadline: float = float("inf")
    destination: str | None = None  # worker to send KV to; None: nothing travels
    send_from_page: int = 0  # the destination holds the pages before this one
    mask: Mask | None = None  # of the first token's choice, when it is guided


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """A prompt's first token."""

    attempt_id: str
    token_id: int
    finish_reason: FinishReason | None
    num_cached_tokens: int
    num_computed_tokens: int
    queue_seconds: float  # added → first chunk dispatched
    prefill_seconds: float  # first chunk dispatched → token on the host


@dataclass(slots=True, eq=False)
class _Running:
    """A task and how far it is."""

    task: PrefillTask
    sampling: SamplingRows
    added_time: float
    num_done: int  # tokens computed or cached, as far as dispatched
    num_sent_pages: int
    first_dispatch_time: float | None = None

    @property
    def num_left(self) -> int:
        return len(self.task.token_ids) - self.num_done


@dataclass(frozen=True, slots=True)
class _Part:
    """What a chunk computes of one task."""

    running: _Running
    num_tokens: int
    last_row: int  # of the chunk
    is_last: bool


@dataclass(frozen=True, slots=True)
class _Batch:
    """A chunk to be computed."""

    layout: ChunkLayout
    parts: tuple[_Part, ...]

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A dispatched chunk whose results were not read yet."""

    batch: _Batch
    results: StepResults
    dispatch_time: float


class PrefillEngine:
    """Prefills tasks into `cache`. Pieces of KV go to `emit` as they are computed."""

    def __init__(
        self,
        functions: ModelFunctions,
        cache: KVCache,
        leaves: Leaves,
        emit: Callable[[KVPiece], None],
        wire_partitions: Mapping[str, int] | None = None,
    ) -> None:
        """`wire_partitions`: for each destination, in how many parts KV travels to it."""
        self._functions, self._cache, self._leaves = functions, cache, leaves
        self._buckets = functions.buckets
        self._emit = emit
        self._wire_partitions = dict(wire_partitions or {})
        self._scheduler = PrefillScheduler()
        self._tasks: dict[str, _Running] = {}  # until its token is read
        self._in_flight: deque[_InFlight] = deque()
        self._last_finish_time = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._tasks or self._in_flight)

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    @property
    def num_tokens_waiting(self) -> int:
        """Prompt tokens not dispatched yet."""
        return sum(running.num_left for running in self._tasks.values())

    def warm_up(self, after_each: Callable[[], None] = lambda: None) -> None:
        """Compile every shape. Blocks. Writes to the bin page only.

        `after_each` is called between executables; what it raises ends the warm-up.
        """
        for shape in self._buckets.prefill_shapes:
            self._measure(shape)
            after_each()
        for layout in self._buckets.prefill_layouts:
            shape = ChunkShape(*layout, self._buckets.max_pages)
            seconds = min(self._measure(shape) for _ in range(NUM_MEASURED))
            self._scheduler.set_seconds(layout, seconds)
        self._functions.moves.warm_up_gather(self._cache, self._wire_partitions.values())
        jax.block_until_ready(self._cache.layers)

    def _measure(self, shape: ChunkShape) -> float:
        """Seconds of an empty chunk; the first time the shape is compiled."""
        start = time.monotonic()
        self._cache.layers, results = self._functions.prefill(
            self._leaves, self._cache.layers, empty_chunk(shape)
        )
        results.to_host()
        return time.monotonic() - start

    def add(self, task: PrefillTask) -> None:
        """Queue a prompt. Its pages are the caller's, to be held until it is done or removed."""
        if not 0 <= task.num_cached_tokens < len(task.token_ids):
            raise ValueError(f"{task.num_cached_tokens} of {len(task.token_ids)} tokens are cached")
        if task.destination is not None and task.destination not in self._wire_partitions:
            raise ValueError(f"unknown destination {task.destination}")
        now = time.monotonic()
        self._scheduler.add(
            task.attempt_id,
            len(task.token_ids) - task.num_cached_tokens,
            now=now,
            priority=task.priority,
            deadline=task.deadline,
        )
        self._tasks[task.attempt_id] = _Running(
            task=task,
            sampling=sampling_row(task.sampling, task.stop_token_ids, len(task.token_ids)),
            added_time=now,
            num_done=task.num_cached_tokens,
            num_sent_pages=task.send_from_page,
        )

    def remove(self, attempt_id: str) -> None:
        """Forget a task; what it has on the device is dropped when it ends. Idempotent."""
        self._tasks.pop(attempt_id, None)
        self._scheduler.remove(attempt_id)

    def step(self) -> list[PrefillDone]:
        """Dispatch one chunk and read the one before; with nothing to dispatch, read them all."""
        batch = self._schedule()
        if batch is not None:
            self._run(batch, self._build(batch))
        return self._commit(num_unread=0 if batch is None else 1)

    def _schedule(self) -> _Batch | None:
        """The tasks that are due first, as many as share a chunk well."""
        layouts = self._buckets.prefill_layouts
        task_ids = self._scheduler.first(layouts[-1].num_rows)
        if not task_ids:
            return None
        tasks = [self._tasks[task_id] for task_id in task_ids]
        packing = pack([task.num_left for task in tasks], layouts, self._scheduler.seconds)
        parts, num_rows = [], 0
        for running, num_tokens in zip(tasks, packing.num_tokens, strict=False):
            num_rows += -(-num_tokens // packing.layout.row_length)
            is_last = num_tokens == running.num_left
            parts.append(_Part(running, num_tokens, num_rows - 1, is_last))
        return _Batch(packing.layout, tuple(parts))

    def _build(self, batch: _Batch) -> PrefillChunk:
        rows = []
        for part in batch.parts:
            running, task = part.running, part.running.task
            assert task.sampling.max_tokens is not None
            rows += prompt_rows(
                task.token_ids,
                running.num_done,
                part.num_tokens,
                batch.layout.row_length,
                task.page_ids,
                running.sampling,
                last_position=len(task.token_ids) + task.sampling.max_tokens - 1,
            )
        longest = max(part.running.num_done + part.num_tokens for part in batch.parts)
        shape = ChunkShape(*batch.layout, self._buckets.context_width(longest))
        return make_chunk(shape, rows)

    def _run(self, batch: _Batch, chunk: PrefillChunk) -> None:
        """Dispatch the chunk and the gathers of all pages that are complete after it."""
        now = time.monotonic()
        for part in batch.parts:
            if part.running.first_dispatch_time is None:
                part.running.first_dispatch_time = now
                self._send(part.running)  # cached pages that the destination lacks need not wait
        self._cache.layers, results = self._functions.prefill(
            self._leaves, self._cache.layers, chunk, self._masks(batch)
        )
        results.copy_to_host_async()
        self._in_flight.append(_InFlight(batch, results, now))
        for part in batch.parts:
            part.running.num_done += part.num_tokens
            if part.is_last:
                self._scheduler.remove(part.running.task.attempt_id)
            self._send(part.running)

    def _masks(self, batch: _Batch) -> TokenMasks | None:
        """Of the rows whose first tokens are guided. None: there is none."""
        ends = [(part.last_row, part.running.task.mask) for part in batch.parts if part.is_last]
        by_row = {row: mask for row, mask in ends if mask is not None}
        if not by_row:
            return None
        return make_masks(batch.layout.num_rows, self._functions.vocab_size, by_row)

    def _send(self, running: _Running) -> None:
        """Gather and emit the complete pages that the destination lacks."""
        task = running.task
        if task.destination is None:
            return
        spec = self._cache.spec
        is_end = running.num_left == 0
        num_complete = running.num_done // spec.page_size
        if is_end:
            num_complete = spec.num_pages_for(running.num_done)
        for num_pages in self._buckets.split_move(max(0, num_complete - running.num_sent_pages)):
            start = running.num_sent_pages
            running.num_sent_pages += num_pages
            arrays = self._functions.moves.gather(
                self._cache,
                task.page_ids[start : running.num_sent_pages],
                self._wire_partitions[task.destination],
            )
            piece = KVPiece(
                attempt_id=task.attempt_id,
                destination=task.destination,
                page_start=start,
                num_pages=num_pages,
                arrays=arrays,
                num_bytes=num_pages * spec.page_bytes,
                is_last=is_end and running.num_sent_pages == num_complete,
                offered_time=time.monotonic(),
            )
            self._emit(piece)

    def _commit(self, num_unread: int) -> list[PrefillDone]:
        """Read results until `num_unread` chunks are left; those of removed tasks are dropped."""
        done = []
        while len(self._in_flight) > num_unread:
            chunk = self._in_flight.popleft()
            results = chunk.results.to_host()  # waits for the chunk
            now = time.monotonic()
            began = max(chunk.dispatch_time, self._last_finish_time)
            self._scheduler.observe(chunk.batch.layout, chunk.batch.num_tokens, now - began)
            self._last_finish_time = now
            for part in chunk.batch.parts:
                task = part.running.task
                if part.is_last and self._tasks.get(task.attempt_id) is part.running:
                    del self._tasks[task.attempt_id]
                    done.append(_done(part, results, now))
        return done


def _done(part: _Part, results: StepResults, now: float) -> PrefillDone:
    running, task = part.running, part.running.task
    assert running.first_dispatch_time is not None
    return PrefillDone(
        attempt_id=task.attempt_id,
        token_id=results.token_ids(part.last_row)[0],
        finish_reason=FINISH_REASONS.get(int(results.outcomes[part.last_row])),
        num_cached_tokens=task.num_cached_tokens,
        num_computed_tokens=len(task.token_ids) - task.num_cached_tokens,
        queue_seconds=running.first_dispatch_time - running.added_time,
        prefill_seconds=now - running.first_dispatch_time,
    )
