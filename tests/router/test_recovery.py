"""Workers that break before the stream has begun: the failure table at work, nothing left."""

import asyncio
import logging

import pytest

from jpd.config import FailureConfig
from jpd.errors import RequestError, TransferError, WorkerError, WorkerLostError
from tests.router.rig import chaotic, counted, expected, fleet, lost, rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import one_each


@virtual
async def test_a_lost_prefill_is_retried_once_on_another_worker() -> None:
    async with rig(*fleet(2, 1)) as r:
        r["p0"].script("prefill", lost("p0"))
        answer = await r.ask(r.request((1, 2, 3)))
        assert answer.token_ids == counted((1, 2, 3), 5)
        assert answer.timeline.path == ["disaggregated", "retry_other_prefill"]
        assert answer.timeline.prefill_worker == "p1"
        assert answer.timeline.num_retries == 1
        assert answer.timeline.num_replayed_tokens == 0
        assert r.metrics.value("jpd:retries_total", reason="prefill_lost") == 1
        ids = [attempt.attempt_id for attempt in r["d0"].attempts["reserve"]]
        assert len(set(ids)) == 2, "every attempt has an id of its own"


@virtual
async def test_two_lost_prefills_fail_a_long_prompt_and_localise_a_short_one() -> None:
    for limit in (0, 3):
        async with rig(*fleet(3, 1), local_prefill_tokens=limit) as r:
            for name in ("p0", "p1"):
                r[name].script("prefill", lost(name))
            request = r.request((1, 2, 3), disaggregate=True)
            if limit:
                answer = await r.ask(request)
                assert answer.timeline.path[1:] == ["retry_other_prefill", "local_prefill"]
                assert answer.timeline.prefill_worker == "d0"
            else:
                with pytest.raises(WorkerError, match="its engine raised"):
                    await r.ask(request)
                assert r.metrics.value("jpd:requests_failed_total", reason="prefill_lost") == 1


@virtual
async def test_the_table_can_say_fail() -> None:
    failure = FailureConfig(prefill_lost="fail", transfer_failed="fail", decode_lost="fail")
    async with rig(*fleet(2, 2), failure=failure) as r:
        r["p0"].script("prefill", lost("p0"))
        with pytest.raises(WorkerLostError, match="p0"):
            await r.ask(r.request())
        for name in ("d0", "d1"):
            r[name].script("transfer", TransferError(name, "a piece is missing"))
        for _ in range(2):
            with pytest.raises(TransferError, match="a piece is missing"):
                await r.ask(r.request())
        for name in ("d0", "d1"):
            r[name].script("decode", lost(name), after_tokens=4)
        for _ in range(2):
            with pytest.raises(WorkerLostError, match="its engine raised"):
                await r.ask(r.request())
        assert r.metrics.value("jpd:retries_total", reason="decode_lost") == 0


@virtual
async def test_c01_failing_prefills_do_not_hold_decode_rows() -> None:
    async with rig(*one_each(slots=8)) as r:
        r["prefill-0"].script("prefill", RequestError("prompt", "...", "is refused"), times=50)
        for _ in range(50):
            with pytest.raises(RequestError):
                await r.ask(r.request())
        await r.router.settle()
        assert r["decode-0"].num_held == 0
        good = await asyncio.gather(*(r.ask(r.request()) for _ in range(8)))
        assert all(answer.timeline.queue_seconds == 0.0 for answer in good)


@virtual
async def test_a02_what_decode_refuses_was_never_prefilled() -> None:
    """Its own limit is smaller than that of prefill; the room is asked for first."""
    workers = fleet(1, 1)
    workers[1].max_model_len = 64
    async with rig(*workers) as r:
        for _ in range(50):
            with pytest.raises(RequestError, match="prompt = 100: d0 holds 64"):
                await r.ask(r.request((7,) * 100))
            assert r["p0"].num_held == 0 and not r["p0"].attempts["prefill"]
        assert (await r.ask(r.request())).finish_reason == "length"


@virtual
async def test_c02_a_decode_worker_that_cannot_be_reached_is_passed_over() -> None:
    async with rig(*fleet(1, 2)) as r:
        r["d0"].script("reserve", ConnectionRefusedError("port 7001"), times=100)
        for _ in range(8):
            answer = await r.ask(r.request())
            assert answer.timeline.decode_worker == "d1"
        assert r["d0"].attempts["reserve"], "it was asked"
        assert len(r["d0"].attempts["reserve"]) <= 4, "and then suspended"
        assert all(a.attempt_id not in r["p0"].cancelled for a in r["p0"].attempts["prefill"])


@virtual
async def test_when_no_decode_worker_can_be_reached_the_answer_is_quick_and_clear() -> None:
    async with rig(*fleet(1, 2)) as r:
        for name in ("d0", "d1"):
            r[name].script("reserve", lost(name), times=100)
        start = r.now
        with pytest.raises(WorkerError, match="no decode worker is available"):
            await r.ask(r.request())
        assert r.now == start
        assert r.metrics.value("jpd:requests_failed_total", reason="no_worker") == 1


@virtual
async def test_a03_kv_that_never_arrives_ends_within_the_transfer_timeout() -> None:
    async with rig(*one_each(), transfer_timeout_seconds=2.0) as r:
        r["decode-0"].script("transfer", "hang", times=2)
        start = r.now
        with pytest.raises(TransferError, match="did not arrive within 2 s"):
            await r.ask(r.request())
        assert r.now - start == pytest.approx(4.0), "tried twice"
        await r.router.settle()
        assert r["decode-0"].num_held == 0
        assert (await r.ask(r.request())).finish_reason == "length"


@virtual
async def test_a03_an_abort_while_the_kv_is_late() -> None:
    async with rig(*one_each(), transfer_timeout_seconds=30.0) as r:
        r["decode-0"].script("transfer", "hang")
        task = r.begin(r.request())
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.5)
        assert r["decode-0"].num_held == 0


@virtual
async def test_a10_a_failed_transfer_is_retried_without_a_token_twice() -> None:
    async with rig(*fleet(1, 1, next_token=chaotic)) as r:
        r["d0"].script("transfer", TransferError("d0", "shard 1 of 2"))
        answer = await r.ask(r.request(max_tokens=6, seed=11))
        assert answer.token_ids == await expected(6, next_token=chaotic)
        assert answer.timeline.path == ["disaggregated", "retry_transfer"]
        assert answer.timeline.num_replayed_tokens == 4, "prompt and first token, again"
        assert r.metrics.value("jpd:replayed_tokens_total") == 4


@virtual
async def test_a_transfer_that_fails_twice_is_recomputed_when_short() -> None:
    async with rig(*fleet(1, 1, next_token=chaotic), local_prefill_tokens=8) as r:
        r["d0"].script("transfer", TransferError("d0", "lost"), times=2)
        answer = await r.ask(r.request(max_tokens=6, seed=11, disaggregate=True))
        assert answer.token_ids == await expected(6, next_token=chaotic)
        assert answer.timeline.path[1:] == ["retry_transfer", "recompute_on_decode"]


@virtual
async def test_c03_one_failed_transfer_does_not_mark_a_pair_for_ever() -> None:
    async with rig(*fleet(1, 1)) as r:
        r["d0"].script("transfer", TransferError("d0", "once"))
        for _ in range(100):
            answer = await r.ask(r.request())
            assert answer.token_ids == counted((1, 2, 3), 5)
        assert r.metrics.value("jpd:retries_total", reason="transfer_failed") == 1
        assert r.router.health().status == "ok"


@virtual
async def test_a_failed_transfer_prefers_another_pair() -> None:
    async with rig(*fleet(2, 2)) as r:
        r["d0"].script("transfer", TransferError("d0", "bad link"))
        answer = await r.ask(r.request())
        assert (answer.timeline.prefill_worker, answer.timeline.decode_worker) == ("p1", "d1")


@virtual
async def test_a_prefill_worker_that_dies_while_it_sends_is_a_failed_transfer() -> None:
    async with rig(*fleet(2, 1, transfer_seconds=20.0)) as r:
        task = r.begin(r.request())
        await asyncio.sleep(1.0)
        r["p0"].die()
        answer = await task
        assert answer.timeline.path == ["disaggregated", "retry_transfer"]
        assert answer.timeline.prefill_worker == "p1"
        assert answer.timeline.transfer_seconds < 22.0, "noticed before the time was up"


@virtual
async def test_b16_a_late_message_of_an_old_attempt_does_not_touch_the_new_one() -> None:
    async with rig(*fleet(1, 2, step_seconds=0.1), options={"stuck_seconds": 2.0}) as r:
        task = r.begin(r.request(max_tokens=100))
        await asyncio.sleep(1.0)
        r["d0"].freeze()
        await asyncio.sleep(4.0)
        assert r.view("d1").num_rows == 1, "the frozen worker's stream went on elsewhere"
        r["d0"].thaw()  # the cancel of the old attempt is only now obeyed
        await asyncio.sleep(1.0)
        assert r["d0"].num_held == 0
        assert r.view("d1").num_rows == 1 and r["d1"].num_held == 1
        assert (await task).token_ids == counted((1, 2, 3), 100)


@virtual
async def test_c11_mass_cancellation_during_transfers_leaves_the_fleet_well() -> None:
    workers = fleet(2, 2, slots=64, pages=4000, transfer_seconds=0.5, step_seconds=0.01)
    async with rig(*workers, max_waiting=1000) as r:
        for _ in range(4):
            tasks = [r.begin(r.request(max_tokens=100)) for _ in range(600)]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(1.0)
        assert all(worker.num_held == 0 for worker in r.workers.values())
        probes = await asyncio.gather(*(r.ask(r.request()) for _ in range(20)))
        assert all(probe.timeline.queue_seconds == 0.0 for probe in probes)


@virtual
async def test_c14_the_last_requests_of_a_burst_end_too() -> None:
    async with rig(*fleet(2, 2, slots=8, step_seconds=0.01), max_waiting=1000) as r:
        answers = await asyncio.gather(
            *(r.ask(r.request((n % 200,), max_tokens=n % 12 + 1)) for n in range(1000))
        )
        assert all(
            answer.token_ids == counted((n % 200,), n % 12 + 1) for n, answer in enumerate(answers)
        )


@virtual
async def test_a_fault_is_logged_with_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    async with rig(*fleet(2, 1)) as r:
        r["p0"].script("prefill", lost("p0"))
        with caplog.at_level(logging.WARNING, "jpd.router.journey"):
            await r.ask(r.request())
        assert "prefill_lost" in caplog.text and "retry_other_prefill" in caplog.text
