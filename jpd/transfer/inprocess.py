"""Transfer between meshes of one process: a planned `device_put`, never a bounce over the host.

The lane of a destination takes its oldest piece, puts each array where the wire says (see
destination.py) and waits for the copies. It waits there and nowhere else: workers' threads never
block on a transfer. What is queued is bounded by the reservations of the destination, which were
made before the first piece was computed.
"""

import logging
import time

from jax.sharding import Mesh

from jpd.errors import TransferError
from jpd.transfer.destination import Destination
from jpd.transfer.lane import Lane
from jpd.transfer.protocol import (
    ArrivedPiece,
    Deliver,
    KVPiece,
    PageRequest,
    Serve,
    arrived_piece,
)

logger = logging.getLogger(__name__)


class InProcessTransfer:
    """KVTransfer within one process. A piece older than `timeout_seconds` is refused."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._lanes: dict[str, Lane[KVPiece]] = {}
        self._serves: dict[str, Serve] = {}

    def register(
        self, worker: str, mesh: Mesh, deliver: Deliver, serve: Serve | None = None
    ) -> None:
        """Start the destination's thread. Called for all destinations before the first offer."""
        if worker in self._lanes:
            raise ValueError(f"destination {worker} is registered already")
        puller = _Puller(worker, Destination(mesh), self._timeout_seconds)
        self._lanes[worker] = Lane(worker, puller.pull, deliver)
        if serve is not None:
            self._serves[worker] = serve

    def offer(self, piece: KVPiece) -> None:
        self._lanes[piece.destination].put(piece)

    def ask(self, request: PageRequest) -> None:
        serve = self._serves.get(request.source)
        if serve is None:
            raise OSError(f"worker {request.source} gives nothing away here")
        serve(request)

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


class _Puller:
    """Copies pieces to one destination, on its lane's thread."""

    def __init__(self, worker: str, target: Destination, timeout_seconds: float) -> None:
        self._worker, self._target, self._timeout_seconds = worker, target, timeout_seconds

    def pull(self, piece: KVPiece) -> ArrivedPiece:
        """Blocks until the piece is there. Failures become the piece's error."""
        late_seconds = time.monotonic() - piece.offered_time
        if late_seconds > self._timeout_seconds:
            reason = f"not pulled for {late_seconds:.1f} s > {self._timeout_seconds:g} s"
            return self._failed(piece, f"{piece.where}: {reason}")
        try:
            arrays = self._target.put(piece.wire, piece.arrays)
        except Exception as error:  # whatever the runtime raises, the destination must hear of it
            logger.exception("transfer to %s failed", self._worker)
            return self._failed(piece, f"{piece.where}: {error}")
        return arrived_piece(piece, arrays, piece.num_bytes, piece.is_last)

    def _failed(self, piece: KVPiece, reason: str) -> ArrivedPiece:
        error = TransferError(self._worker, reason)
        return arrived_piece(piece, (), 0, piece.is_last, error)
