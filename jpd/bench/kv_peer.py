"""Another process that takes KV in: the other end of the transfer benchmark between processes.

`KVPeer` starts it and moves pools into it; `python -m jpd.bench.kv_peer` is the process.
"""

import os
import queue
import secrets
import subprocess
import sys
import threading
from types import TracebackType

import jax

from jpd.bench.kv_pools import NUM_PIECES, Pool
from jpd.parallel.platform import ensure_cpu_devices
from jpd.rpc.security import Security
from jpd.transfer.inprocess import InProcessTransfer
from jpd.transfer.protocol import ArrivedPiece
from jpd.transfer.remote import RemoteTransfer
from jpd.transfer.transports import make_transport

ADDRESS, TIMEOUT_SECONDS = "127.0.0.1", 120.0
WORKER, DEVICE = "target", 4
NUM_DEVICES = 8


class KVPeer:
    """The other process and the way to it."""

    def __init__(self, transport: str) -> None:
        token = secrets.token_hex(16)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jpd.bench.kv_peer", transport, token],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._transfer = make_transfer(transport, token)
        self._transfer.set_peers({WORKER: self._hear()})
        target = Pool(DEVICE, 1)
        self._wire = target.wire_to(target)

    def __enter__(self) -> "KVPeer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(TIMEOUT_SECONDS)
        self._process.stdout.close()
        self._transfer.close()

    def move(self, pool: Pool) -> None:
        """All pages, until they stand in the other process's pool."""
        pool.offer_all(self._transfer.offer, WORKER, self._wire)
        assert self._hear() == "written"

    def _hear(self) -> str:
        """The next thing that it says; other lines are its libraries'."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("peer: "):
                return line.removeprefix("peer: ").strip()
        raise ConnectionError("the other process has ended")


def make_transfer(transport: str, token: str) -> RemoteTransfer:
    return RemoteTransfer(
        InProcessTransfer(TIMEOUT_SECONDS),
        make_transport(transport, ADDRESS),
        ADDRESS,
        Security(token),
        lease_seconds=TIMEOUT_SECONDS,
        pull_seconds=TIMEOUT_SECONDS,
    )


def main(transport: str, token: str) -> None:
    """Takes pools in until nobody is there any more."""
    ensure_cpu_devices(NUM_DEVICES)
    arrived: queue.SimpleQueue[ArrivedPiece] = queue.SimpleQueue()
    pool, transfer = Pool(DEVICE, 1), make_transfer(transport, token)
    transfer.register(WORKER, pool.mesh, arrived.put)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    print(f"peer: {transfer.address}", flush=True)
    while True:
        for _ in range(NUM_PIECES):
            pool.write(arrived.get())
        jax.block_until_ready(pool.cache.layers)
        print("peer: written", flush=True)


def _end_with_parent() -> None:
    """stdin ends when whoever started this process closes it or has ended."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:3])
