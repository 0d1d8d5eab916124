"""The process of one host: its workers, their service, and nothing else.

1. Orders come as one line on stdin, which stays open for as long as whoever gave them lives.
2. Weights, KV pools and executables, as in the embedded launcher.
3. The worker service opens; a line on stdout says where. SIGTERM ends it; SIGINT is not for it.
Started by `jpd.launch.subprocess_hosts`; a Ray actor runs the same `Host`.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable

from jpd.checkpoint.model_source import open_model
from jpd.checkpoint.progress import Progress
from jpd.launch.fleet import Fleet
from jpd.launch.inprocess import launch_workers
from jpd.launch.orders import EVENT_MARK, HostEvent, HostOrders, read_security
from jpd.launch.pinning import pin_process
from jpd.log_lines import start_logging
from jpd.rpc.failures import dump_error
from jpd.rpc.records import dump, load
from jpd.rpc.security import Security, with_port
from jpd.transfer.protocol import KVTransfer
from jpd.transfer.remote import RemoteTransfer
from jpd.transfer.transports import make_transport
from jpd.worker.fingerprint import fingerprint_of
from jpd.worker.host_server import HostServer
from jpd.worker.service import HostParts, Peers, WorkerService

GRACE_SECONDS = 0.5
"""For answers under way when the host is told to end."""

logger = logging.getLogger(__name__)


class Host:
    """The workers of one host, behind their service. `start` and `stop` once each."""

    def __init__(self, orders: HostOrders, tell: Callable[[HostEvent], None]) -> None:
        self._orders, self._tell = orders, tell
        self._fleet: Fleet | None = None
        self._between: RemoteTransfer | None = None
        self._server: HostServer | None = None

    async def start(self, address: str) -> None:
        """Load, compile, open the service on `address`; tells that it is ready. Raises ConfigError,
        OSError.
        """
        orders = self._orders
        security = read_security(orders.deployment.security, orders.deployment.file, orders.token)
        self._fleet = await asyncio.to_thread(self._launch, security)
        model = open_model(orders.model, weights=orders.weights, need_weights=False)
        parts = HostParts(
            name=orders.host,
            clients={client.name: client for client in self._fleet.clients},
            fingerprint=fingerprint_of(model.config, orders.deployment),
            set_peers=self._set_peers,
            logits=self._fleet.logits,
            num_kv_kept=lambda: self._between.num_kept if self._between is not None else 0,
        )
        self._server = HostServer(WorkerService(parts), security)
        port = await self._server.start(address)
        kv_address = self._between.address if self._between is not None else ""
        self._tell(HostEvent("ready", address=with_port(address, port), kv_address=kv_address))

    def _launch(self, security: Security) -> Fleet:
        orders = self._orders
        pin_process(orders.config.cores, orders.deployment.file, orders.host)
        return launch_workers(
            open_model(orders.model, weights=orders.weights),
            orders.deployment,
            host=orders.config,
            transfer_wrapper=lambda inner: self._connect(inner, security),
            progress=self._tell_progress,
            can_prefill_locally=orders.can_prefill_locally,
        )

    def _connect(self, local: KVTransfer, security: Security) -> KVTransfer:
        """KV also goes to, and comes from, the workers of other hosts."""
        deployment, address = self._orders.deployment, self._orders.config.address
        timeout_seconds = deployment.router.transfer_timeout_seconds
        self._between = RemoteTransfer(
            local,
            make_transport(deployment.cache.transport, address),
            address,
            security,
            lease_seconds=timeout_seconds,
            pull_seconds=timeout_seconds,
        )
        return self._between

    def _set_peers(self, peers: Peers) -> None:
        if self._between is not None:
            self._between.set_peers({peer.worker: peer.kv_address for peer in peers.peers})
        for peer in peers.peers:
            if peer.like and self._fleet is not None:
                self._fleet.learn_destination(peer.worker, peer.like)

    def _tell_progress(self, progress: Progress) -> None:
        self._tell(
            HostEvent(
                "loading",
                done_bytes=progress.done_bytes,
                total_bytes=progress.total_bytes,
                elapsed_seconds=progress.elapsed_seconds,
            )
        )

    async def stop(self) -> None:
        """Close the service and free the devices."""
        if self._server is not None:
            await self._server.stop(GRACE_SECONDS)
        if self._fleet is not None:
            await asyncio.to_thread(self._fleet.close)


def main() -> int:
    """The life of a host process; its exit status."""
    start_logging()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for who started us
    orders = load(b64decode(sys.stdin.buffer.readline()), HostOrders)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        asyncio.run(_serve(orders))
    except Exception as error:
        logger.debug("host %s cannot start", orders.host, exc_info=True)
        _tell(HostEvent("failed", error=dump_error(error, orders.host)))
        return 1
    return 0


async def _serve(orders: HostOrders) -> None:
    told_to_end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_end.set)
    host = Host(orders, _tell)
    starting = asyncio.create_task(host.start(orders.config.address))
    ending = asyncio.create_task(told_to_end.wait())
    await asyncio.wait((starting, ending), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        os._exit(128 + signal.SIGTERM)  # a compilation cannot be broken off otherwise
    try:
        await starting
        await ending
    finally:
        ending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await host.stop()


def _tell(event: HostEvent) -> None:
    sys.stdout.write(f"{EVENT_MARK}{b64encode(dump(event)).decode()}\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    """stdin ends when whoever started this process has ended, however that came."""
    while os.read(sys.stdin.fileno(), 1 << 16):  # not the buffered one: its lock outlives us
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
