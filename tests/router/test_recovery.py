"""Workers that break: the failure table at work, no token doubled or missing, nothing left."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from jpd.config import FailureConfig
from jpd.errors import OverloadedError, RequestError, TransferError, WorkerError, WorkerLostError
from jpd.worker.protocol import Attempt, UnknownAttemptError
from tests.router.rig import counted, rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker, one_each


def lost(worker: str) -> WorkerLostError:
    return WorkerLostError(worker, "its engine raised")


def chaotic(token_ids: Sequence[int], attempt: Attempt) -> int:
    """A token that depends on the whole sequence, its seed and its position: any slip shows."""
    seed = attempt.sampling.seed or 0
    return hash((tuple(token_ids), seed, len(token_ids))) % 250


def fleet(num_prefill: int, num_decode: int, **options: object) -> list[FakeWorker]:
    names = [("prefill", f"p{n}") for n in range(num_prefill)]
    names += [("decode", f"d{n}") for n in range(num_decode)]
    return [FakeWorker(name, role, **options) for role, name in names]  # type: ignore[arg-type]


async def expected(max_tokens: int, **options: object) -> list[int]:
    async with rig(*fleet(1, 1, **options)) as r:
        return (await r.ask(r.request(max_tokens=max_tokens, seed=11))).token_ids


# Prefill lost.


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


# Transfer failed.


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


# Decode lost.


@pytest.mark.parametrize("after_tokens", [1, 2, 40, 98, 99])
@virtual
async def test_c10_replay_mid_stream_is_exact(after_tokens: int) -> None:
    """The first token is prefill's: after 1 is before decode's own first, 99 before the last."""
    async with rig(*fleet(2, 3, next_token=chaotic, pages=128)) as r:
        r["d0"].script("decode", lost("d0"), after_tokens=after_tokens)
        answer = await r.ask(r.request(max_tokens=100, seed=11))
        assert answer.token_ids == await expected(100, next_token=chaotic)
        assert len(answer.token_ids) == 100 and answer.finish_reason == "length"
        assert answer.timeline.path == ["disaggregated", "replay"]
        assert answer.timeline.num_replayed_tokens == 3 + after_tokens
        assert answer.timeline.decode_worker == "d1"
        assert r.metrics.value("jpd:output_tokens_total") == 100


@virtual
async def test_c10_several_losses_in_one_stream() -> None:
    async with rig(*fleet(1, 3, next_token=chaotic)) as r:
        r["d0"].script("decode", lost("d0"), after_tokens=10)
        r["d1"].script("decode", UnknownAttemptError("d1", "restarted"), after_tokens=7)
        answer = await r.ask(r.request(max_tokens=30, seed=11))
        assert answer.token_ids == await expected(30, next_token=chaotic)
        assert answer.timeline.path == ["disaggregated", "replay", "replay"]
        r["d2"].script("decode", lost("d2"), after_tokens=3)
        with pytest.raises(WorkerLostError):
            for name in ("d0", "d1"):
                r[name].script("decode", lost(name), after_tokens=3)
            await r.ask(r.request(max_tokens=30))


@virtual
async def test_e05_min_tokens_is_lessened_by_what_was_sent() -> None:
    async with rig(*fleet(1, 2)) as r:
        r["d0"].script("decode", lost("d0"), after_tokens=4)
        request = r.request((1,), max_tokens=20, min_tokens=6, eos_token_ids=(4, 7, 9))
        answer = await r.ask(request)
        assert answer.token_ids == [2, 3, 4, 5, 6, 7, 8, 9]
        assert answer.finish_reason == "stop"


@virtual
async def test_a_replay_may_end_at_its_first_token() -> None:
    async with rig(*fleet(1, 2)) as r:
        r["d0"].script("decode", lost("d0"), after_tokens=3)
        answer = await r.ask(r.request((1,), max_tokens=50, eos_token_ids=(5,)))
        assert answer.token_ids == [2, 3, 4, 5]
        assert not r["d1"].attempts["decode"]


@virtual
async def test_a_killed_decode_worker_moves_every_stream() -> None:
    async with rig(*fleet(1, 2, slots=16, pages=400, step_seconds=0.1)) as r:
        tasks = [r.begin(r.request((n,), max_tokens=60)) for n in range(10)]
        await asyncio.sleep(2.0)
        r["d0"].die()
        for number, task in enumerate(tasks):
            assert (await task).token_ids == counted((number,), 60)
        assert r.metrics.value("jpd:retries_total", reason="decode_lost") == 5
        r["d0"].revive()


@virtual
async def test_a_replay_gives_no_logprob_twice_or_missing_and_keeps_the_penalties() -> None:
    async with rig(*fleet(1, 2, slots=16, pages=400, step_seconds=0.1)) as r:
        asked = {"logprobs": 0, "prompt_logprobs": 0, "frequency_penalty": 0.5}
        tasks = [r.begin(r.request((7, n), max_tokens=30, **asked)) for n in range(4)]
        await asyncio.sleep(1.05)
        r["d0"].die()
        for number, task in enumerate(tasks):
            answer = await task
            assert answer.token_ids == counted((number,), 30)
            assert answer.logprobs == [-float(token_id) for token_id in answer.token_ids]
            [of_prompt] = answer.prompt_logprobs
            assert len(of_prompt) == 2 and of_prompt[0] is None
        replayed = [a for a in r["p0"].attempts["prefill"] if a.num_output_tokens]
        assert len(replayed) == 2
        for attempt in replayed:
            assert len(attempt.token_ids) == 2 + attempt.num_output_tokens
            assert attempt.sampling.frequency_penalty == 0.5
            assert attempt.sampling.prompt_logprobs is None, "the client has had them"
        r["d0"].revive()


@virtual
async def test_a_colocated_worker_that_dies_while_it_prefills_is_replayed_elsewhere() -> None:
    workers = [FakeWorker(f"c{n}", "colocated", prefill_token_seconds=1.0) for n in range(2)]
    async with rig(*workers) as r:
        task = r.begin(r.request((1, 2, 3)))
        await asyncio.sleep(1.5)
        r["c0"].die()
        answer = await task
        assert answer.token_ids == counted((1, 2, 3), 5)
        assert answer.timeline.path == ["local", "replay"]


@virtual
async def test_a_decode_worker_that_dies_during_prefill_is_noticed_then() -> None:
    async with rig(*fleet(1, 2, prefill_token_seconds=0.5)) as r:
        task = r.begin(r.request((1,) * 30, max_tokens=3))
        await asyncio.sleep(5.0)
        start = r.now
        r["d0"].die()
        await asyncio.sleep(1.0)
        assert len(r["d1"].attempts["reserve"]) == 1, "not after the whole prefill"
        answer = await task
        assert answer.timeline.decode_worker == "d1" and r.now > start


@virtual
async def test_e18_an_error_in_mid_stream_is_one_error_and_an_end() -> None:
    failure = FailureConfig(decode_lost="fail")
    async with rig(*one_each(), failure=failure) as r:
        r["decode-0"].script("decode", ZeroDivisionError("in the engine"), after_tokens=5)
        stream = r.router.generate(r.request(max_tokens=20))
        got: list[int] = []
        with pytest.raises(WorkerLostError, match="ZeroDivisionError"):
            async for output in stream:
                got += output.token_ids
        assert got == counted((1, 2, 3), 5)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert r.metrics.value("jpd:requests_failed_total", reason="decode_lost") == 1


@virtual
async def test_a_stream_that_just_ends_is_a_lost_worker() -> None:
    class Quitter(FakeWorker):
        async def decode(self, attempt_id, first_token_id):  # type: ignore[no-untyped-def]
            async for event in super().decode(attempt_id, first_token_id):
                yield event
                if event.token_ids:
                    await self.cancel(attempt_id)
                    return

    async with rig(*fleet(1, 1), Quitter("d1", "decode")) as r:
        answers = await asyncio.gather(*(r.ask(r.request(max_tokens=6)) for _ in range(2)))
        assert all(answer.token_ids == counted((1, 2, 3), 6) for answer in answers)
        assert r.metrics.value("jpd:retries_total", reason="decode_lost") == 1


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
async def test_a_replay_keeps_its_place_in_a_full_queue() -> None:
    async with rig(*fleet(1, 2, slots=1, step_seconds=1.0), max_waiting=2) as r:
        first = r.begin(r.request(max_tokens=20))
        second = r.begin(r.request(max_tokens=10))
        await asyncio.sleep(0.5)
        waiting = [r.begin(r.request(max_tokens=3)) for _ in range(2)]
        await asyncio.sleep(3.0)
        with pytest.raises(OverloadedError):
            await r.ask(r.request())
        r["d0"].die()
        await second
        assert (await first).timeline.queue_seconds < 7.0, "it went before those who came later"
        await asyncio.gather(*waiting)


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
