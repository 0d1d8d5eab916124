"""What wrappers of a transfer share: every verb goes on to the one inside, unless it is changed."""

from jax.sharding import Mesh

from jpd.transfer.protocol import Deliver, KVPiece, KVTransfer, PageRequest, Serve


class TransferWrapper:
    """KVTransfer around another."""

    def __init__(self, inner: KVTransfer) -> None:
        self._inner = inner

    def register(
        self, worker: str, mesh: Mesh, deliver: Deliver, serve: Serve | None = None
    ) -> None:
        self._inner.register(worker, mesh, deliver, serve)

    def offer(self, piece: KVPiece) -> None:
        self._inner.offer(piece)

    def ask(self, request: PageRequest) -> None:
        self._inner.ask(request)

    def cancel(self, attempt_id: str) -> None:
        self._inner.cancel(attempt_id)

    def num_in_flight(self, worker: str) -> int:
        return self._inner.num_in_flight(worker)

    def close(self) -> None:
        self._inner.close()
