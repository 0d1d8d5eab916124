"""The breaker: opens on faults in a row, longer each time, and lets one through to see."""

import asyncio

from jpd.errors import TransferError, WorkerLostError
from jpd.router.breaker import (
    FAULTS_TO_SUSPEND,
    FIRST_SUSPENSION_SECONDS,
    MAX_SUSPENSION_SECONDS,
    MIN_SHARE,
    Breaker,
)
from jpd.router.failure import MAX_BACKOFF_SECONDS, Action, backoff_seconds
from tests.router.rig import rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker, one_each


def trip(breaker: Breaker, now: float = 0.0, draw: float = 1.0) -> float:
    seconds = 0.0
    for _ in range(FAULTS_TO_SUSPEND):
        seconds = breaker.fault(now, draw)
    return seconds


def test_a_few_faults_are_nothing_and_a_success_forgives_them() -> None:
    breaker = Breaker()
    for _ in range(10):
        for _ in range(FAULTS_TO_SUSPEND - 1):
            assert breaker.fault(0.0, 1.0) == 0.0
        assert not breaker.keeps_away(0.0, has_work=True)
        breaker.success()


def test_it_opens_for_longer_each_time_up_to_a_bound_and_by_lot() -> None:
    breaker = Breaker()
    assert trip(breaker) == FIRST_SUSPENSION_SECONDS
    assert [breaker.fault(0.0, 1.0) for _ in range(3)] == [2.0, 4.0, 8.0]
    assert max(breaker.fault(0.0, 1.0) for _ in range(50)) == MAX_SUSPENSION_SECONDS
    assert trip(Breaker(), draw=0.0) == FIRST_SUSPENSION_SECONDS * MIN_SHARE


def test_half_open_it_takes_one_piece_of_work_at_a_time() -> None:
    breaker = Breaker()
    trip(breaker)
    assert breaker.keeps_away(0.5, has_work=False)
    assert not breaker.keeps_away(1.5, has_work=False), "it may be tried"
    assert breaker.keeps_away(1.5, has_work=True), "by one"
    assert not breaker.keeps_away(1.0 + MAX_SUSPENSION_SECONDS, has_work=True)
    breaker.success()
    assert not breaker.keeps_away(1.5, has_work=True) and not breaker.is_tripped


@virtual
async def test_b10_a_worker_that_is_tried_again_gets_one_request_not_all() -> None:
    workers = [FakeWorker("p0", "prefill", prefill_token_seconds=1.0), FakeWorker("p1", "prefill")]
    async with rig(*workers, FakeWorker("d0", "decode", slots=64, pages=1000)) as r:
        r["p0"].script("prefill", WorkerLostError("p0", "500"), times=FAULTS_TO_SUSPEND)
        while not r.view("p0").is_suspended:
            await asyncio.gather(*(r.ask(r.request()) for _ in range(4)))
        before = len(r["p0"].attempts["prefill"])
        await asyncio.sleep(FIRST_SUSPENSION_SECONDS + 0.1)
        assert not r.view("p0").is_suspended
        await asyncio.gather(*(r.ask(r.request()) for _ in range(20)))
        assert len(r["p0"].attempts["prefill"]) - before <= 1
        assert r.router.health().status == "ok" or r.view("p0").num_prefills == 0


@virtual
async def test_b11_the_loss_of_the_last_prefill_worker_is_told_once_and_so_is_its_return() -> None:
    async with rig(*one_each(), local_prefill_tokens=64) as r:
        gauge = lambda: r.metrics.value("jpd:prefill_is_missing")  # noqa: E731
        assert gauge() == 0.0
        r["prefill-0"].die("no power")
        await asyncio.sleep(1.0)
        assert gauge() == 1.0
        assert (await r.ask(r.request())).timeline.path == ["local"]
        r["prefill-0"].revive()
        await asyncio.sleep(1.0)
        assert gauge() == 0.0


def test_only_what_asks_the_same_workers_again_waits_and_never_long() -> None:
    waits = [backoff_seconds(Action.RETRY_TRANSFER, n, 1.0) for n in range(1, 5)]
    assert waits == sorted(waits) and waits[0] < waits[-1]
    assert backoff_seconds(Action.REPLAY, 50, 1.0) == MAX_BACKOFF_SECONDS
    assert backoff_seconds(Action.REPLAY, 50, 0.0) == 0.0
    for action in (Action.RETRY_OTHER_PREFILL, Action.LOCAL_PREFILL, Action.RECOMPUTE_ON_DECODE):
        assert backoff_seconds(action, 3, 1.0) == 0.0


@virtual
async def test_c03_the_back_off_ends_with_the_deadline_and_with_a_cancel() -> None:
    async with rig(*one_each()) as r:
        r["decode-0"].script("transfer", TransferError("decode-0", "reset"))
        assert (await r.ask(r.request())).timeline.num_retries == 1
        r["decode-0"].script("transfer", TransferError("decode-0", "reset"))
        task = r.begin(r.request())
        await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
