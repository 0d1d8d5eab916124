"""Drives the control plane through orders of events that no one would think of.

    story = explore_seed(seed)          # one order, to its end; story.violation says what broke
    report = explore(range(10_000), num_processes=2)     # all, or until the first violation

One seed is one fleet and one order of {arrive, turn of a worker, message, copy, cancel, worker
lost, worker back, time passes}; the invariants of `World` are checked after each. The same seed
gives the same order again. Called by `jpd explore` and the tests.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import random
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from jpd.explore.virtual_time import VirtualTimeLoop
from jpd.explore.world import World
from jpd.metrics import Metrics

MAX_EVENTS = 24
MAX_REQUESTS = 4
MAX_BATCH = 200
MAX_SPINS = 2
"""Turns of the event loop between two events: what the router does is cut up too."""
FAULT_SHARE = 0.06
HEALTHY_SHARE = 0.25
"""Of orders have no faults: nothing may fail in them but what came too late or was too much."""
PAUSES, HEALTHY_PAUSES = (0.01, 0.01, 0.3, 1.2, 2.5), (0.01, 0.01, 0.3)
"""Seconds; the longer ones outlast leases and transfer deadlines."""
CALM_STEP_SECONDS = 0.25
CALM_SECONDS = 30.0
"""After the last event all faults are mended, and everything must have ended within this time."""


@dataclass(slots=True)
class Story:
    """One order of events, as far as it went."""

    seed: int
    events: list[str] = field(default_factory=list)
    violation: str = ""  # what broke, and where; empty when everything held


@dataclass(frozen=True, slots=True)
class Report:
    """What was explored. `failed` is the first story in which an invariant broke."""

    num_interleavings: int
    num_events: int
    failed: Story | None


def explore(
    seeds: range, num_processes: int = 1, on_done: Callable[[int], None] = lambda count: None
) -> Report:
    """Explore the seeds in batches until an invariant breaks. Starts processes if asked.

    `on_done` hears how many seeds a batch had that has ended.
    """
    size = min(MAX_BATCH, -(-len(seeds) // num_processes))
    batches = [seeds[start : start + size] for start in range(0, len(seeds), size)]
    if num_processes == 1:
        return _joined(map(_explore_batch, batches), on_done)
    spawned = multiprocessing.get_context("spawn")  # threads of this process do not survive a fork
    with ProcessPoolExecutor(num_processes, spawned) as pool:
        report = _joined(pool.map(_explore_batch, batches), on_done)
        pool.shutdown(cancel_futures=True)
    return report


def _explore_batch(seeds: range) -> Report:
    num_interleavings = num_events = 0
    metrics = Metrics()
    with _quiet():
        for seed in seeds:
            story = _explore_seed(seed, metrics)
            num_interleavings += 1
            num_events += len(story.events)
            if story.violation:
                return Report(num_interleavings, num_events, story)
    return Report(num_interleavings, num_events, None)


def _joined(reports: Iterable[Report], on_done: Callable[[int], None]) -> Report:
    num_interleavings = num_events = 0
    for report in reports:
        num_interleavings += report.num_interleavings
        num_events += report.num_events
        on_done(report.num_interleavings)
        if report.failed is not None:
            return Report(num_interleavings, num_events, report.failed)
    return Report(num_interleavings, num_events, None)


def explore_seed(seed: int) -> Story:
    """The order of events of one seed. A violation is told, not raised."""
    with _quiet():
        return _explore_seed(seed, Metrics())


def _explore_seed(seed: int, metrics: Metrics) -> Story:
    story = Story(seed)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        try:
            runner.run(_Explorer(story, metrics).run())
        except Exception as error:  # an assertion of ours, or whatever the code under test raised
            place = traceback.extract_tb(error.__traceback__)[-1]
            story.violation = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    return story


class _Explorer:
    """Picks what happens next."""

    def __init__(self, story: Story, metrics: Metrics) -> None:
        self._story, self._metrics = story, metrics
        self._draw = random.Random(story.seed)
        self._is_healthy = self._draw.random() < HEALTHY_SHARE

    async def run(self) -> None:
        world = self._world = World(self._draw, self._metrics)
        await world.router.start()
        try:
            for _ in range(self._draw.randint(MAX_EVENTS // 2, MAX_EVENTS)):
                await self._event()
            await self._calm_down()
            world.check_end(is_healthy=self._is_healthy)
        finally:
            await self._close()

    async def _event(self) -> None:
        self._pick()
        for _ in range(self._draw.randrange(MAX_SPINS + 1)):
            await asyncio.sleep(0)
        if self._draw.random() < 0.08:
            seconds = self._draw.choice(HEALTHY_PAUSES if self._is_healthy else PAUSES)
            self._story.events.append(f"{seconds} s pass")
            await asyncio.sleep(seconds)
            self._world.network.sweep()
        self._world.router.check_integrity()

    def _pick(self) -> None:
        """One event: mostly progress, now and then a fault."""
        draw, world = self._draw, self._world
        if draw.random() < FAULT_SHARE and not self._is_healthy:
            self._do(*self._fault())
        elif len(world.clients) < MAX_REQUESTS and draw.random() < 0.2:
            client = world.arrive()
            self._story.events.append(f"{client.request.request_id} arrives")
        elif (happenings := world.network.happenings()) and draw.random() < 0.5:
            happening = draw.choice(happenings)
            self._do(happening.name, happening.do)
        else:
            workers = draw.sample(world.workers, len(world.workers))
            worker = next((one for one in workers if one.has_work), workers[0])
            self._do(f"turn of {worker.name}", worker.turn)

    def _fault(self) -> tuple[str, Callable[[], object]]:
        draw, world = self._draw, self._world
        worker = draw.choice(world.workers)
        waiting = [client for client in world.clients if client.is_waiting]
        losable = [one for one in world.network.happenings() if one.lose is not None]
        kind = draw.randrange(8)
        if kind < 4 and waiting:
            client = draw.choice(waiting)
            assert client.task is not None
            return f"cancel of {client.request.request_id}", client.task.cancel
        if kind < 6 and losable:
            happening = draw.choice(losable)
            assert happening.lose is not None
            return f"lost: {happening.name}", happening.lose
        if worker.is_lost:
            return f"{worker.name} comes back", worker.restart
        if kind == 6:
            return f"{worker.name} vanishes", worker.vanish
        return f"{worker.name} fails", worker.fail

    def _do(self, name: str, action: Callable[[], object]) -> None:
        self._story.events.append(name)
        action()

    async def _calm_down(self) -> None:
        """Mend everything, and let everybody do what they have to."""
        world = self._world
        self._story.events.append("calm")
        for worker in world.workers:
            if worker.is_lost:
                worker.restart()
        end = world.clock() + CALM_SECONDS
        while self._unfinished():
            assert world.clock() < end, f"{CALM_SECONDS:g} s of calm, and {self._unfinished()}"
            await self._let_all_move()
            await asyncio.sleep(CALM_STEP_SECONDS)

    async def _let_all_move(self) -> None:
        world = self._world
        for worker in world.workers:
            worker.turn()
        for happening in world.network.happenings():
            happening.do()
        world.network.sweep()
        for _ in range(MAX_SPINS):
            await asyncio.sleep(0)

    def _unfinished(self) -> str:
        """What is not over yet, in words; empty when everything is."""
        world = self._world
        clients = [client.request.request_id for client in world.clients if client.is_waiting]
        parts = {
            f"{clients} wait": bool(clients),
            f"{world.router.num_requests} requests run": world.router.num_requests > 0,
            f"{world.router.num_releases} cancels are not answered": world.router.num_releases > 0,
            f"{world.network.num_kept} pieces are kept": world.network.num_kept > 0,
        }
        return ", ".join(text for text, is_so in parts.items() if is_so)

    async def _close(self) -> None:
        """End every task, whatever state a violation left them in."""
        tasks = [client.task for client in self._world.clients if client.task is not None]
        for task in tasks:
            task.cancel()
        await self._world.router.close()
        if tasks:
            await asyncio.wait(tasks)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The faults are wanted: nobody needs to read of them."""
    logger = logging.getLogger("jpd")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
