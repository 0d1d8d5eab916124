"""How long the router takes to decide, without any device.

A decision is one look at the fleet, the ranking of decode workers, the path, the prefill worker and
the bookkeeping of the work given. Workers here exist on paper only. Called by `jpd bench router`.
"""

import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence

from jpd.bench.results import Result
from jpd.cache.prefix_log import PrefixChanges
from jpd.metrics import Metrics
from jpd.router.fleet import Fleet
from jpd.router.policy import Row, Wishes, choose_path, choose_prefill, rank_decoders
from jpd.worker.protocol import (
    Attempt,
    DecodeEvent,
    PrefillResult,
    Reservation,
    Role,
    WorkerStatus,
)

PROMPT_PAGES = 64
PAGE_SIZE = 32
ROW = Row(PROMPT_PAGES + 1)
SLOTS = 64
POOL_PAGES = 8192
FLEET_SIZES = (2, 16, 128, 1024)
TARGET_FLEET = 16
P50_TARGET_MICROSECONDS = 200.0
P99_TARGET_MICROSECONDS = 1000.0
RATE_TARGET = 2000.0
NUM_IN_FLIGHT_PER_WORKER = 8


class PaperWorker:
    """A WorkerClient that says it is well and is never asked for anything else."""

    def __init__(self, name: str, role: Role) -> None:
        self.name, self._role = name, role

    @property
    def role(self) -> Role:
        return self._role

    async def status(self) -> WorkerStatus:
        return self.look()

    def look(self) -> WorkerStatus:
        return WorkerStatus(
            name=self.name,
            role=self._role,
            healthy=True,
            reason="",
            draining=False,
            num_slots=0 if self._role == "prefill" else SLOTS,
            num_slots_used=0,
            num_pages=POOL_PAGES,
            num_pages_used=0,
            num_pages_cached=0,
            num_prefills_waiting=0,
            num_prefill_tokens_waiting=0,
            num_transfers_in_flight=0,
            num_compilations_after_ready=0,
            last_step_time=0.0,
        )

    async def prefix_changes(self, incarnation: str, sequence: int) -> PrefixChanges:
        raise NotImplementedError

    async def reserve(self, attempt: Attempt) -> Reservation | None:
        raise NotImplementedError

    async def prefill(self, attempt: Attempt, reservation: Reservation) -> PrefillResult:
        raise NotImplementedError

    def decode(self, attempt_id: str, first_token_id: int) -> AsyncIterator[DecodeEvent]:
        raise NotImplementedError

    async def cancel(self, attempt_id: str) -> None:
        raise NotImplementedError

    async def drain(self) -> None:
        raise NotImplementedError

    async def set_role(self, role: Role) -> None:
        raise NotImplementedError

    def on_room(self, callback: Callable[[], None]) -> None:
        """Room is never freed here."""


def run(num_decisions: int = 5000) -> list[Result]:
    """Decision times for fleets of several sizes; targets for the one of 16 workers."""
    results = []
    for num_workers in FLEET_SIZES:
        count = max(200, num_decisions * TARGET_FLEET // max(num_workers, TARGET_FLEET))
        results += _results(num_workers, measure(num_workers, count))
    return results


def measure(num_workers: int, num_decisions: int) -> list[float]:
    """Seconds of each of `num_decisions` decisions, under a steady load."""
    fleet = _make_fleet(num_workers)
    given: list[tuple[str, str]] = []
    seconds = []
    for number in range(num_decisions):
        start = time.perf_counter()
        given.append(_decide(fleet, number))
        seconds.append(time.perf_counter() - start)
        if len(given) > num_workers * NUM_IN_FLIGHT_PER_WORKER:
            prefill, decode = given.pop(0)
            fleet.give_prefill(prefill, PROMPT_PAGES * PAGE_SIZE)
            fleet.give_row(decode, ROW)
    return seconds


def _make_fleet(num_workers: int) -> Fleet:
    roles = itertools.islice(itertools.cycle(("prefill", "decode")), num_workers)
    workers = [PaperWorker(f"worker-{n}", _role(role)) for n, role in enumerate(roles)]
    fleet = Fleet(workers, Metrics(), time.monotonic, lambda: None)
    for worker in workers:
        fleet.note_status(worker.look())
        fleet.set_up(worker.name)
    return fleet


def _role(name: str) -> Role:
    return "prefill" if name == "prefill" else "decode"


def _decide(fleet: Fleet, number: int) -> tuple[str, str]:
    """One placement; every other request belongs to a session."""
    snapshot = fleet.snapshot()
    sticky = snapshot[number % len(snapshot)].name if number % 2 else None
    wishes = Wishes(ROW, ROW.num_pages, sticky_decode=sticky, sticky_prefill=sticky)
    decoder = rank_decoders(snapshot, wishes)[0]
    fleet.take_row(decoder.name, wishes.row)
    num_tokens = PROMPT_PAGES * PAGE_SIZE
    path = choose_path(decoder, num_tokens, 128, None)
    prefill = choose_prefill(fleet.snapshot(), decoder.name, wishes)
    worker = decoder if path == "local" or prefill is None else prefill
    fleet.take_prefill(worker.name, num_tokens)
    return worker.name, decoder.name


def _results(num_workers: int, seconds: Sequence[float]) -> list[Result]:
    ordered = sorted(seconds)
    p50 = ordered[len(ordered) // 2] * 1e6
    p99 = ordered[len(ordered) * 99 // 100] * 1e6
    rate = len(ordered) / sum(ordered)
    if num_workers != TARGET_FLEET:
        return [
            Result(f"decision p50, {num_workers} workers", p50, "us"),
            Result(f"decision p99, {num_workers} workers", p99, "us"),
        ]
    return [
        Result(f"decision p50, {num_workers} workers", p50, "us", P50_TARGET_MICROSECONDS),
        Result(f"decision p99, {num_workers} workers", p99, "us", P99_TARGET_MICROSECONDS),
        Result(f"decisions, {num_workers} workers", rate, "1/s", RATE_TARGET, at_most=False),
    ]
