"""A request cancelled in any state: within a second nobody holds anything for it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from jpd.config import RouterConfig
from jpd.errors import RequestCancelledError
from jpd.metrics import Metrics
from jpd.request import Request, RequestState, SamplingParams
from jpd.router.placement import Placement
from jpd.router.router import Router
from jpd.transfer.faulty import Fault, FaultyTransfer
from tests.worker.fleet import TestFleet, fleet

ONE_SECOND = 1.0
PAGE_SIZE = 4


@asynccontextmanager
async def routed(*faults: Fault) -> AsyncIterator[tuple[TestFleet, Router, Metrics]]:
    """Real workers on fake engines behind a real router; one decode slot."""
    metrics = Metrics()
    async with fleet(
        slots=1, transfer_wrapper=lambda inner: FaultyTransfer(inner, faults)
    ) as running:
        clients = [member.client for member in running.members.values()]
        router = Router(
            clients, RouterConfig(), (), metrics, max_model_len=128, page_size=PAGE_SIZE
        )
        await router.start()
        try:
            yield running, router, metrics
        finally:
            await router.close()


async def ask(router: Router, num_prompt_tokens: int, max_tokens: int) -> list[int]:
    now = time.monotonic()
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(range(num_prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        arrival_time=now,
        deadline=now + 60,
    )
    async with aclosing(router.generate(request)) as outputs:
        return [token async for output in outputs for token in output.token_ids]


async def reach(router: Router, state: RequestState) -> None:
    """Until the newest request is in this state."""
    end = time.monotonic() + 10
    while True:
        states = [journey.record.state for journey in router._journeys.values()]
        if states and states[-1] is state:
            return
        assert time.monotonic() < end, f"{state} was not reached: {states}"
        await asyncio.sleep(0.001)


async def cancel_and_check(
    running: TestFleet, router: Router, task: "asyncio.Task[list[int]]", num_left: int = 0
) -> None:
    task.cancel()
    start = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert router.num_requests == num_left
    if not num_left:
        await running.assert_at_rest(seconds=ONE_SECOND)
        await asyncio.wait_for(router.settle(), ONE_SECOND)
        router.check_integrity()
    assert time.monotonic() - start < ONE_SECOND


async def test_waiting() -> None:
    async with routed() as (running, router, metrics):
        running["decode-0"].decode.before_step = lambda: time.sleep(0.005)
        holder = asyncio.create_task(ask(router, 8, 100))
        await reach(router, RequestState.DECODING)
        waiting = asyncio.create_task(ask(router, 8, 4))
        await reach(router, RequestState.WAITING)
        await asyncio.sleep(0.02)
        await cancel_and_check(running, router, waiting, num_left=1)
        assert metrics.value("jpd:requests_waiting") == 0
        await cancel_and_check(running, router, holder)


async def test_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state lasts until the router has chosen where to prefill: cancelled in between."""
    async with routed() as (running, router, _):
        choose, states = Placement.choose, []

        def cancel_and_choose(self: Placement, *choice: Any) -> Any:
            (journey,) = router._journeys.values()
            states.append(journey.record.state)
            assert journey.holding is not None and journey.holding.decode_worker == "decode-0"
            asyncio.current_task().cancel()
            return choose(self, *choice)

        monkeypatch.setattr(Placement, "choose", cancel_and_choose)
        start = time.monotonic()
        with pytest.raises(RequestCancelledError):
            await ask(router, 40, 4)
        assert states == [RequestState.RESERVED]
        await running.assert_at_rest(seconds=ONE_SECOND)
        await asyncio.wait_for(router.settle(), ONE_SECOND)
        router.check_integrity()
        assert time.monotonic() - start < ONE_SECOND


@pytest.mark.parametrize("num_steps", [0, 1, 3])
async def test_prefilling_queued_or_after_some_chunks(num_steps: int) -> None:
    async with routed() as (running, router, _):
        steps: list[int] = []
        engine = running["prefill-0"].prefill
        engine.before_step = lambda: (steps.append(1), time.sleep(0.02))
        task = asyncio.create_task(ask(router, 100, 4))
        await reach(router, RequestState.PREFILLING)
        while len(steps) < num_steps:
            await asyncio.sleep(0.002)
        await cancel_and_check(running, router, task)
        assert engine.num_computed.get("r", 0) < 100


@pytest.mark.parametrize(
    "fault",
    [
        Fault("drop", piece_index=0, stage="offer"),
        Fault("drop", piece_index=1, stage="arrive"),
        Fault("delay", piece_index=0, delay_seconds=0.3, stage="pull"),
        Fault("delay", piece_index=1, delay_seconds=0.3, stage="arrive"),
        Fault("delay", piece_index=1, delay_seconds=0.3, stage="release"),
    ],
    ids=lambda fault: f"{fault.action}-{fault.stage}",
)
async def test_transferring(fault: Fault) -> None:
    async with routed(fault) as (running, router, metrics):
        if fault.stage == "release":
            running["decode-0"].decode.before_step = lambda: time.sleep(0.005)
        task = asyncio.create_task(ask(router, 20, 50))
        state = RequestState.DECODING if fault.stage == "release" else RequestState.TRANSFERRING
        await reach(router, state)
        while not running.transfer.num_faults:
            await asyncio.sleep(0.001)
        await cancel_and_check(running, router, task)
        late = running["decode-0"].status.num_late_pieces
        assert late >= (fault.action == "delay" and fault.stage != "release")
        end = time.monotonic() + 5
        while metrics.value("jpd:late_kv_pieces_total") < late:  # with the next status
            assert time.monotonic() < end
            await asyncio.sleep(0.01)


async def test_decoding() -> None:
    async with routed() as (running, router, metrics):
        running["decode-0"].decode.before_step = lambda: time.sleep(0.005)
        task = asyncio.create_task(ask(router, 20, 100))
        await reach(router, RequestState.DECODING)
        await cancel_and_check(running, router, task)
        assert metrics.value("jpd:requests_total", outcome="cancelled") == 1
