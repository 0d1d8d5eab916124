"""The router: takes requests, gives each a journey of its own, and answers for the whole.

    router = Router(clients, config, slos, metrics, max_model_len=..., page_size=...)
    await router.start()
    async for output in router.generate(request): ...

Knows no text, no transport and no devices. Everything runs on one event loop. Called by the
frontends and the API.
"""

import asyncio
import itertools
import random
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

from jpd.config import RouterConfig, SloConfig
from jpd.errors import RequestError, WorkerError
from jpd.metrics import Metrics
from jpd.request import MAX_TOKENS, Request
from jpd.router.activity import Activity, running_traces, worker_activity
from jpd.router.admission import WaitingRoom
from jpd.router.fleet import Fleet
from jpd.router.health import POLL_SECONDS, STUCK_SECONDS, Health, HealthMonitor, judge
from jpd.router.journey import Journey
from jpd.router.parts import RouterParts
from jpd.router.placement import Placement
from jpd.router.policy import WorkerView
from jpd.router.rates import RateSeed
from jpd.router.record import RequestRecord, ResolvedRequest
from jpd.router.releases import Releases
from jpd.router.resolve import Limits, resolve
from jpd.router.roster import Roster
from jpd.router.sessions import SessionTable
from jpd.router.stream import Delivery, Mailbox, TokenStream
from jpd.router.trace import TraceLog
from jpd.worker.protocol import WorkerClient

SEED_BITS = 63


class Router:
    """One router over one fleet. Not thread-safe: use it on the loop that ran `start`."""

    def __init__(
        self,
        clients: Iterable[WorkerClient],
        config: RouterConfig,
        slos: Sequence[SloConfig],
        metrics: Metrics,
        *,
        max_model_len: int,
        page_size: int,
        reserve_tokens: int = MAX_TOKENS,
        vocab_size: int | None = None,
        short_context: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        poll_seconds: float = POLL_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
        seeds: Mapping[str, RateSeed] | None = None,
        trace: TraceLog | None = None,
    ) -> None:
        waiting_room = WaitingRoom(config.max_waiting, clock, metrics.requests_waiting.set)
        fleet = Fleet(
            clients, metrics, clock, waiting_room.room_freed, config.prefix_index_pages, seeds
        )
        self.trace = TraceLog() if trace is None else trace
        self._parts = RouterParts(
            config=config,
            page_size=page_size,
            reserve_tokens=reserve_tokens,
            fleet=fleet,
            placement=Placement(fleet, config, page_size),
            waiting_room=waiting_room,
            sessions=SessionTable(config.session_ttl_seconds, clock),
            releases=Releases(fleet),
            metrics=metrics,
            trace=self.trace,
            clock=clock,
        )
        self._monitor = HealthMonitor(
            fleet, clock, poll_seconds=poll_seconds, stuck_seconds=stuck_seconds
        )
        self.roster = Roster(fleet, self._monitor)
        self._limits = Limits(max_model_len, page_size, vocab_size, short_context)
        self._slos = {slo.name: slo for slo in slos}
        self._random = random.SystemRandom()
        self._sequence = itertools.count()
        self._router_id = uuid.uuid4().hex[:8]
        self._journeys: dict[asyncio.Task[None], Journey] = {}
        self._is_draining = False

    async def start(self) -> None:
        """Hear from every worker once, then watch them. Requests are served from now on."""
        await self._monitor.start()

    def generate(self, request: Request) -> TokenStream:
        """The request's tokens as they come; closing the stream cancels everywhere.

        Raises RequestError at once for what can never be served, WorkerError when draining. The
        request takes its place in the queue with the first read.
        """
        if self._is_draining:
            raise WorkerError("router", "the server is shutting down")
        try:
            resolved = resolve(
                request,
                self._limits,
                self._parts.fleet.snapshot(),
                self._slos,
                lambda: self._random.getrandbits(SEED_BITS),
            )
        except RequestError:
            self._parts.metrics.count_refusal()
            raise
        return TokenStream(lambda: self._begin(resolved))

    def health(self) -> Health:
        """The verdict of this moment."""
        limit = self._parts.config.local_prefill_tokens
        return judge(self._parts.fleet, limit, self._is_draining)

    def activity(self, since: float) -> Activity:
        """What goes on, and what ended after `since`, a time of this router's clock."""
        now, parts = self._parts.clock(), self._parts
        return Activity(
            now=now,
            is_draining=self._is_draining,
            num_waiting=parts.waiting_room.num_waiting,
            workers=tuple(worker_activity(entry) for entry in parts.fleet.entries),
            running=running_traces((journey.record for journey in self._journeys.values()), now),
            ended=self.trace.ended_after(since),
        )

    @property
    def num_requests(self) -> int:
        """Requests between their first read and their terminal event."""
        return len(self._journeys)

    @property
    def num_releases(self) -> int:
        """Cancels told to workers and not yet acknowledged."""
        return len(self._parts.releases)

    def fleet_views(self) -> tuple[WorkerView, ...]:
        """One look at every worker, with what was given to it."""
        return self._parts.fleet.snapshot()

    @property
    def context_tokens(self) -> int:
        """Prompt and output of the longest sequence that can be served."""
        return self._limits.context(self._parts.fleet.snapshot())

    async def drain(self) -> None:
        """Take no new requests; return when the running ones have ended and workers are empty."""
        self._is_draining = True
        while self._journeys:
            await asyncio.wait(tuple(self._journeys))
        await self._parts.releases.settle()
        clients = [entry.client for entry in self._parts.fleet.entries if not entry.watch.is_down]
        await asyncio.gather(*(client.drain() for client in clients), return_exceptions=True)

    async def close(self) -> None:
        """Cancel what still runs, everywhere, and stop watching. Idempotent."""
        self._is_draining = True
        for task in tuple(self._journeys):
            task.cancel()
        while self._journeys:
            await asyncio.wait(tuple(self._journeys))
        await self._parts.releases.settle()
        await self._monitor.close()

    async def settle(self) -> None:
        """Wait until workers have acknowledged every cancel sent so far."""
        await self._parts.releases.settle()

    def check_integrity(self) -> None:
        """Every count against a recount of what live requests hold. Raises AssertionError."""
        views = self._parts.fleet.snapshot()
        recounted = {view.name: [0, 0, 0, 0] for view in views}
        for held in filter(None, (journey.holding for journey in self._journeys.values())):
            if held.decode_worker:
                work = recounted[held.decode_worker]
                work[0] += 1
                work[1] += held.row.num_pages
            if held.num_prefill_tokens:
                work = recounted[held.prefill_worker]
                work[2] += 1
                work[3] += held.num_prefill_tokens
        for view in views:
            counted = [
                view.num_rows,
                view.num_reserved_pages,
                view.num_prefills,
                view.num_prefill_tokens,
            ]
            there = recounted[view.name]
            assert counted == there, f"{view.name}: counted {counted}, there are {there}"
        self._parts.waiting_room.check_integrity()
        if not self._journeys:
            assert self._parts.waiting_room.is_idle(), "nobody is there, yet somebody waits"

    def _begin(self, resolved: ResolvedRequest) -> Delivery:
        """Start the journey of a request; called with the first read of its stream."""
        number = next(self._sequence)
        record = RequestRecord(
            resolved=resolved,
            internal_id=f"{self._router_id}-{number}",
            sequence=number,
            phase_started=resolved.request.arrival_time,
        )
        mailbox = Mailbox()
        journey = Journey(self._parts, record, mailbox)
        task = asyncio.get_running_loop().create_task(journey.run(), name=record.internal_id)
        self._journeys[task] = journey
        task.add_done_callback(self._forget)
        return Delivery(task, mailbox, record.timeline, journey.stop)

    def _forget(self, task: asyncio.Task[None]) -> None:
        journey = self._journeys.pop(task)
        journey.end_cancelled()  # nothing to do, unless it was cancelled before its first step
