"""A process that is the destination of pieces: prints its address, then what has arrived.

    python -m tests.transfer.peer_process TRANSPORT TOKEN

Its workers are decode-1, decode-2 and decode-4, by their tensor size. Every piece is written into
the worker's pool and a line tells what stands there. It ends when its stdin does.
"""

import json
import sys
import threading

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from jpd.rpc.security import Security  # noqa: E402
from jpd.transfer.checked import CheckedTransfer  # noqa: E402
from jpd.transfer.inprocess import InProcessTransfer  # noqa: E402
from jpd.transfer.protocol import ArrivedPiece, KVTransfer  # noqa: E402
from jpd.transfer.remote import RemoteTransfer  # noqa: E402
from jpd.transfer.transports import JaxTransport, StagedTransport, Transport  # noqa: E402
from tests.transfer import kv_pools  # noqa: E402

LEASE_SECONDS, PULL_SECONDS = 0.6, 20.0
HEADS, PAGE_SIZE = 4, 4
_printing = threading.Lock()


def make_transport(name: str) -> Transport:
    if name == "host_staged":
        return StagedTransport()
    return JaxTransport(jax.devices()[0], "127.0.0.1:0")


def make_transfer(name: str, token: str) -> RemoteTransfer:
    return RemoteTransfer(
        InProcessTransfer(20.0),
        make_transport(name),
        "127.0.0.1",
        Security(token),
        lease_seconds=LEASE_SECONDS,
        pull_seconds=PULL_SECONDS,
    )


def say(**words: object) -> None:
    with _printing:
        print("peer:", json.dumps(words), flush=True)


def target_of(tensor: int) -> kv_pools.Side:
    return kv_pools.make_side(0, tensor, HEADS, page_size=PAGE_SIZE)


def take(side: kv_pools.Side, worker: str, piece: ArrivedPiece) -> None:
    words = {"worker": worker, "attempt": piece.attempt_id, "start": piece.page_start}
    if piece.error is not None:
        say(**words, error=str(piece.error))
        return
    pages = list(range(1 + piece.page_start, 1 + piece.page_start + piece.num_pages))
    side.moves.scatter(side.cache, piece.arrays, pages)
    values = [np.asarray(layer)[pages].tolist() for layer in side.cache.layers]
    say(**words, values=values, num_bytes=piece.num_bytes)


def main() -> None:
    remote = make_transfer(*sys.argv[1:3])
    checked: KVTransfer = CheckedTransfer(remote) if "checked" in sys.argv else remote
    for tensor in (1, 2, 4):
        side, worker = target_of(tensor), f"decode-{tensor}"
        checked.register(worker, side.mesh, lambda piece, s=side, w=worker: take(s, w, piece))
    say(address=remote.address)
    for line in sys.stdin:
        if line.startswith("cancel "):
            remote.cancel(line.split()[1])
            say(cancelled=line.split()[1])
    remote.close()
    say(closed=True)


if __name__ == "__main__":
    main()
