"""A transfer that trusts nobody: every piece that arrives is compared with the checksum it brought.

Wraps any KVTransfer, as the outermost: what was altered anywhere after the source's gather becomes
the piece's TransferError, before anything is written into a pool. Compares on the transfer's own
thread and waits for it there.
"""

import dataclasses
import logging

import numpy as np
from jax.sharding import Mesh

from jpd.errors import TransferError
from jpd.transfer.checksum import parts_agree, summed
from jpd.transfer.protocol import ArrivedPiece, Deliver, Serve
from jpd.transfer.wrapper import TransferWrapper

logger = logging.getLogger(__name__)


class CheckedTransfer(TransferWrapper):
    """KVTransfer over wires with a checksum."""

    def register(
        self, worker: str, mesh: Mesh, deliver: Deliver, serve: Serve | None = None
    ) -> None:
        super().register(worker, mesh, lambda piece: deliver(checked(piece, worker)), serve)


def checked(piece: ArrivedPiece, worker: str) -> ArrivedPiece:
    """The piece without its checksum, or the error that it does not agree. Blocks."""
    if not piece.arrays:  # an error, or the word that there are no pages
        return piece
    runs = summed(piece.arrays)
    found = [parts_agree(arrays, sums) for arrays, sums in runs]
    shards = (shard for agree in found for shard in agree.addressable_shards)
    if all(np.asarray(shard.data).all() for shard in shards):
        return dataclasses.replace(piece, arrays=tuple(a for arrays, _ in runs for a in arrays))
    logger.error("transfer to %s: %s were altered on their way", worker, piece.where)
    error = TransferError(worker, f"{piece.where}: checksum differs, altered on their way")
    return dataclasses.replace(piece, arrays=(), num_bytes=0, error=error)
