"""How long the router takes to decide, by pages of the prompt, workers and size of the index.

A decision is all that serving does of it: hash the prompt, look up who holds it, rank decode
workers, take a row, choose path and prefill worker, count the work. Workers exist on paper only.
Called by `jpd.bench.router`.
"""

import itertools
import random
import time
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Callable, Sequence

from jpd.bench.results import Result
from jpd.cache.page_hashes import PageHashes, page_hashes
from jpd.cache.prefix_log import PrefixChanges
from jpd.config import RouterConfig
from jpd.metrics import Metrics
from jpd.router.fleet import Fleet
from jpd.router.placement import Placement
from jpd.router.policy import Row, Wishes
from jpd.router.prefix_index import PrefixIndex
from jpd.worker.protocol import (
    Attempt,
    DecodeEvent,
    PrefillResult,
    Reservation,
    Role,
    WorkerStatus,
)

PROMPT_PAGES, NUM_WORKERS, INDEX_PAGES = 64, 16, 100_000
PAGE_SIZE = 32
OUTPUT_TOKENS = 128
SLOTS, POOL_PAGES = 64, 1 << 20
NUM_IN_FLIGHT_PER_WORKER = 8
GROWTH_PAGES = (1, 16, 256, 4096)
GROWTH_WORKERS = (2, 128, 1024)
P50_TARGET_MICROSECONDS = 200.0
P99_TARGET_MICROSECONDS = 1000.0
RATE_TARGET = 2000.0


class PaperWorker:
    """A WorkerClient that says it is well and is never asked for anything else."""

    def __init__(self, name: str, role: Role, slots: int = SLOTS, pages: int = POOL_PAGES) -> None:
        self.name, self._role = name, role
        self._slots, self._pages = 0 if role == "prefill" else slots, pages

    @property
    def role(self) -> Role:
        return self._role

    async def status(self) -> WorkerStatus:
        return self.look()

    def look(self) -> WorkerStatus:
        return WorkerStatus.at_rest(
            self.name,
            self._role,
            num_slots=self._slots,
            num_pages=self._pages,
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


def make_fleet(
    workers: Sequence[PaperWorker], clock: Callable[[], float], max_index_pages: int
) -> Fleet:
    """A fleet whose workers are all up."""
    fleet = Fleet(workers, Metrics(), clock, lambda: None, max_index_pages)
    for worker in workers:
        fleet.note_status(worker.look())
        fleet.set_up(worker.name)
    return fleet


class DecisionRig:
    """A fleet under a steady load, half of whose prompts begin like one that was seen before."""

    def __init__(self, num_workers: int, num_pages: int, index_pages: int) -> None:
        roles: itertools.cycle[Role] = itertools.cycle(("prefill", "decode"))
        workers = [PaperWorker(f"worker-{n}", next(roles)) for n in range(num_workers)]
        self.fleet = make_fleet(workers, time.monotonic, 4 * index_pages + 1000 * num_workers)
        self.placement = Placement(self.fleet, RouterConfig(local_prefill_tokens=128), PAGE_SIZE)
        self._random, self._num_pages = random.Random(0), num_pages
        self._row = Row(num_pages + 1, grows=True)
        self._given: list[tuple[str, int, str]] = []
        self._seen = [self._prompt() for _ in range(4)]
        fill_index(self.fleet.prefixes, [worker.name for worker in workers], index_pages)
        for worker, prompt in zip(workers, itertools.cycle(self._seen), strict=False):
            held = page_hashes(prompt, PAGE_SIZE)[: self._random.randrange(num_pages + 1)]
            self.fleet.prefixes.expect(worker.name, held)

    def measure(self, num_decisions: int) -> list[float]:
        """Seconds of each decision on its core: what else the machine does is left out."""
        seconds = []
        for number in range(num_decisions):
            prompt = self._seen[number // 2 % 4] if number % 2 else self._prompt()
            start = time.thread_time()
            self._given.append(self._decide(number, prompt))
            seconds.append(time.thread_time() - start)
            if len(self._given) > len(self.fleet.entries) * NUM_IN_FLIGHT_PER_WORKER:
                prefill, num_tokens, decode = self._given.pop(0)
                self.fleet.give_prefill(prefill, num_tokens)
                self.fleet.give_row(decode, self._row)
        return seconds

    def _prompt(self) -> tuple[int, ...]:
        return tuple(array("H", self._random.randbytes(2 * self._num_pages * PAGE_SIZE)))

    def _decide(self, number: int, prompt: Sequence[int]) -> tuple[str, int, str]:
        placement, fleet = self.placement, self.fleet
        hashes = PageHashes(prompt, PAGE_SIZE)
        placement.note_prompt(len(prompt))
        wishes = Wishes(
            self._row, num_sequence_pages=self._num_pages + 4, num_tokens=len(prompt), draw=number
        )
        wishes = placement.complete(wishes, hashes, OUTPUT_TOKENS)
        decoder = placement.rank_decoders(wishes)[0].name
        fleet.take_row(decoder, self._row)
        choice = placement.choose(decoder, wishes.cached_tokens.get(decoder, 0), wishes)
        assert choice is not None, "a prefill worker is always there"
        fleet.take_prefill(choice.prefill.name, choice.num_uncached_tokens)
        return choice.prefill.name, choice.num_uncached_tokens, decoder


def fill_index(index: PrefixIndex, workers: Sequence[str], num_pages: int) -> None:
    """Let the workers tell of so many pages, all together, of prompts that nobody asks for."""
    draw = random.Random(1)
    for worker in workers:
        hashes = tuple(draw.getrandbits(64) for _ in range(num_pages // len(workers)))
        index.apply(worker, PrefixChanges("paper", len(hashes), True, hashes))


def bytes_per_page(num_pages: int) -> float:
    """Memory of the index for each page, by the interpreter's own count."""
    tracemalloc.start()
    index = PrefixIndex([f"worker-{n}" for n in range(NUM_WORKERS)], 4 * num_pages)
    before = tracemalloc.get_traced_memory()[0]
    fill_index(index, [f"worker-{n}" for n in range(NUM_WORKERS)], num_pages)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / len(index)


def results(index_sizes: Sequence[int], num_decisions: int) -> list[Result]:
    """The promised case with its targets, then how it grows."""
    rig = DecisionRig(NUM_WORKERS, PROMPT_PAGES, INDEX_PAGES)
    rig.measure(num_decisions // 10)
    seconds = sorted(rig.measure(num_decisions))
    what = f"{PROMPT_PAGES} pages, {NUM_WORKERS} workers"
    rate = len(seconds) / sum(seconds)
    found = [
        Result(f"decision p50, {what}", _percentile(seconds, 50), "us", P50_TARGET_MICROSECONDS),
        Result(f"decision p99, {what}", _percentile(seconds, 99), "us", P99_TARGET_MICROSECONDS),
        Result(f"decisions, {what}", rate, "1/s", RATE_TARGET, at_most=False),
    ]
    cases = [(f"{n} pages", (NUM_WORKERS, n, INDEX_PAGES)) for n in GROWTH_PAGES]
    cases += [(f"{n} workers", (n, PROMPT_PAGES, INDEX_PAGES)) for n in GROWTH_WORKERS]
    cases += [(f"index of {n:,}", (NUM_WORKERS, PROMPT_PAGES, n)) for n in index_sizes]
    for name, (num_workers, num_pages, index_pages) in cases:
        count = max(20, num_decisions * 64 // max(64, num_workers * 4, num_pages))
        seconds = sorted(DecisionRig(num_workers, num_pages, index_pages).measure(count))
        found.append(Result(f"decision p50, {name}", _percentile(seconds, 50), "us"))
        found.append(Result(f"decision p99, {name}", _percentile(seconds, 99), "us"))
    found.append(Result("memory of an indexed page", bytes_per_page(INDEX_PAGES), "bytes"))
    return found


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """In microseconds."""
    return 1e6 * ordered[len(ordered) * percent // 100]
