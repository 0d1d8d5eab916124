"""Ten thousand random requests with aborts, errors, deadlines and dying workers; then recount."""

import asyncio
import gc
import logging
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from jpd.errors import JpdError, RequestError, TransferError, WorkerLostError
from jpd.request import RequestState
from jpd.router.record import RequestRecord
from tests.router.rig import Rig, counted, rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker

NUM_REQUESTS = 10_000
ARRIVALS_PER_SECOND = 60.0


class Client:
    """Sends one random request and may hang up; tallies and checks what came back."""

    def __init__(self, r: Rig, seed: int) -> None:
        self.r, self.random = r, random.Random(seed)
        self.outcomes: Counter[str] = Counter()

    async def run(self) -> None:
        draw = self.random
        prompt = tuple(draw.randrange(200) for _ in range(draw.choice((1, 5, 16, 17, 40))))
        num_tokens = draw.choice((1, 2, 5, 12))
        request = self.r.request(
            prompt,
            max_tokens=num_tokens,
            timeout=draw.choice((0.5, 5.0, 60.0)),
            priority=draw.choice((0, 0, 0, 1)),
            session_id=draw.choice((None, "a", "b", "c")),
        )
        patience = draw.choice((None, None, None, 0.0, 0.05, 0.3, 1.0))
        got: list[int] = []
        try:
            async with asyncio.timeout(patience):
                ends = await self._read(request, got)
        except TimeoutError:
            self.outcomes["cancelled"] += 1
        except JpdError:
            self.outcomes["failed"] += 1
        else:
            assert ends == 1 and len(got) == num_tokens
            self.outcomes["finished"] += 1
        assert got == counted(prompt, len(got)), "no token doubled or missing"

    async def _read(self, request, got: list[int]) -> int:  # type: ignore[no-untyped-def]
        ends = 0
        stream = self.r.router.generate(request)
        try:
            async for output in stream:
                assert ends == 0, "nothing follows the last event"
                got += output.token_ids
                ends += output.finish_reason is not None
        finally:
            await stream.aclose()
        return ends


async def trouble(r: Rig, draw: random.Random) -> None:
    """Breaks something a few times a second, and mends it."""
    while True:
        await asyncio.sleep(draw.uniform(0.0, 0.5))
        r.router.check_integrity()
        worker = r.workers[draw.choice(list(r.workers))]
        match draw.randrange(6):
            case 0:
                worker.script("prefill", WorkerLostError(worker.name, "fuzz"))
            case 1:
                worker.script("prefill", RequestError("prompt", "...", "fuzz"))
            case 2:
                worker.script("transfer", TransferError(worker.name, "fuzz"))
            case 3:
                worker.script("transfer", "hang")
            case 4:
                worker.script("decode", WorkerLostError(worker.name, "fuzz"), after_tokens=2)
            case _ if draw.random() < 0.2:
                worker.die("fuzz")
                await asyncio.sleep(1.0)
                worker.revive()
            case _ if draw.random() < 0.2:
                worker.freeze()
                await asyncio.sleep(draw.choice((0.2, 3.0)))
                worker.thaw()


def make_fleet() -> list[FakeWorker]:
    options = {"prefill_token_seconds": 0.0005, "transfer_seconds": 0.02, "step_seconds": 0.02}
    return [FakeWorker(f"p{n}", "prefill", pages=200, **options) for n in range(2)] + [  # type: ignore[arg-type]
        FakeWorker(f"d{n}", "decode", slots=6, pages=16, prefix_cache=False, **options)  # type: ignore[arg-type]
        for n in range(3)
    ]


async def storm(seed: int, num_requests: int) -> None:
    """Open-loop arrivals with trouble; then every count equals a recount, and all is quiet."""
    num_records_before = live_records()
    options = {"stuck_seconds": 1.5}
    async with rig(
        *make_fleet(), local_prefill_tokens=4, transfer_timeout_seconds=0.5, max_waiting=32,
        options=options,
    ) as r:  # fmt: skip
        draw = random.Random(seed)
        client = Client(r, seed + 1)
        breaking = asyncio.create_task(trouble(r, draw))
        async with asyncio.TaskGroup() as group:
            for _ in range(num_requests):
                group.create_task(client.run())
                await asyncio.sleep(draw.expovariate(ARRIVALS_PER_SECOND))
        breaking.cancel()
        await asyncio.gather(breaking, return_exceptions=True)
        for worker in r.workers.values():
            worker.thaw()
            worker._faults._entries.clear()
            if worker._lost_reason:
                worker.revive()
        await asyncio.sleep(60.0)
        await check_aftermath(r, client, num_requests)
    assert live_records() == num_records_before


async def check_aftermath(r: Rig, client: Client, num_requests: int) -> None:
    assert client.outcomes.total() == num_requests
    assert client.outcomes["finished"] > num_requests * 0.4
    assert client.outcomes["cancelled"] > 0 and client.outcomes["failed"] > 0
    counted_by_router = Counter(
        {
            state.value: int(r.metrics.value("jpd:requests_total", outcome=state.value))
            for state in (RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED)
        }
    )
    assert counted_by_router.total() == num_requests, "each request ended once"
    assert r.router.health().status == "ok"
    probes = await asyncio.gather(*(r.ask(r.request()) for _ in range(12)))
    assert all(probe.timeline.queue_seconds == 0.0 for probe in probes)
    await r.router.settle()
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert len(names) == 1 + len(r.workers), f"only this one and the pollers are left: {names}"


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Kept log records would keep errors, and with them the requests they tell of."""
    with caplog.at_level(logging.CRITICAL, "jpd"):
        yield


def live_records() -> int:
    gc.collect()
    return sum(isinstance(found, RequestRecord) for found in gc.get_objects())


@pytest.mark.slow
@virtual
async def test_h03_h04_counters_equal_a_recount_after_ten_thousand_requests(quiet: None) -> None:
    await storm(seed=1, num_requests=NUM_REQUESTS)


@pytest.mark.parametrize("seed", range(2, 6))
@virtual
async def test_h07_storms_of_other_seeds(quiet: None, seed: int) -> None:
    await storm(seed, num_requests=600)
