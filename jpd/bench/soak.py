"""`jpd bench soak`: traffic of every kind while hosts are killed; then the invariants are checked.

1. Requests come in bursts with lulls between them, so that batches of every size are met. Clients
   leave, requests are refused, deadlines pass; every so often a host is killed.
2. At the end everybody has left: gauges are at rest, pages are counted, nothing has compiled.
3. Answers that follow from their request alone are compared with what it gets alone.

Each invariant is a number of violations, to be 0. Called by the command line and by tests.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from jpd.bench.results import Result
from jpd.bench.soak_answers import Answer, Heard, Ledger, Streams, check_answer, check_same
from jpd.bench.soak_requests import Asked, Draw
from jpd.errors import JpdError
from jpd.metrics import Metrics
from jpd.request import RequestState
from jpd.router.health import Health

CAPACITIES = {"jpd:kv_pages", "jpd:kv_pages_cached", "jpd:worker_up"}
"""The gauges that are not zero at rest."""
REST_SECONDS = 10.0
NOTICE_SECONDS = 5.0
RECOVERY_SECONDS = 300.0
MEMORY_GROWTH_TARGET = 10.0


class Soaked(Streams, Protocol):
    """What is needed of `jpd.api.Server`."""

    metrics: Metrics

    def health(self) -> Health: ...

    def check_integrity(self) -> None:
        """Wait for cancels under way. Raises AssertionError where pages or records disagree."""
        ...


@dataclass(frozen=True, slots=True)
class Effort:
    """How long it goes on: by time, or by requests where that is 0."""

    seconds: float = 0.0
    num_requests: int = 0
    max_at_once: int = 16
    num_alone: int = 24  # answers compared with what the request gets alone
    lull_seconds: float = 0.5  # at most between two bursts
    kill_seconds: float = 30.0  # between a recovery and the next kill
    warm_share: float = 0.5  # of the traffic, before memory is looked at first


class Soak:
    """One run. `kill` ends a host and names it; None: hosts are left alone."""

    def __init__(
        self,
        server: Soaked,
        draw: Draw,
        effort: Effort,
        memory_bytes: Callable[[], int],
        kill: Callable[[], str] | None = None,
    ) -> None:
        self._server, self._draw, self._effort, self._kill = server, draw, effort, kill
        self._memory_bytes = memory_bytes
        self.ledger = Ledger()
        self.num_kills = 0
        self._determined: list[Heard] = []
        self._memory = [0, 0]

    def run(self) -> list[Result]:
        start = time.monotonic()
        asyncio.run(self._traffic())
        seconds = time.monotonic() - start
        self._check_ends()
        self._check_rest()
        self._memory[1] = self._memory_bytes()
        self._compare_alone()
        return [*self._counts(seconds), *self.ledger.results(), *self._memory_results()]

    async def _traffic(self) -> None:
        places = asyncio.Semaphore(self._effort.max_at_once)
        killing = None if self._kill is None else asyncio.create_task(self._keep_killing())
        async with asyncio.TaskGroup() as clients:
            start, number = time.monotonic(), 0
            while (share := self._share_done(start, number)) < 1.0:
                if share >= self._effort.warm_share and not self._memory[0]:
                    await self._note_warm_memory()
                await asyncio.sleep(self._gap())
                await places.acquire()
                clients.create_task(self._client(self._draw.asked(), places))
                number += 1
        if killing is not None:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
            await self._recovery()

    def _share_done(self, start: float, number: int) -> float:
        if self._effort.seconds:
            return (time.monotonic() - start) / self._effort.seconds
        return number / self._effort.num_requests

    async def _note_warm_memory(self) -> None:
        """While every host is there: one that was killed has none."""
        health = await asyncio.to_thread(self._server.health)
        if health.status == "ok":
            self._memory[0] = self._memory_bytes()

    def _gap(self) -> float:
        longest = self._effort.lull_seconds
        is_lull = self._draw.is_so(0.1)
        return self._draw.uniform(*((0.2, 1.0) if is_lull else (0.0, 0.04))) * longest

    async def _client(self, asked: Asked, places: asyncio.Semaphore) -> None:
        try:
            heard = await listen(self._server, asked)
        finally:
            places.release()
        self.ledger.count(heard)
        check_answer(heard, self.ledger, hosts_are_killed=self._kill is not None)
        if asked.is_determined and not asked.is_bad and heard.error is None:
            if len(self._determined) < self._effort.num_alone:
                self._determined.append(heard)
            elif self._draw.is_so(self._effort.num_alone / self.ledger.num_requests):
                self._determined[self._draw.randrange(self._effort.num_alone)] = heard

    async def _keep_killing(self) -> None:
        assert self._kill is not None
        while True:
            await asyncio.sleep(self._effort.kill_seconds)
            name = await asyncio.to_thread(self._kill)
            self.num_kills += 1
            noticed = await self._health_becomes(
                lambda health: health.status != "ok", NOTICE_SECONDS
            )
            self.ledger.note("I5 health tells the truth", noticed, f"{name} was killed, unnoticed")
            await self._recovery()

    async def _recovery(self) -> None:
        is_well = await self._health_becomes(lambda health: health.status == "ok", RECOVERY_SECONDS)
        reasons = () if is_well else self._server.health().reasons
        self.ledger.note("I5 health tells the truth", is_well, f"no recovery: {reasons}")

    async def _health_becomes(self, is_so: Callable[[Health], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not is_so(await asyncio.to_thread(self._server.health)):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def _check_ends(self) -> None:
        """I3: each choice ended once for its client, each request once for the router."""
        value, ledger = self._server.metrics.value, self.ledger
        counts = {
            state: int(value("jpd:requests_total", outcome=state.value)) for state in RequestState
        }
        finished, failed = counts[RequestState.FINISHED], counts[RequestState.FAILED]
        told, left = ledger.num_told, ledger.num_left
        name = "I3 one end of each request"
        ledger.note(name, told <= finished <= told + left, f"{finished} finished, {told} told")
        failures = ledger.num_failed + ledger.num_refused
        ledger.note(
            name, failures <= failed <= failures + left, f"{failed} failed, {failures} told"
        )
        most = told + left + ledger.num_refused
        ledger.note(name, sum(counts.values()) <= most, f"{counts}, at most {most}")

    def _check_rest(self) -> None:
        """Gauges follow the workers' reports, so they may take a moment."""
        server, ledger = self._server, self.ledger
        try:
            server.check_integrity()
        except AssertionError as error:
            ledger.note("I7 no page has two owners", False, str(error))
        deadline = time.monotonic() + REST_SECONDS
        while busy_gauges(server.metrics) and time.monotonic() < deadline:
            time.sleep(0.05)
        ledger.note(
            "I1 gauges at rest", not busy_gauges(server.metrics), busy_gauges(server.metrics)
        )
        health = server.health()
        ledger.note("I5 health tells the truth", health.status == "ok", health.reasons)
        num_counted = sum_of(server.metrics, "jpd:retries_total")
        words = f"{ledger.num_retries} retries were told, {num_counted:g} counted"
        ledger.note("I6 no silent fallback", ledger.num_retries <= num_counted, words)
        num_compiled = server.metrics.value("jpd:compilations_after_ready_total")
        ledger.note("I8 nothing compiles after ready", num_compiled == 0, f"{num_compiled:g} did")

    def _compare_alone(self) -> None:
        for number, heard in enumerate(self._determined):
            alone = asyncio.run(listen(self._server, heard.asked.alone(number)))
            check_same(heard, alone, self.ledger)

    def _counts(self, seconds: float) -> list[Result]:
        ledger = self.ledger
        return [
            Result("requests", ledger.num_requests, ""),
            Result("traffic", seconds / 60, "minutes"),
            Result("requests whose client left", ledger.num_leavers, ""),
            Result("requests refused as they must be", ledger.num_refused, ""),
            Result("requests that failed with a reason", ledger.num_failed, ""),
            Result("hosts killed", self.num_kills, ""),
            Result("retries that answers tell", ledger.num_retries, ""),
            Result("answers compared with those alone", len(self._determined), ""),
        ]

    def _memory_results(self) -> list[Result]:
        warm, end = self._memory
        growth = (end / max(warm, 1) - 1.0) * 100
        return [
            Result("memory of all processes, warm", warm / (1 << 20), "MiB"),
            Result("memory at the end, above that", growth, "%", MEMORY_GROWTH_TARGET),
        ]


async def listen(server: Streams, asked: Asked) -> Heard:
    """One client, which may leave before the end."""
    choices = [Answer() for _ in range(max(1, asked.options.get("n", 1)))]
    num_deltas, error = 0, None
    try:
        async with asyncio.timeout(asked.leaves_after_seconds):
            async with aclosing(server.astream(asked.prompt, **asked.options)) as deltas:
                async for delta in deltas:
                    choices[delta.index].add(delta)
                    num_deltas += 1
                    if num_deltas == asked.leaves_after_deltas:
                        break
    except TimeoutError:
        assert asked.leaves_after_seconds is not None
    except JpdError as raised:
        error = raised
    return Heard(asked, choices, error)


def sum_of(metrics: Metrics, name: str) -> float:
    """Of a counter, over all its labels."""
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == name)


def busy_gauges(metrics: Metrics) -> Mapping[str, float]:
    """Gauges that are not zero and should be, at rest."""
    families = (family for family in metrics.registry.collect() if family.type == "gauge")
    samples = [sample for family in families for sample in family.samples]
    return {
        f"{sample.name}{sample.labels}": sample.value
        for sample in samples
        if sample.value and sample.name not in CAPACITIES
    }
