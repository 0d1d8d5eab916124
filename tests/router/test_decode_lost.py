"""Streams whose decode worker is lost: no token doubled or missing, one end."""

import asyncio

import pytest

from jpd.config import FailureConfig
from jpd.errors import OverloadedError, WorkerLostError
from jpd.worker.protocol import UnknownAttemptError
from tests.router.rig import chaotic, counted, expected, fleet, lost, rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker, one_each


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
