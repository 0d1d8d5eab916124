"""Transfer between meshes of one process: a planned `device_put`, never a bounce over the host.

One thread per destination, so that a slow or broken destination holds up nobody else: it takes the
oldest piece, puts each array where the wire says (see destination.py) and waits for the copies. It
waits there and nowhere else: workers' threads never block on a transfer. What is queued is bounded
by the reservations of the destination, which were made before the first piece was computed.
"""

import logging
import threading
import time
from collections import deque

import jax
from jax.sharding import Mesh

from jpd.errors import TransferError
from jpd.transfer.destination import Destination
from jpd.transfer.protocol import ArrivedPiece, Deliver, KVPiece

logger = logging.getLogger(__name__)


class InProcessTransfer:
    """KVTransfer within one process. A piece older than `timeout_seconds` is refused."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._lanes: dict[str, _Lane] = {}

    def register(self, worker: str, mesh: Mesh, deliver: Deliver) -> None:
        """Start the destination's thread. Called for all destinations before the first offer."""
        if worker in self._lanes:
            raise ValueError(f"destination {worker} is registered already")
        self._lanes[worker] = _Lane(worker, mesh, deliver, self._timeout_seconds)

    def offer(self, piece: KVPiece) -> None:
        self._lanes[piece.destination].put(piece)

    def cancel(self, attempt_id: str) -> None:
        for lane in self._lanes.values():
            lane.cancel(attempt_id)

    def num_in_flight(self, worker: str) -> int:
        return self._lanes[worker].num_in_flight()

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.stop()
        for lane in self._lanes.values():
            lane.thread.join()


class _Lane:
    """The queue and the thread of one destination."""

    def __init__(self, worker: str, mesh: Mesh, deliver: Deliver, timeout_seconds: float) -> None:
        self._worker, self._target, self._deliver = worker, Destination(mesh), deliver
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._queue: deque[KVPiece] = deque()
        self._pulling: KVPiece | None = None
        self._pulling_cancelled = False
        self._stopped = False
        self.thread = threading.Thread(target=self._run, name=f"transfer-{worker}", daemon=True)
        self.thread.start()

    def put(self, piece: KVPiece) -> None:
        with self._changed:
            if not self._stopped:
                self._queue.append(piece)
                self._changed.notify()

    def cancel(self, attempt_id: str) -> None:
        with self._changed:
            self._queue = deque(piece for piece in self._queue if piece.attempt_id != attempt_id)
            if self._pulling is not None and self._pulling.attempt_id == attempt_id:
                self._pulling_cancelled = True

    def num_in_flight(self) -> int:
        with self._changed:
            return len(self._queue) + (self._pulling is not None)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._pulling_cancelled = True
            self._changed.notify()

    def _run(self) -> None:
        while (piece := self._take()) is not None:
            arrived = self._pull(piece)
            del piece  # the staging arrays of the source live no longer than the copy
            self._hand_over(arrived)
            del arrived

    def _take(self) -> KVPiece | None:
        """The oldest piece; waits for one. None when stopped."""
        with self._changed:
            while not self._queue and not self._stopped:
                self._changed.wait()
            if self._stopped:
                return None
            self._pulling, self._pulling_cancelled = self._queue.popleft(), False
            return self._pulling

    def _hand_over(self, arrived: ArrivedPiece) -> None:
        with self._changed:
            cancelled = self._pulling_cancelled
        if not cancelled:
            self._deliver(arrived)
        with self._changed:
            self._pulling = None

    def _pull(self, piece: KVPiece) -> ArrivedPiece:
        """Copy to the destination; blocks until it is there. Failures become the piece's error."""
        late_seconds = time.monotonic() - piece.offered_time
        if late_seconds > self._timeout_seconds:
            reason = (
                f"pages {piece.page_start}+{piece.num_pages} of {piece.attempt_id}: not pulled for"
            )
            return self._failed(
                piece, f"{reason} {late_seconds:.1f} s > {self._timeout_seconds:g} s"
            )
        try:
            shardings = self._target.shardings(piece.wire, piece.arrays)
            moved = jax.device_put(piece.arrays, shardings)
            jax.block_until_ready(moved)
            arrays = self._target.join(piece.wire, moved)
        except Exception as error:  # whatever the runtime raises, the destination must hear of it
            logger.exception("transfer to %s failed", self._worker)
            return self._failed(piece, f"pages {piece.page_start}+{piece.num_pages}: {error}")
        return ArrivedPiece(
            piece.attempt_id,
            piece.page_start,
            piece.num_pages,
            arrays,
            piece.num_bytes,
            piece.is_last,
        )

    def _failed(self, piece: KVPiece, reason: str) -> ArrivedPiece:
        error = TransferError(self._worker, reason)
        return ArrivedPiece(
            piece.attempt_id, piece.page_start, piece.num_pages, (), 0, piece.is_last, error
        )
