"""Engines without a network: the next token is a number made from the KV pages themselves.

A page holds the token ids of its positions, so a page that is lost, late or another attempt's gives
other tokens than `reference`, which needs no pages. Pieces travel by the real in-process transfer.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpd.engine.decode_row import DecodeDone, DecodeRow
from jpd.engine.prefill import PrefillDone, PrefillTask
from jpd.parallel.mesh import make_worker_mesh
from jpd.transfer.protocol import KVPiece
from jpd.transfer.wire import Wire
from jpd.worker.protocol import Attempt

VOCAB = 997
UNWRITTEN = -1


def next_token(sequence: Sequence[int]) -> int:
    """Depends on every token and its position."""
    value = 7
    for position, token in enumerate(sequence):
        value = (value * 31 + int(token) * (position + 3)) % 1_000_003
    return value % VOCAB


def reference(attempt: Attempt) -> list[int]:
    """What the attempt must generate, computed without pages."""
    sequence = list(attempt.token_ids)
    output: list[int] = []
    assert attempt.sampling.max_tokens is not None
    while len(output) < attempt.sampling.max_tokens:
        output.append(next_token(sequence))
        sequence.append(output[-1])
        if output[-1] in attempt.stop_token_ids:
            break
    return output


class FakePool:
    """Pages of token ids on one device's mesh; page 0 is the bin."""

    def __init__(self, num_pages: int, page_size: int, device: int) -> None:
        self.page_size = page_size
        self.pages = np.full((num_pages, page_size), UNWRITTEN, np.int32)
        devices = jax.devices()[device : device + 1]
        self.mesh: Mesh = make_worker_mesh(devices, tensor=1, expert=1, num_cached_heads=1)

    def put(self, page_ids: Sequence[int], position: int, token: int) -> None:
        self.pages[page_ids[position // self.page_size], position % self.page_size] = token

    def read(self, page_ids: Sequence[int], num_tokens: int) -> list[int]:
        return [int(token) for token in self.pages[list(page_ids)].reshape(-1)[:num_tokens]]

    def gather(self, page_ids: Sequence[int]) -> tuple[jax.Array, ...]:
        sharding = NamedSharding(self.mesh, PartitionSpec())
        return (jax.device_put(self.pages[list(page_ids)][:, :, None, None], sharding),)

    def write(self, arrays: Sequence[jax.Array], page_ids: Sequence[int]) -> None:
        self.pages[list(page_ids)] = np.asarray(arrays[0])[: len(page_ids), :, 0, 0]


class FakeOutlet:
    """What a decode worker sends back, all pages in one piece."""

    def __init__(
        self, pool: FakePool, emit: Callable[[KVPiece], None], names: Collection[str] = ()
    ) -> None:
        self._pool, self._emit, self._names = pool, emit, names

    def __contains__(self, destination: str) -> bool:
        return destination in self._names

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
        arrays = self._pool.gather(page_ids[start:end])
        self._put(attempt_id, destination, start, arrays, end - start, is_end)

    def refuse(self, attempt_id: str, destination: str, start: int) -> None:
        self._put(attempt_id, destination, start, (), 0, True)

    def _put(
        self,
        attempt_id: str,
        destination: str,
        start: int,
        arrays: tuple[jax.Array, ...],
        num_pages: int,
        is_end: bool,
    ) -> None:
        self._emit(
            KVPiece(
                attempt_id=attempt_id,
                destination=destination,
                page_start=start,
                num_pages=num_pages,
                arrays=arrays,
                wire=Wire(1, self._pool.page_size, (max(1, num_pages),), 4, "int32"),
                num_bytes=sum(array.nbytes for array in arrays),
                is_last=is_end,
                offered_time=time.monotonic(),
            )
        )


@dataclass
class _Progress:
    task: PrefillTask
    num_done: int
    num_sent_pages: int


class FakePrefillEngine:
    """One chunk of one task a step, first come first served; results one step behind."""

    def __init__(self, pool: FakePool, chunk: int, emit: Callable[[KVPiece], None]) -> None:
        self._pool, self._chunk = pool, chunk
        self._outlet = FakeOutlet(pool, emit)
        self.write_pages = pool.write
        self._tasks: list[_Progress] = []
        self._finished: list[PrefillDone] = []
        self.num_computed: dict[str, int] = {}
        self.before_step: Callable[[], None] = lambda: None

    @property
    def has_work(self) -> bool:
        return bool(self._tasks or self._finished)

    @property
    def num_tokens_waiting(self) -> int:
        return sum(len(p.task.token_ids) - p.num_done for p in self._tasks)

    @property
    def unfinished(self) -> set[str]:
        return {progress.task.attempt_id for progress in self._tasks}

    def add(self, task: PrefillTask) -> None:
        self._tasks.append(
            _Progress(task, task.num_cached_tokens, task.send_from_token // self._pool.page_size)
        )

    def remove(self, attempt_id: str) -> None:
        self._tasks = [p for p in self._tasks if p.task.attempt_id != attempt_id]
        self._finished = [done for done in self._finished if done.attempt_id != attempt_id]

    def step(self) -> list[PrefillDone]:
        self.before_step()
        results, self._finished = self._finished, []
        if self._tasks:
            self._advance(self._tasks[0])
        return results

    def _advance(self, progress: _Progress) -> None:
        task = progress.task
        end = min(progress.num_done + self._chunk, len(task.token_ids))
        for position in range(progress.num_done, end):
            self._pool.put(task.page_ids, position, task.token_ids[position])
        computed = self.num_computed.get(task.attempt_id, 0) + end - progress.num_done
        self.num_computed[task.attempt_id] = computed
        progress.num_done = end
        is_last = end == len(task.token_ids)
        self._send(progress, is_last)
        if is_last:
            self._tasks.remove(progress)
            token = next_token(self._pool.read(task.page_ids, end))
            self._finished.append(self._done(task, token, computed))

    def _done(self, task: PrefillTask, token: int, num_computed: int) -> PrefillDone:
        is_over = token in task.stop_token_ids
        return PrefillDone(
            attempt_id=task.attempt_id,
            token_id=token,
            finish_reason="stop" if is_over else None,
            num_cached_tokens=task.num_cached_tokens,
            num_computed_tokens=num_computed,
            queue_seconds=0.0,
            prefill_seconds=0.0,
        )

    def _send(self, progress: _Progress, is_last: bool) -> None:
        task, size = progress.task, self._pool.page_size
        end = -(-progress.num_done // size) if is_last else progress.num_done // size
        start = progress.num_sent_pages
        if task.destination is None or start >= end:
            return
        progress.num_sent_pages = end
        self._outlet.send(
            task.attempt_id, task.destination, task.page_ids, start, end, is_end=is_last
        )


class FakeDecodeEngine:
    """One token of every row a step; results one step behind."""

    def __init__(self, pool: FakePool, num_slots: int) -> None:
        self._pool, self._num_slots = pool, num_slots
        self._rows: dict[str, tuple[DecodeRow, list[int]]] = {}
        self._finished: list[DecodeDone] = []
        self.before_step: Callable[[], None] = lambda: None
        self.write_pages = pool.write

    @property
    def has_work(self) -> bool:
        return bool(self._rows or self._finished)

    max_steps = 1

    def short_rows(self, num_steps: int) -> list[str]:
        return [attempt_id for attempt_id in self._rows if self.is_short(attempt_id, num_steps)]

    def is_short(self, attempt_id: str, num_steps: int) -> bool:
        row, tokens = self._rows[attempt_id]
        assert row.sampling.max_tokens is not None
        num_written = min(len(tokens) - 1 + num_steps, row.sampling.max_tokens - 1)
        return len(row.page_ids) * self._pool.page_size < len(row.token_ids) + num_written

    def grow(self, attempt_id: str, page_id: int) -> None:
        row, tokens = self._rows[attempt_id]
        self._rows[attempt_id] = (replace(row, page_ids=(*row.page_ids, page_id)), tokens)

    def insert(self, row: DecodeRow) -> None:
        assert len(self._rows) < self._num_slots, "more rows than slots"
        self._rows[row.attempt_id] = (row, [row.first_token_id])

    def remove(self, attempt_id: str) -> None:
        self._rows.pop(attempt_id, None)
        self._finished = [done for done in self._finished if done.attempt_id != attempt_id]

    def step(self, *, nobody_waits: bool = False) -> list[DecodeDone]:
        self.before_step()
        results, self._finished = self._finished, []
        for row, tokens in list(self._rows.values()):
            self._advance(row, tokens)
        return results

    def _advance(self, row: DecodeRow, tokens: list[int]) -> None:
        position = row.num_tokens + len(tokens) - 1
        self._pool.put(row.page_ids, position, tokens[-1])
        token = next_token(self._pool.read(row.page_ids, position + 1))
        tokens.append(token)
        assert row.sampling.max_tokens is not None
        reason = None
        if token in row.stop_token_ids:
            reason = "stop"
        elif len(tokens) == row.sampling.max_tokens:
            reason = "length"
        self._finished.append(DecodeDone(row.attempt_id, (token,), reason))
        if reason is not None:
            del self._rows[row.attempt_id]


class Gate:
    """Holds an engine's thread at its next step until opened; `entered` says that it waits."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()
        self._open.set()

    def close(self) -> None:
        self.entered.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def __call__(self) -> None:
        self.entered.set()
        assert self._open.wait(20), "a test left the gate closed"
