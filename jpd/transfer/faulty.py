"""A transfer that goes wrong on purpose: for tests of everything that waits for KV.

Wraps a real KVTransfer and breaks chosen pieces on their way: late, lost, failed or altered. Knows
nothing of workers. Tests hand it to the launcher as `transfer_wrapper`.
"""

import dataclasses
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jpd.errors import TransferError
from jpd.transfer.protocol import ArrivedPiece, Deliver, KVPiece, KVTransfer


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the `piece_index`-th piece to arrive of one attempt, or of each attempt."""

    action: Literal["delay", "drop", "raise", "corrupt"]
    piece_index: int = 0
    attempt_id: str | None = None  # None: of every attempt
    delay_seconds: float = 0.0
    layer: int = 0  # whose page is corrupted: the first page of the piece

    def hits(self, attempt_id: str, piece_index: int) -> bool:
        return self.attempt_id in (None, attempt_id) and self.piece_index == piece_index


class FaultyTransfer:
    """KVTransfer that applies `faults` to pieces as they arrive; the inner one moves them."""

    def __init__(self, inner: KVTransfer, faults: Sequence[Fault]) -> None:
        self._inner = inner
        self._faults = tuple(faults)
        self._lock = threading.Lock()
        self._num_arrived: Counter[str] = Counter()
        self._delayed: set[threading.Timer] = set()
        self.num_faults = 0

    def register(self, worker: str, mesh: Mesh, deliver: Deliver) -> None:
        def deliver_or_break(piece: ArrivedPiece) -> None:
            self._arrive(worker, piece, deliver)

        self._inner.register(worker, mesh, deliver_or_break)

    def offer(self, piece: KVPiece) -> None:
        self._inner.offer(piece)

    def cancel(self, attempt_id: str) -> None:
        """Delayed pieces are kept: they stand for a writer that is too late to be stopped."""
        self._inner.cancel(attempt_id)

    def num_in_flight(self, worker: str) -> int:
        with self._lock:
            return self._inner.num_in_flight(worker) + len(self._delayed)

    def close(self) -> None:
        with self._lock:
            delayed = list(self._delayed)
        for timer in delayed:
            timer.cancel()
            timer.join()
        self._inner.close()

    def _arrive(self, worker: str, piece: ArrivedPiece, deliver: Deliver) -> None:
        with self._lock:
            index = self._num_arrived[piece.attempt_id]
            self._num_arrived[piece.attempt_id] += 1
        fault = next((f for f in self._faults if f.hits(piece.attempt_id, index)), None)
        if fault is None:
            deliver(piece)
            return
        self.num_faults += 1
        if fault.action == "delay":
            self._deliver_later(fault.delay_seconds, piece, deliver)
        elif fault.action == "raise":
            error = TransferError(worker, f"piece {index} of {piece.attempt_id} was made to fail")
            deliver(dataclasses.replace(piece, arrays=(), num_bytes=0, error=error))
        elif fault.action == "corrupt":
            deliver(dataclasses.replace(piece, arrays=_corrupted(piece.arrays, fault.layer)))

    def _deliver_later(self, seconds: float, piece: ArrivedPiece, deliver: Deliver) -> None:
        def run() -> None:
            deliver(piece)
            with self._lock:
                self._delayed.discard(timer)

        timer = threading.Timer(seconds, run)
        with self._lock:
            self._delayed.add(timer)
        timer.start()


def _corrupted(arrays: tuple[jax.Array, ...], layer: int) -> tuple[jax.Array, ...]:
    """Other numbers in the first page of one layer. Goes over the host: nothing compiles."""
    values = np.array(arrays[layer])
    values[0] = -values[0] + np.asarray(1, values.dtype)
    broken = jax.device_put(values, arrays[layer].sharding)
    return (*arrays[:layer], broken, *arrays[layer + 1 :])
