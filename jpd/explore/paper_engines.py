"""Engines on paper: a page holds the token ids of its positions; the next token is made of them.

Each layer of a page holds them: one that is lost, late or another attempt's gives other tokens than
`reference`, which needs no pages. Results come one step behind, as from the real engines. Stand in
for `jpd.engine` in the explorer, and in tests of workers, whose pool puts its pages on devices.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jpd.engine.decode_row import DecodeDone, DecodeRow
from jpd.engine.prefill import PrefillDone, PrefillTask
from jpd.request import FinishReason
from jpd.transfer.protocol import KVPiece
from jpd.transfer.wire import Wire

VOCAB_SIZE = 251
NUM_LAYERS = 2
UNWRITTEN = -1

Page = tuple[int, ...]


def next_token(sequence: Sequence[int]) -> int:
    """Depends on every token and its place."""
    value = 7
    for token in sequence:
        value = (value * 31 + token + 3) % 1_000_003
    return value % VOCAB_SIZE


def reference(
    prompt: Sequence[int], max_tokens: int, stop_token_ids: Collection[int] = ()
) -> list[int]:
    """What a greedy request must generate."""
    sequence = list(prompt)
    for _ in range(max_tokens):
        sequence.append(next_token(sequence))
        if sequence[-1] in stop_token_ids:
            break
    return sequence[len(prompt) :]


def _finish_reason(
    token_id: int, num_output_tokens: int, wanted: PrefillTask | DecodeRow
) -> FinishReason | None:
    if token_id in wanted.stop_token_ids:
        return "stop"
    return "length" if num_output_tokens == wanted.sampling.max_tokens else None


@dataclass(frozen=True, slots=True)
class PaperPages:
    """Copied pages of an attempt, layer by layer, as staging arrays would hold them."""

    attempt_id: str
    layers: tuple[tuple[Page, ...], ...]


class PaperPool:
    """The contents of one worker's pool, and how they travel: a piece for each page.

    The more pieces there are, the more orders they can come in.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.wire = Wire(1, page_size, (1,), token_bytes=NUM_LAYERS, dtype="int32")
        self.layers = [
            [[UNWRITTEN] * page_size for _ in range(num_pages)] for _ in range(NUM_LAYERS)
        ]
        self.on_write: Callable[[str, Sequence[int]], None] = lambda attempt_id, page_ids: None

    def put(self, page_ids: Sequence[int], position: int, token: int) -> None:
        place, offset = page_ids[position // self.page_size], position % self.page_size
        for pages in self.layers:
            pages[place][offset] = token

    def read(self, page_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Tokens by position; UNWRITTEN where the layers do not agree."""
        one, other = (
            itertools.chain.from_iterable(pages[page] for page in page_ids) for pages in self.layers
        )
        both = itertools.islice(zip(one, other, strict=True), num_tokens)
        return [a if a == b else UNWRITTEN for a, b in both]

    def gather(self, attempt_id: str, page_ids: Sequence[int], layers: range) -> tuple[Any, ...]:
        """The arrays of a piece: a copy of these layers of these pages."""
        found = (self.layers[layer] for layer in layers)
        copied = tuple(tuple(tuple(pages[page]) for page in page_ids) for pages in found)
        return (PaperPages(attempt_id, copied),)

    def scatter(self, arrays: Sequence[Any], page_ids: Sequence[int], layers: range) -> None:
        """Put what arrived for an attempt into these pages, after telling whose and where."""
        (copied,) = arrays
        assert isinstance(copied, PaperPages)
        self.on_write(copied.attempt_id, page_ids)
        for layer, pages in zip(layers, copied.layers, strict=True):
            for page_id, page in zip(page_ids, pages, strict=True):
                self.layers[layer][page_id][:] = page


@dataclass(slots=True)
class _Running:
    task: PrefillTask
    num_done: int
    num_sent_pages: int


class PaperOutlet:
    """Emits pages of one pool as its wire cuts them, layer group by layer group."""

    def __init__(
        self,
        pool: PaperPool,
        emit: Callable[[KVPiece], None],
        clock: Callable[[], float],
        destinations: Collection[str] = (),
        *,
        layer_groups: int = 1,
    ) -> None:
        self._pool, self._emit, self._clock = pool, emit, clock
        self._destinations = destinations
        self._wire = replace(pool.wire, layer_groups=layer_groups)

    def __contains__(self, destination: str) -> bool:
        return destination in self._destinations

    def page_size(self, destination: str) -> int:
        return self._pool.page_size

    def send(
        self,
        attempt_id: str,
        destination: str,
        page_ids: Sequence[int],
        start: int,
        end: int,
        *,
        is_end: bool,
    ) -> None:
        ranges = self._wire.layer_ranges(NUM_LAYERS)
        for layers in ranges:
            first = start
            for num_pages in self._wire.split(max(0, end - start)):
                arrays = self._pool.gather(attempt_id, page_ids[first : first + num_pages], layers)
                is_last = is_end and layers == ranges[-1] and first + num_pages == end
                pages = range(first, first + num_pages)
                self._put(attempt_id, destination, layers, pages, arrays, is_last)
                first += num_pages

    def refuse(self, attempt_id: str, destination: str, start: int) -> None:
        nothing = range(start, start)
        self._put(attempt_id, destination, range(NUM_LAYERS), nothing, (), is_last=True)

    def _put(
        self,
        attempt_id: str,
        destination: str,
        layers: range,
        pages: range,
        arrays: tuple[Any, ...],
        is_last: bool,
    ) -> None:
        piece = KVPiece(
            attempt_id=attempt_id,
            layer_start=layers.start,
            num_layers=len(layers),
            page_start=pages.start,
            num_pages=len(pages),
            destination=destination,
            arrays=arrays,
            wire=self._wire,
            num_bytes=self._wire.num_bytes(len(pages)) * len(layers) // NUM_LAYERS,
            is_last=is_last,
            offered_time=self._clock(),
        )
        self._emit(piece)


class PaperPrefill:
    """One chunk of one task a step, first come first served."""

    num_layers = NUM_LAYERS

    def __init__(
        self,
        pool: PaperPool,
        chunk: int,
        emit: Callable[[KVPiece], None],
        clock: Callable[[], float],
        *,
        layer_groups: int = 1,
    ) -> None:
        self._pool, self._chunk = pool, chunk
        self._outlet = PaperOutlet(pool, emit, clock, layer_groups=layer_groups)
        self._tasks: dict[str, _Running] = {}
        self._finished: list[PrefillDone] = []
        self.num_computed = Counter[str]()  # tokens, by attempt

    @property
    def has_work(self) -> bool:
        return bool(self._tasks or self._finished)

    @property
    def num_tokens_waiting(self) -> int:
        return sum(len(r.task.token_ids) - r.num_done for r in self._tasks.values())

    def add(self, task: PrefillTask) -> None:
        self._tasks[task.attempt_id] = _Running(
            task, task.num_cached_tokens, task.send_from_token // self._pool.page_size
        )

    def remove(self, attempt_id: str) -> None:
        self._tasks.pop(attempt_id, None)
        self._finished = [done for done in self._finished if done.attempt_id != attempt_id]

    def step(self) -> list[PrefillDone]:
        results, self._finished = self._finished, []
        if self._tasks:
            self._advance(next(iter(self._tasks.values())))
        return results

    def _advance(self, running: _Running) -> None:
        task = running.task
        end = min(running.num_done + self._chunk, len(task.token_ids))
        for position in range(running.num_done, end):
            self._pool.put(task.page_ids, position, task.token_ids[position])
        self.num_computed[task.attempt_id] += end - running.num_done
        running.num_done = end
        self._send(running)
        if end == len(task.token_ids):
            del self._tasks[task.attempt_id]
            token = next_token(self._pool.read(task.page_ids, end))
            self._finished.append(self._done(task, token))

    def _done(self, task: PrefillTask, token: int) -> PrefillDone:
        return PrefillDone(
            attempt_id=task.attempt_id,
            token_id=token,
            finish_reason=_finish_reason(token, 1, task),
            num_cached_tokens=task.num_cached_tokens,
            num_computed_tokens=self.num_computed[task.attempt_id],
            queue_seconds=0.0,
            prefill_seconds=0.0,
        )

    def write_pages(self, arrays: Sequence[Any], page_ids: Sequence[int], layers: range) -> None:
        self._pool.scatter(arrays, page_ids, layers)

    def _send(self, running: _Running) -> None:
        task, size = running.task, self._pool.page_size
        is_last = running.num_done == len(task.token_ids)
        end = -(-running.num_done // size) if is_last else running.num_done // size
        if task.destination is None:
            return
        start = running.num_sent_pages
        self._outlet.send(
            task.attempt_id, task.destination, task.page_ids, start, end, is_end=is_last
        )
        running.num_sent_pages = max(start, end)


@dataclass(slots=True)
class _Row:
    row: DecodeRow
    tokens: list[int] = field(default_factory=list)


class PaperDecode:
    """One token of every row a step."""

    max_steps, num_layers = 1, NUM_LAYERS

    def __init__(self, pool: PaperPool, num_slots: int) -> None:
        self._pool, self._num_slots = pool, num_slots
        self._rows: dict[str, _Row] = {}
        self._finished: list[DecodeDone] = []

    @property
    def has_work(self) -> bool:
        return bool(self._rows or self._finished)

    def insert(self, row: DecodeRow) -> None:
        assert len(self._rows) < self._num_slots, "more rows than slots"
        self._rows[row.attempt_id] = _Row(row, [row.first_token_id])

    def remove(self, attempt_id: str) -> None:
        self._rows.pop(attempt_id, None)
        self._finished = [done for done in self._finished if done.attempt_id != attempt_id]

    def short_rows(self, num_steps: int) -> list[str]:
        return [attempt_id for attempt_id in self._rows if self.is_short(attempt_id, num_steps)]

    def is_short(self, attempt_id: str, num_steps: int) -> bool:
        running = self._rows[attempt_id]
        max_tokens = running.row.sampling.max_tokens
        assert max_tokens is not None
        num_written = min(len(running.tokens) - 1 + num_steps, max_tokens - 1)
        capacity = len(running.row.page_ids) * self._pool.page_size
        return capacity < running.row.num_tokens + num_written

    def grow(self, attempt_id: str, page_id: int) -> None:
        running = self._rows[attempt_id]
        running.row = replace(running.row, page_ids=(*running.row.page_ids, page_id))

    def write_pages(self, arrays: Sequence[Any], page_ids: Sequence[int], layers: range) -> None:
        self._pool.scatter(arrays, page_ids, layers)

    def step(self, *, nobody_waits: bool = False) -> list[DecodeDone]:
        results, self._finished = self._finished, []
        for attempt_id in list(self._rows):
            self._finished.append(self._advance(self._rows[attempt_id]))
        return results

    def _advance(self, running: _Row) -> DecodeDone:
        row, tokens = running.row, running.tokens
        position = len(row.token_ids) + len(tokens) - 1
        self._pool.put(row.page_ids, position, tokens[-1])
        tokens.append(next_token(self._pool.read(row.page_ids, position + 1)))
        reason = _finish_reason(tokens[-1], len(tokens), row)
        if reason is not None:
            del self._rows[row.attempt_id]
        return DecodeDone(row.attempt_id, (tokens[-1],), reason)
