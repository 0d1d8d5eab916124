"""Keeps the hosts of a deployment running: started, awaited, restarted, and known to one another.

1. `start` starts every host and returns when all are ready, or raises what stopped one.
2. Whenever a host becomes ready, every host hears where the others are; then the router may.
3. A host that ends by itself is started again, after a pause that grows with each time.
One thread does all of it; launchers tell it by events. Knows no router.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import grpc

from jpd.checkpoint.progress import Progress, ProgressCallback
from jpd.config import LaunchConfig
from jpd.errors import JpdError, WorkerLostError
from jpd.launch.growth import like
from jpd.launch.orders import HostEvent, HostHandle, HostLauncher, HostOrders
from jpd.rpc import worker_pb2 as pb
from jpd.rpc.failures import load_error
from jpd.rpc.records import dump
from jpd.rpc.security import Security, open_blocking_channel
from jpd.rpc.worker_pb2_grpc import WorkerHostStub
from jpd.worker.service import Peer, Peers

FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
FORGIVEN_SECONDS = 60.0
"""Of service, from ready on: earlier ends do not count any more. Starting is no service, however
long it takes."""
PEER_SECONDS = 2.0
STOP_SECONDS = 10.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class HostPlace:
    """One host as its supervisor knows it; `address` and `reason` are read by connections."""

    orders: HostOrders
    address: str | None = None
    reason: str = "not started yet"
    kv_address: str = ""
    handle: HostHandle | None = None
    num_restarts: int = 0
    ready_time: float | None = None  # None: not ready since its last start
    restart_time: float | None = None
    knows_peers: bool = True  # as they are now
    is_unwanted: bool = False
    settled: threading.Event = field(default_factory=threading.Event)  # first ready, or failed
    error: JpdError | None = None

    @property
    def name(self) -> str:
        return self.orders.host


class HostSupervisor:
    """Runs from `start` to `close`."""

    def __init__(
        self,
        launcher: HostLauncher,
        launch: LaunchConfig,
        security: Security,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._launcher, self._launch, self._security = launcher, launch, security
        self._progress = progress
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._places: dict[str, HostPlace] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)

    @property
    def places(self) -> Mapping[str, HostPlace]:
        return self._places

    def start(self, orders: list[HostOrders]) -> None:
        """Start these hosts and wait until all are ready. Raises what kept one from it."""
        self._thread.start()
        try:
            self.add(orders)
        except BaseException:  # an interrupt too
            self.close()
            raise

    def add(self, orders: list[HostOrders]) -> None:
        """Start more hosts; returns when they are ready. Raises what kept one from it."""
        places = [HostPlace(order) for order in orders]
        for place in places:
            self._events.put(partial(self._begin, place))
        try:
            self._await_ready(places)
        except BaseException:
            for place in places:
                self._forget(place)
            raise

    def _await_ready(self, places: list[HostPlace]) -> None:
        """Raises as soon as one of them fails, however long the others would still take."""
        seconds = self._launch.start_timeout_seconds
        deadline = time.monotonic() + seconds
        while waiting := [place for place in places if not place.settled.is_set()]:
            for error in (place.error for place in places if place.settled.is_set()):
                if error is not None:
                    raise error
            if time.monotonic() > deadline:
                raise WorkerLostError(waiting[0].name, f"not ready after {seconds:g} s")
            waiting[0].settled.wait(0.1)  # a wait without end hears no signals
        for place in places:
            if place.error is not None:
                raise place.error

    def remove(self, host: str) -> None:
        """End a host for good. Blocks until it has ended."""
        self._forget(self._places[host])

    def _forget(self, place: HostPlace) -> None:
        self._places.pop(place.name, None)
        place.is_unwanted = True
        place.address, place.reason = None, "it was removed"
        self._end([place])

    def close(self) -> None:
        """End all hosts. Blocks until they have ended; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._events.put(lambda: None)
        self._thread.join()
        places = list(self._places.values())
        for place in places:
            place.is_unwanted = True
            place.address, place.reason = None, "the server is closed"
        try:
            self._end(places)
        finally:
            self._launcher.close()

    def _end(self, places: list[HostPlace]) -> None:
        """First by asking, then by force: nothing is left behind."""
        handles = [place.handle for place in places if place.handle is not None]
        try:
            for handle in handles:
                handle.stop()
            deadline = time.monotonic() + STOP_SECONDS
            for handle in handles:
                handle.wait(max(0.0, deadline - time.monotonic()))
        finally:  # also when a second Ctrl-C comes while this waits
            for handle in handles:
                handle.kill()

    # The supervisor's thread.

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self._events.get(timeout=self._idle_seconds())()
            except queue.Empty:
                pass
            except Exception:
                logger.exception("hosts: their supervisor goes on")
            self._restart_due()
            self._tell_peers()

    def _idle_seconds(self) -> float:
        now = time.monotonic()
        places = list(self._places.values())
        times = [place.restart_time for place in places if place.restart_time is not None]
        return min(1.0, max(0.0, min(times, default=now + 1.0) - now))

    def _begin(self, place: HostPlace) -> None:
        if place.is_unwanted:
            return
        self._places[place.name] = place
        self._start(place)

    def _start(self, place: HostPlace) -> None:
        place.restart_time = place.ready_time = None
        place.reason = "it is starting"
        if place.handle is not None:
            place.handle.kill()  # it has ended; what it had open is closed

        def note(event: HostEvent) -> None:
            self._events.put(partial(self._take, place, event))

        place.handle = self._launcher.start(place.orders, note)

    def _take(self, place: HostPlace, event: HostEvent) -> None:
        match event.kind:
            case "loading":
                self._tell_progress(place, event)
            case "ready":
                self._note_ready(place, event)
            case "failed":
                place.error = load_error(event.error, place.name)
            case "ended":
                self._note_end(place, event.reason)

    def _tell_progress(self, place: HostPlace, event: HostEvent) -> None:
        if self._progress is not None:
            phase, elapsed = f"{place.name}: loading", event.elapsed_seconds
            self._progress(Progress(phase, event.done_bytes, event.total_bytes, elapsed, ""))

    def _note_ready(self, place: HostPlace, event: HostEvent) -> None:
        logger.info("host %s is ready at %s", place.name, event.address)
        place.kv_address = event.kv_address
        for other in list(self._places.values()):
            other.knows_peers = False
        place.knows_peers = self._tell(place, event.address)
        self._tell_peers()
        place.ready_time = time.monotonic()
        place.address = event.address  # from now on the router finds it
        place.settled.set()

    def _note_end(self, place: HostPlace, reason: str) -> None:
        was_ready, place.address, place.kv_address = place.settled.is_set(), None, ""
        place.reason = reason
        if place.is_unwanted or self._is_closed:
            return
        if not was_ready:
            place.error = place.error or WorkerLostError(place.name, reason)
            place.settled.set()
            return
        logger.error("host %s: %s", place.name, reason)
        now = time.monotonic()
        if place.ready_time is not None and now - place.ready_time > FORGIVEN_SECONDS:
            place.num_restarts = 0
        if place.num_restarts >= self._launch.max_restarts:
            place.reason = f"{reason}; given up after {place.num_restarts} restarts"
            return
        pause_seconds = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0**place.num_restarts)
        place.num_restarts += 1
        place.restart_time = now + pause_seconds
        place.reason = f"{reason}; it is started again"

    def _restart_due(self) -> None:
        now = time.monotonic()
        for place in list(self._places.values()):
            if place.restart_time is not None and place.restart_time <= now:
                self._start(place)

    def _tell_peers(self) -> None:
        """Every host that is up hears where KV for the workers of the others goes."""
        for place in list(self._places.values()):
            if not place.knows_peers and place.address is not None:
                place.knows_peers = self._tell(place, place.address)

    def _tell(self, place: HostPlace, address: str) -> bool:
        known = place.orders.deployment.workers
        names = {worker.name for worker in known}
        peers = tuple(
            Peer(worker.name, other.kv_address, "" if worker.name in names else like(worker, known))
            for other in list(self._places.values())
            if other is not place and other.kv_address
            for worker in other.orders.deployment.workers_of(other.name)
        )
        request = pb.SetPeersRequest(peers_record=dump(Peers(peers)))
        try:
            with open_blocking_channel(address, self._security) as channel:
                stub = WorkerHostStub(channel)
                metadata = self._security.metadata
                answer = stub.SetPeers(request, timeout=PEER_SECONDS, metadata=metadata)
            return not answer.error
        except grpc.RpcError as error:
            logger.warning("host %s was not told its peers: %s", place.name, error.code())
            return False
