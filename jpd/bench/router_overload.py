"""Too much traffic for an hour, then little: does the router keep its goodput, and recover?

The real router over simulated workers in virtual time. Open loop: requests come whether or not the
earlier ones were answered. Capacity is what the same fleet did of requests in time under a load
that it was just not able to serve. Called by `jpd.bench.router`.
"""

import asyncio
import contextlib
import itertools
import random
from dataclasses import dataclass, field

from jpd.bench.results import Result
from jpd.bench.simulated_worker import Pace, SimulatedWorker
from jpd.config import RouterConfig, SloConfig
from jpd.errors import OverloadedError
from jpd.explore.virtual_time import VirtualTimeLoop
from jpd.metrics import Metrics
from jpd.request import Request, SamplingParams
from jpd.router.router import Router

SLO = SloConfig("interactive", ttft_ms=2000.0, tpot_ms=60.0, priority=1)
NUM_PREFILL, NUM_DECODE, SLOTS = 2, 2, 4
PROMPT_TOKENS, OUTPUT_TOKENS = (200, 4000), (20, 120)
TIMEOUT_SECONDS = 60.0
OVERLOAD, UNDERLOAD = 3.0, 0.5
RECOVERY_SECONDS = 10.0
MAX_GOODPUT_LOSS = 0.1
MAX_REFUSAL_SECONDS = 2.5
"""A request that waited in vain may have waited as long as its first token was worth."""
MAX_SLOWDOWN = 1.5


@dataclass(slots=True)
class Phase:
    """What happened to the requests that came in one stretch of time."""

    start: float
    num_asked: int = 0
    num_good: int = 0  # first token and time per token within the targets
    ttfts: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)  # seconds until refused
    ends: list[float] = field(default_factory=list)  # of the good ones


class Load:
    """One router, and clients that come at a rate."""

    def __init__(self, router: Router, seed: int) -> None:
        self._router, self._random = router, random.Random(seed)
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def offer(self, per_second: float, seconds: float) -> Phase:
        """Send requests for so long; answers are awaited by `finish`."""
        now = asyncio.get_running_loop().time
        phase = Phase(now())
        while now() - phase.start < seconds:
            await asyncio.sleep(self._random.expovariate(per_second))
            task = asyncio.create_task(self._ask(phase))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return phase

    async def finish(self) -> None:
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def _ask(self, phase: Phase) -> None:
        now = asyncio.get_running_loop().time
        arrival = now()
        phase.num_asked += 1
        request = Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=(7,) * self._random.randint(*PROMPT_TOKENS),
            sampling=SamplingParams(max_tokens=self._random.randint(*OUTPUT_TOKENS)),
            arrival_time=arrival,
            deadline=arrival + TIMEOUT_SECONDS,
            slo=SLO.name,
        )
        try:
            async with contextlib.aclosing(self._router.generate(request)) as outputs:
                async for output in outputs:
                    timeline = output.timeline
        except OverloadedError:
            phase.refusals.append(now() - arrival)
            return
        assert timeline is not None, "the last event carries it"
        phase.ttfts.append(timeline.ttft_seconds)
        is_good = timeline.ttft_seconds <= SLO.ttft_ms / 1e3
        if is_good and timeline.tpot_seconds <= SLO.tpot_ms / 1e3:
            phase.num_good += 1
            phase.ends.append(now())


@dataclass(frozen=True, slots=True)
class Overloaded:
    """What the whole run showed; rates are requests in time, by second."""

    peak: float
    goodput: float  # under overload
    median_refusal_seconds: float
    refusal_seconds: float  # the slowest of a hundred
    calm_ttft_seconds: float  # p99 at little load, before
    recovered_ttft_seconds: float  # p99 at little load, some seconds after the overload


def measure(overload_seconds: float, calm_seconds: float) -> Overloaded:
    """Runs in virtual time: an hour takes minutes."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(_measure(overload_seconds, calm_seconds))


async def _measure(overload_seconds: float, calm_seconds: float) -> Overloaded:
    pace = Pace(prefill_tokens_per_second=5000.0)
    workers = [SimulatedWorker(f"prefill-{n}", "prefill", pace) for n in range(NUM_PREFILL)]
    workers += [
        SimulatedWorker(f"decode-{n}", "decode", pace, slots=SLOTS) for n in range(NUM_DECODE)
    ]
    loop = asyncio.get_running_loop()
    router = Router(
        workers, RouterConfig(), [SLO], Metrics(),
        max_model_len=1 << 16, page_size=32, clock=loop.time, poll_seconds=5.0,
    )  # fmt: skip
    await router.start()
    load = Load(router, seed=0)
    try:
        peak = await _peak(load, calm_seconds)
        calm = await load.offer(UNDERLOAD * peak, calm_seconds)
        await load.finish()
        stormy = await load.offer(OVERLOAD * peak, overload_seconds)
        await load.offer(UNDERLOAD * peak, RECOVERY_SECONDS)
        after = await load.offer(UNDERLOAD * peak, calm_seconds)
        await load.finish()
    finally:
        await router.close()
    goodput = stormy.num_good / overload_seconds
    refusals = sorted(stormy.refusals)
    return Overloaded(
        peak=peak,
        goodput=goodput,
        median_refusal_seconds=refusals[len(refusals) // 2] if refusals else 0.0,
        refusal_seconds=_p99(refusals),
        calm_ttft_seconds=_p99(sorted(calm.ttfts)),
        recovered_ttft_seconds=_p99(sorted(after.ttfts)),
    )


async def _peak(load: Load, seconds: float) -> float:
    """The most requests in time that any load brings: it rises until more brings no more."""
    best, rate = 0.0, 1.0
    while True:
        phase = await load.offer(rate, seconds)
        await load.finish()
        good = phase.num_good / seconds
        if good <= best * 1.02:
            return max(best, good)
        best, rate = good, rate * 1.4


def _p99(ordered: list[float]) -> float:
    return ordered[len(ordered) * 99 // 100] if ordered else 0.0


def results(overload_seconds: float, calm_seconds: float) -> list[Result]:
    done = measure(overload_seconds, calm_seconds)
    what = f"{OVERLOAD:g} x capacity for {overload_seconds / 60:g} min"
    return [
        Result("most requests in time, any load", done.peak, "1/s"),
        Result(
            f"requests in time, {what}",
            done.goodput,
            "1/s",
            (1.0 - MAX_GOODPUT_LOSS) * done.peak,
            at_most=False,
        ),
        Result(f"refused after, p50, {what}", done.median_refusal_seconds, "s", 0.01),
        Result(f"refused after, p99, {what}", done.refusal_seconds, "s", MAX_REFUSAL_SECONDS),
        Result(f"TTFT p99, {UNDERLOAD:g} x capacity", done.calm_ttft_seconds, "s"),
        Result(
            f"TTFT p99, {RECOVERY_SECONDS:g} s after it",
            done.recovered_ttft_seconds,
            "s",
            MAX_SLOWDOWN * done.calm_ttft_seconds,
        ),
    ]
