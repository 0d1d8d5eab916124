"""A transfer that goes wrong on purpose: for tests of everything that waits for KV.

Wraps a real KVTransfer and breaks chosen pieces at a stage of their way: when they are offered,
when they are pulled, when they arrive, when they are released. Knows nothing of workers. Tests hand
it to the launcher as `transfer_wrapper`.
"""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jpd.errors import TransferError
from jpd.transfer.protocol import (
    ArrivedPiece,
    Deliver,
    KVPiece,
    KVTransfer,
    Serve,
)
from jpd.transfer.wrapper import TransferWrapper

Stage = Literal["offer", "pull", "arrive", "release"]
Action = Literal["delay", "drop", "raise", "corrupt"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the `piece_index`-th piece of one attempt, or of each, at a stage.

    A piece that is delayed at `offer` is new when it is offered; at `pull` it has been waiting. A
    release that is delayed or dropped leaves the piece in flight for longer, or until `close`.
    """

    action: Action
    piece_index: int = 0
    attempt_id: str | None = None  # None: of every attempt
    delay_seconds: float = 0.0
    layer: int = 0  # of the piece's, whose page is corrupted: the first page of the piece
    stage: Stage = "arrive"

    def __post_init__(self) -> None:
        if self.stage == "release" and self.action not in ("delay", "drop"):
            raise ValueError(f"a release cannot {self.action}: it carries nothing and answers none")

    def hits(self, stage: Stage, attempt_id: str, piece_index: int) -> bool:
        is_meant = self.attempt_id in (None, attempt_id) and self.piece_index == piece_index
        return is_meant and self.stage == stage


class FaultyTransfer(TransferWrapper):
    """KVTransfer that applies `faults` on the way; the inner one moves the pieces.

    A cancel leaves delayed pieces: they stand for a writer that is too late to be stopped.
    """

    def __init__(self, inner: KVTransfer, faults: Sequence[Fault]) -> None:
        super().__init__(inner)
        self._faults = tuple(faults)
        self._lock = threading.Lock()
        self._num_seen: Counter[tuple[Stage, str]] = Counter()
        self._delayed: set[threading.Timer] = set()
        self._num_unreleased = 0  # for ever
        self.num_faults = 0

    def register(
        self, worker: str, mesh: Mesh, deliver: Deliver, serve: Serve | None = None
    ) -> None:
        def deliver_or_break(piece: ArrivedPiece) -> None:
            self._arrive(worker, piece, deliver)

        super().register(worker, mesh, deliver_or_break, serve)

    def offer(self, piece: KVPiece) -> None:
        """Break the piece as it is offered or pulled. Raises OSError where that is the fault."""
        offered = self._break("offer", piece, self._reoffer)
        pulled = offered and self._break("pull", offered, self._inner.offer)
        if pulled is not None:
            self._inner.offer(pulled)

    def _reoffer(self, piece: KVPiece) -> None:
        self._inner.offer(dataclasses.replace(piece, offered_time=time.monotonic()))

    def _break(
        self, stage: Stage, piece: KVPiece, offer_late: Callable[[KVPiece], None]
    ) -> KVPiece | None:
        """The piece as it goes on; None: it is lost, or comes later."""
        fault = self._fault(stage, piece.attempt_id)
        if fault is None:
            return piece
        if fault.action == "delay":
            self._later(fault.delay_seconds, lambda: offer_late(piece))
        if fault.action in ("delay", "drop"):
            return None
        if fault.action == "corrupt":
            return dataclasses.replace(piece, arrays=corrupted(piece.arrays, fault.layer))
        if stage == "offer":
            raise OSError(f"offer of a piece of {piece.attempt_id} was made to fail")
        return dataclasses.replace(piece, arrays=_unreadable(piece.arrays))

    def num_in_flight(self, worker: str) -> int:
        with self._lock:
            broken = len(self._delayed) + self._num_unreleased
            return super().num_in_flight(worker) + broken

    def close(self) -> None:
        with self._lock:
            delayed = list(self._delayed)
        for timer in delayed:
            timer.cancel()
            timer.join()
        super().close()

    def _arrive(self, worker: str, piece: ArrivedPiece, deliver: Deliver) -> None:
        fault = self._fault("arrive", piece.attempt_id)
        action = fault.action if fault is not None else None
        if fault is not None and action == "delay":
            self._later(fault.delay_seconds, lambda: deliver(piece))
        elif action == "raise":
            error = TransferError(worker, f"a piece of {piece.attempt_id} was made to fail")
            deliver(dataclasses.replace(piece, arrays=(), num_bytes=0, error=error))
        elif fault is not None and action == "corrupt":
            deliver(dataclasses.replace(piece, arrays=corrupted(piece.arrays, fault.layer)))
        elif action is None:
            deliver(piece)
        self._release(piece)

    def _release(self, piece: ArrivedPiece) -> None:
        fault = self._fault("release", piece.attempt_id)
        if fault is not None and fault.action == "delay":
            self._later(fault.delay_seconds, lambda: None)
        elif fault is not None:
            self._num_unreleased += 1

    def _fault(self, stage: Stage, attempt_id: str) -> Fault | None:
        """The fault of the next piece of this attempt at this stage."""
        with self._lock:
            index = self._num_seen[stage, attempt_id]
            self._num_seen[stage, attempt_id] += 1
            found = (f for f in self._faults if f.hits(stage, attempt_id, index))
            fault = next(found, None)
            self.num_faults += fault is not None
            return fault

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        def run() -> None:
            action()
            with self._lock:
                self._delayed.discard(timer)

        timer = threading.Timer(seconds, run)
        with self._lock:
            self._delayed.add(timer)
        timer.start()


def _unreadable(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Arrays of which the first is gone when it is to be copied."""
    gone = jax.device_put(np.asarray(arrays[0]), arrays[0].sharding)
    gone.delete()
    return (gone, *arrays[1:])


def corrupted(arrays: tuple[jax.Array, ...], index: int) -> tuple[jax.Array, ...]:
    """Other numbers in the first page of one array. Goes over the host: nothing compiles."""
    values = np.array(arrays[index])
    values[0] = -values[0] + np.asarray(1, values.dtype)
    broken = jax.device_put(values, arrays[index].sharding)
    return (*arrays[:index], broken, *arrays[index + 1 :])
