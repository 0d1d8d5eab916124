"""Requests that wait for room: priority on both hops, large ones, too many, cancelled ones."""

import asyncio
import contextlib

import pytest

from jpd.config import SloConfig
from jpd.errors import OverloadedError
from tests.router.rig import fleet, rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker, one_each


@virtual
async def test_b07_priority_decides_at_the_decode_hop() -> None:
    async with rig(*one_each(slots=1, step_seconds=1.0)) as r:
        ends: list[str] = []

        async def run(name: str, **fields: object) -> None:
            await r.ask(r.request(max_tokens=3, **fields))
            ends.append(name)

        running = asyncio.create_task(run("running"))
        await asyncio.sleep(0.1)
        low = [asyncio.create_task(run(f"low{n}")) for n in range(10)]
        await asyncio.sleep(0.1)
        high = asyncio.create_task(run("high", priority=1))
        await asyncio.gather(running, high, *low)
        assert ends == ["running", "high", *(f"low{n}" for n in range(10))]


@virtual
async def test_b07_priority_and_its_class_reach_the_prefill_hop() -> None:
    workers = one_each(slots=16, pages=400, prefill_token_seconds=1.0)
    slos = [SloConfig("interactive", 500.0, 50.0, priority=10)]
    async with rig(*workers, slos=slos) as r:
        starts: list[int] = []

        async def run(number: int, **fields: object) -> None:
            async for _ in r.router.generate(r.request((number,), max_tokens=2, **fields)):
                starts.append(number)
                break

        tasks = [asyncio.create_task(run(number)) for number in range(4)]
        await asyncio.sleep(0.1)
        tasks.append(asyncio.create_task(run(77, slo="interactive")))
        await asyncio.gather(*tasks)
        assert starts == [0, 77, 1, 2, 3]
        priorities = [attempt.priority for attempt in r["prefill-0"].attempts["prefill"]]
        assert priorities == [0, 0, 0, 0, 10]


@virtual
async def test_no_room_waits_in_the_router_and_then_is_refused() -> None:
    async with rig(*one_each(slots=1, step_seconds=1.0)) as r:
        running = r.begin(r.request(max_tokens=100))
        await asyncio.sleep(0.1)
        start = r.now
        with pytest.raises(OverloadedError) as caught:
            await r.ask(r.request(timeout=20.0))
        assert r.now - start == pytest.approx(20.0)
        assert caught.value.retry_after_seconds >= 1.0
        assert len(r["prefill-0"].attempts["prefill"]) == 1, "it waited in the router alone"
        assert r.metrics.value("jpd:requests_failed_total", reason="overloaded") == 1
        patient = r.begin(r.request())
        assert (await running).finish_reason == "length"
        assert (await patient).timeline.queue_seconds > 70.0


@virtual
async def test_b13_past_saturation_the_surplus_is_refused_fast() -> None:
    """Open loop at three times the capacity for a minute, then at half of it."""
    workers = one_each(slots=4, step_seconds=0.1)  # 4 rows of 1 s each: 4 requests a second
    async with rig(*workers, max_waiting=8) as r:
        waits: list[float] = []
        refused: list[float] = []

        async def one() -> None:
            start = r.now
            try:
                await r.ask(r.request(max_tokens=11))
                waits.append(r.now - start)
            except OverloadedError:
                refused.append(r.now - start)

        tasks = []
        for _ in range(60 * 12):
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(1.0 / 12.0)
        assert len(waits) > 60 * 4 * 0.9
        assert len(refused) > 60 * 7 and max(refused) == 0.0
        await asyncio.sleep(3.0)
        waits.clear()
        for _ in range(20):
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(0.5)
        await asyncio.gather(*tasks)
        assert len(waits) == 20 and max(waits) < 1.1


@virtual
async def test_a_large_request_waits_for_pages_and_gets_them() -> None:
    """Pages, not rows, are scarce; small requests keep coming."""
    async with rig(*one_each(slots=16, pages=8, step_seconds=0.1)) as r:
        stop = asyncio.Event()

        async def flood(number: int) -> None:
            await asyncio.sleep(number * 0.1)
            while not stop.is_set():
                await r.ask(r.request(max_tokens=12))

        flooding = [asyncio.create_task(flood(number)) for number in range(12)]
        await asyncio.sleep(2.0)
        answer = await r.ask(r.request((1,) * 100, max_tokens=20, timeout=30.0))
        assert answer.timeline.queue_seconds < 3.0
        stop.set()
        await asyncio.gather(*flooding)


@virtual
async def test_cancelling_in_the_middle_of_a_reservation_frees_what_the_worker_gave() -> None:
    class SlowAnswer(FakeWorker):
        async def reserve(self, attempt):  # type: ignore[no-untyped-def]
            reservation = await super().reserve(attempt)
            await asyncio.sleep(1.0)
            return reservation

    async with rig(FakeWorker("p0", "prefill"), SlowAnswer("d0", "decode")) as r:
        task = r.begin(r.request())
        await asyncio.sleep(0.5)
        assert r["d0"].num_held == 1
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
        assert r["d0"].num_held == 0 and r.view("d0").num_rows == 0


@virtual
async def test_those_who_wait_for_one_worker_are_no_reason_to_refuse_who_fits_on_another() -> None:
    slo = SloConfig("fast", ttft_ms=1000.0, tpot_ms=500.0)
    async with rig(*fleet(1, 2, slots=1, step_seconds=0.1), slos=[slo]) as r:
        pinned = [r.begin(r.request(max_tokens=21, decode_worker="d1")) for _ in range(6)]
        await asyncio.sleep(9.0)  # some have gone: the pace of the line is known
        answer = await r.ask(r.request(max_tokens=2, slo="fast"))
        assert answer.timeline.decode_worker == "d0" and answer.timeline.queue_seconds == 0.0
        await asyncio.gather(*pinned)


@virtual
async def test_who_waits_for_one_worker_does_not_keep_others_from_the_rest() -> None:
    """A pin, a size, a pace: the head of the line has use for one worker only."""
    slo = SloConfig("fast", ttft_ms=1e6, tpot_ms=50.0)
    pinned = {"decode_worker": "big", "max_tokens": 2}
    for wish in (pinned, {"max_tokens": 300}, {"slo": "fast", "max_tokens": 2}):
        big = FakeWorker("big", "decode", slots=1, step_seconds=0.03)
        small = FakeWorker("small", "decode", slots=1, pages=8, step_seconds=0.2)
        async with rig(FakeWorker("p", "prefill"), big, small, slos=[slo]) as r:
            for worker in ("big", "small"):  # their pace is known
                await r.ask(r.request(max_tokens=30, decode_worker=worker))
            busy = r.begin(r.request(max_tokens=400, decode_worker="big"))
            await asyncio.sleep(0.1)
            head = r.begin(r.request(**wish))
            await asyncio.sleep(0.1)
            behind = [await r.ask(r.request(max_tokens=2)) for _ in range(3)]
            assert {answer.timeline.decode_worker for answer in behind} == {"small"}, wish
            assert max(answer.timeline.queue_seconds for answer in behind) == 0.0, wish
            assert not head.done() and not busy.done()
            late = [r.begin(r.request(max_tokens=100, decode_worker="big")) for _ in range(3)]
            assert (await head).timeline.decode_worker == "big"
            assert (await busy).finish_reason == "length"
            assert not any(task.done() for task in late), "they came after it"
            await asyncio.gather(*late)
