"""Replays a trace through the router's own placement: how often pages hit, how even the work is.

Prefill workers exist on paper: one prompt at a time at a fixed rate, and a cache of pages with
least recently used eviction. What they hold is told as real workers tell it. Times are the trace's.
Called by `jpd.bench.router`.
"""

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jpd.bench.results import Result
from jpd.bench.router_decisions import PaperWorker, make_fleet
from jpd.bench.traces import TRACE_PAGE_SIZE, Trace, TraceRequest
from jpd.cache.prefix_log import PrefixLog
from jpd.config import PolicyName, RouterConfig
from jpd.router.placement import Choice, Placement
from jpd.router.policy import Row, Wishes

NUM_WORKERS = 8
CACHE_TOKENS = 3_000_000
TOKENS_PER_SECOND = 40_000.0
STEP_SECONDS = 0.02
POLL_SECONDS = 0.25
HIT_SHARE = 0.956
"""Of the hits of one cache without bound, to be kept with the caches of eight workers."""
MOST_IMBALANCE = 1.2
NUM_DECODERS, SLOTS, DECODE_PAGES = 4, 4096, 1 << 24


@dataclass(slots=True)
class PaperCache:
    """Pages of one worker, least recently used first, and the log of what comes and goes."""

    num_pages: float
    log: PrefixLog = field(default_factory=PrefixLog)
    pages: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    busy_until: float = 0.0
    num_computed_pages: int = 0
    polled: float = -1.0

    def match(self, page_ids: Sequence[int]) -> int:
        """Leading pages that are here; they are in use from now on."""
        matched = list(itertools.takewhile(self.pages.__contains__, page_ids))
        for page_id in reversed(matched):
            self.pages.move_to_end(page_id)
        return len(matched)

    def keep(self, page_ids: Sequence[int]) -> None:
        """Now used; the end of a prompt goes before its beginning."""
        for page_id in reversed(page_ids):
            if page_id not in self.pages:
                self.log.note(page_id, is_added=True)
            self.pages[page_id] = None
            self.pages.move_to_end(page_id)
        while len(self.pages) > self.num_pages:
            page_id, _ = self.pages.popitem(last=False)
            self.log.note(page_id, is_added=False)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a trace."""

    hit_rate: float  # pages found cached, of all pages
    imbalance: float  # pages computed by the most loaded worker, over the mean
    mean_ttft_seconds: float
    p99_ttft_seconds: float


class Replay:
    """One fleet and one policy, taken through one trace."""

    def __init__(
        self, policy: PolicyName, num_workers: int = NUM_WORKERS, cache_tokens: int = CACHE_TOKENS
    ) -> None:
        self._now = 0.0
        self._caches = {
            f"prefill-{n}": PaperCache(cache_tokens // TRACE_PAGE_SIZE) for n in range(num_workers)
        }
        workers = [PaperWorker(name, "prefill") for name in self._caches]
        workers += [
            PaperWorker(f"decode-{n}", "decode", SLOTS, DECODE_PAGES) for n in range(NUM_DECODERS)
        ]
        num_index_pages = 4 * len(workers) * cache_tokens // TRACE_PAGE_SIZE
        self._fleet = make_fleet(workers, lambda: self._now, num_index_pages)
        self._placement = Placement(self._fleet, RouterConfig(policy=policy), TRACE_PAGE_SIZE)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._num_pages = self._num_hits = 0
        self._ttfts: list[float] = []

    def run(self, trace: Trace) -> Replayed:
        for number, request in enumerate(trace):
            self._advance(request.arrival_seconds)
            self._poll()
            self._serve(request, number)
        self._advance(float("inf"))
        computed = [cache.num_computed_pages for cache in self._caches.values()]
        ttfts = sorted(self._ttfts)
        return Replayed(
            hit_rate=self._num_hits / self._num_pages,
            imbalance=max(computed) * len(computed) / max(1, sum(computed)),
            mean_ttft_seconds=sum(ttfts) / len(ttfts),
            p99_ttft_seconds=ttfts[len(ttfts) * 99 // 100],
        )

    def _advance(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        self._now = max(self._now, until)

    def _poll(self) -> None:
        for name, cache in self._caches.items():
            if self._now - cache.polled >= POLL_SECONDS:
                cache.polled = self._now
                index = self._fleet.prefixes
                index.settle(name)
                index.apply(name, cache.log.since(*index.position(name), cache.pages))

    def _serve(self, request: TraceRequest, number: int) -> None:
        """Place a request as a journey does, and let its workers do their part."""
        num_pages = -(-(request.num_tokens + request.num_output_tokens) // TRACE_PAGE_SIZE)
        row = Row(num_pages)
        wishes = Wishes(
            row,
            num_pages,
            num_tokens=request.num_tokens,
            session_id=request.session_id,
            draw=number * 7919,
        )
        self._placement.note_prompt(request.num_tokens)
        wishes = self._placement.complete(wishes, request.page_ids, request.num_output_tokens)
        decoder = self._placement.rank_decoders(wishes)[0].name
        self._fleet.take_row(decoder, row)
        choice = self._placement.choose(decoder, 0, wishes)
        assert choice is not None, "prefill workers are always there"
        self._prefill(request, choice, row)

    def _prefill(self, request: TraceRequest, choice: Choice, row: Row) -> None:
        name, counted = choice.prefill.name, choice.num_uncached_tokens
        cache = self._caches[name]
        self._fleet.take_prefill(name, counted)
        num_hits = cache.match(request.page_ids)
        num_computed = max(1, request.num_tokens - num_hits * TRACE_PAGE_SIZE)
        self._num_pages += len(request.page_ids)
        self._num_hits += num_hits
        cache.num_computed_pages += len(request.page_ids) - num_hits
        seconds = num_computed / TOKENS_PER_SECOND
        end = cache.busy_until = max(cache.busy_until, self._now) + seconds
        self._ttfts.append(end - self._now)

        def prefilled() -> None:
            cache.keep(request.page_ids)
            self._fleet.give_prefill(name, counted)
            self._fleet.see_prefill(name, num_computed, seconds)
            self._fleet.prefixes.expect(name, request.page_ids)

        def decoded() -> None:
            self._fleet.see_step(choice.decode.name, STEP_SECONDS)
            self._fleet.give_row(choice.decode.name, row)
            self._placement.note_output(request.num_output_tokens)

        self._at(end, prefilled)
        self._at(end + request.num_output_tokens * STEP_SECONDS, decoded)

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happen))


def hit_rate_of_one(trace: Trace, cache_tokens: float = math.inf) -> float:
    """Of one cache for all. Without a bound: no router can do better."""
    cache, num_hits = PaperCache(cache_tokens / TRACE_PAGE_SIZE), 0
    for request in trace:
        num_hits += cache.match(request.page_ids)
        cache.keep(request.page_ids)
    return num_hits / sum(len(request.page_ids) for request in trace)


def results(
    name: str, trace: Trace, policies: Sequence[PolicyName], hit_share: float | None = HIT_SHARE
) -> list[Result]:
    """What each policy makes of a trace; the first one has targets to meet.

    `hit_share` None: prompts come while those they share pages with are being computed.
    """
    best, all_tokens = hit_rate_of_one(trace), NUM_WORKERS * CACHE_TOKENS
    found = [
        Result(f"{name}: page hit rate of one cache without bound", best, ""),
        Result(f"{name}: of one as large as all", hit_rate_of_one(trace, all_tokens), ""),
    ]
    for policy in policies:
        done = Replay(policy).run(trace)
        is_held = policy == policies[0]
        found += [
            Result(
                f"{name}, {policy}: page hit rate",
                done.hit_rate,
                "",
                hit_share * best if is_held and hit_share is not None else None,
                at_most=False,
            ),
            Result(
                f"{name}, {policy}: most loaded / mean",
                done.imbalance,
                "",
                MOST_IMBALANCE if is_held else None,
            ),
            Result(f"{name}, {policy}: TTFT mean", done.mean_ttft_seconds, "s"),
            Result(f"{name}, {policy}: TTFT p99", done.p99_ttft_seconds, "s"),
        ]
    return found
