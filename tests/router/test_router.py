"""One request through the router: order of events, lengths, timeline, and every way to stop it."""

import asyncio
import contextlib
import gc

import pytest

from jpd.errors import (
    DeadlineError,
    RequestCancelledError,
    RequestError,
    WorkerError,
)
from jpd.request import Request, TokenLogprobs
from jpd.worker.protocol import DecodeEvent
from tests.router.rig import VOCAB_SIZE, counted, rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker, one_each


@virtual
async def test_tokens_come_in_order_with_one_end() -> None:
    async with rig(*one_each()) as r:
        answer = await r.ask(r.request((7, 8, 9), max_tokens=5))
        assert answer.token_ids == counted((7, 8, 9), 5)
        assert answer.finish_reason == "length"
        assert answer.timeline.path == ["disaggregated"]
        assert answer.timeline.prefill_worker == "prefill-0"
        assert answer.timeline.decode_worker == "decode-0"
        assert r.metrics.value("jpd:requests_total", outcome="finished") == 1
        assert r.metrics.value("jpd:router_decisions_total", path="disaggregated") == 1
        assert r.metrics.value("jpd:output_tokens_total") == 5
        assert r.metrics.value("jpd:prompt_tokens_total") == 3
        assert r.metrics.value("jpd:time_to_first_token_seconds_count") == 1
        assert r.metrics.value("jpd:inter_token_latency_seconds_count") == 4


@virtual
async def test_decode_is_reserved_before_prefill_and_the_first_token_beats_the_transfer() -> None:
    prefill = FakeWorker("prefill-0", "prefill", prefill_token_seconds=0.1)
    decode = FakeWorker("decode-0", "decode", transfer_seconds=5.0, step_seconds=0.5)
    async with rig(prefill, decode) as r:
        start = r.now
        stream = r.router.generate(r.request((1,) * 10, max_tokens=3))
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.5)
        assert decode.num_held == 1, "reserved while the prompt is computed"
        assert (await first).token_ids == (2,)
        assert r.now - start == pytest.approx(1.0)
        await asyncio.sleep(1.0)
        assert decode.attempts["decode"], "decode was dispatched without waiting for the reader"
        rest = [output async for output in stream]
        assert [output.token_ids for output in rest] == [(3,), (4,)]
        timeline = rest[-1].timeline
        assert timeline.queue_seconds == 0.0
        assert timeline.prefill_seconds == pytest.approx(1.0)
        assert timeline.transfer_seconds == pytest.approx(5.0)
        assert timeline.decode_seconds == pytest.approx(1.0)
        assert timeline.ttft_seconds == pytest.approx(1.0)
        assert timeline.tpot_seconds == pytest.approx(3.0)
        assert timeline.kv_bytes == 80
        assert r.metrics.value("jpd:kv_transfer_bytes_total") == 80
        assert r.metrics.value("jpd:kv_transfer_seconds_sum") == pytest.approx(5.0)


@virtual
async def test_the_kv_counts_as_there_when_it_was_not_when_that_was_heard() -> None:
    class LateNews(FakeWorker):
        async def decode(self, attempt_id, first_token_id):  # type: ignore[no-untyped-def]
            async for event in super().decode(attempt_id, first_token_id):
                if event.kv_complete_time is not None:
                    await asyncio.sleep(3.0)
                yield event

    decode = LateNews("decode-0", "decode", transfer_seconds=1.0)
    async with rig(FakeWorker("prefill-0", "prefill"), decode) as r:
        timeline = (await r.ask(r.request(max_tokens=2))).timeline
        assert timeline.transfer_seconds == pytest.approx(1.0)
        assert timeline.decode_seconds == pytest.approx(3.0)


@virtual
async def test_queue_time_is_counted_until_the_reservation() -> None:
    async with rig(*one_each(slots=1, step_seconds=1.0)) as r:
        first = r.begin(r.request(max_tokens=4))
        await asyncio.sleep(0.1)
        answer = await r.ask(r.request(max_tokens=2))
        assert answer.timeline.queue_seconds == pytest.approx(2.9)
        assert answer.timeline.ttft_seconds == pytest.approx(2.9)
        await first


@virtual
async def test_a_slow_reader_holds_no_row() -> None:
    async with rig(*one_each(slots=1)) as r:
        slow = r.router.generate(r.request(max_tokens=20))
        await anext(slow)
        await asyncio.sleep(1.0)
        assert r["decode-0"].num_held == 0
        assert (await r.ask(r.request(max_tokens=3))).finish_reason == "length"
        rest = [token for output in [o async for o in slow] for token in output.token_ids]
        assert rest == counted((1, 2, 3), 20)[1:]


@virtual
async def test_e04_a_worker_that_sends_more_than_was_asked_for_is_cut_short() -> None:
    """Several steps in one call, or drafts that were right, may go beyond the last token."""

    class Eager(FakeWorker):
        async def decode(self, attempt_id, first_token_id):  # type: ignore[no-untyped-def]
            yield DecodeEvent(attempt_id, (), kv_complete_time=1000.0)
            for _ in range(3):
                logprobs = tuple(TokenLogprobs(-1.0, ()) for _ in range(4))
                yield DecodeEvent(attempt_id, (5, 6, 7, 8), logprobs=logprobs)

    async with rig(FakeWorker("prefill-0", "prefill"), Eager("decode-0", "decode")) as r:
        answer = await r.ask(r.request((1, 2, 3), max_tokens=7, logprobs=0))
        assert answer.token_ids == [4, 5, 6, 7, 8, 5, 6]
        assert answer.finish_reason == "length" and len(answer.logprobs) == 7
        assert r.metrics.value("jpd:output_tokens_total") == 7


@pytest.mark.parametrize("max_tokens", [1, 2, 10])
@virtual
async def test_e04_exactly_as_many_tokens_as_asked(max_tokens: int) -> None:
    async with rig(*one_each()) as r:
        answer = await r.ask(r.request(max_tokens=max_tokens))
        assert answer.token_ids == counted((1, 2, 3), max_tokens)
        assert answer.finish_reason == "length"
        assert len(r["decode-0"].attempts["decode"]) == (0 if max_tokens == 1 else 1)


@pytest.mark.parametrize(
    "fields", [{"eos_token_ids": (4,)}, {"stop_token_ids": (4,)}], ids=["eos", "stop_token_ids"]
)
@virtual
async def test_e04_a_first_token_that_ends_never_touches_decode(fields: dict) -> None:
    async with rig(*one_each(transfer_seconds=1.0)) as r:
        answer = await r.ask(r.request((1, 2, 3), max_tokens=10, **fields))
        assert answer.token_ids == [4]
        assert answer.finish_reason == "stop"
        assert not r["decode-0"].attempts["decode"]
        await r.router.settle()
        assert r["decode-0"].num_held == 0, "the reservation was released"
        assert r["prefill-0"].num_held == 0


@virtual
async def test_e05_min_tokens_holds_over_both_legs() -> None:
    async with rig(*one_each()) as r:
        answer = await r.ask(
            r.request((1,), max_tokens=8, min_tokens=5, eos_token_ids=(4, 7), seed=0)
        )
        assert answer.token_ids == [2, 3, 4, 5, 6, 7]
        assert answer.finish_reason == "stop"


@virtual
async def test_e23_ignored_eos_and_explicit_stop_ids() -> None:
    async with rig(*one_each()) as r:
        answer = await r.ask(
            r.request(
                (1,), max_tokens=9, eos_token_ids=(3, 5), stop_token_ids=(5,), ignore_eos=True
            )
        )
        assert answer.token_ids == [2, 3, 4, 5]


@virtual
async def test_a17_replies_slower_than_the_transfer() -> None:
    async with rig(*one_each(reply_seconds=0.05, slots=64, pages=400)) as r:
        tasks = [r.begin(r.request((i % 200, 5), max_tokens=2)) for i in range(200)]
        answers = await asyncio.gather(*tasks)
        assert all(answer.token_ids == [6, 7] for answer in answers)
        assert all(answer.timeline.transfer_seconds >= 0.0 for answer in answers)


@virtual
async def test_a01_closed_between_prefill_reply_and_decode() -> None:
    async with rig(*one_each(transfer_seconds=60.0)) as r:
        stream = r.router.generate(r.request((1,) * 40, max_tokens=10))
        await anext(stream)
        assert r["prefill-0"].num_held == 1
        await stream.aclose()
        await asyncio.sleep(0.1)
        assert r["prefill-0"].num_held == 0, "not at the end of a lease"
        assert r["decode-0"].num_held == 0
        assert r.metrics.value("jpd:requests_total", outcome="cancelled") == 1


@pytest.mark.parametrize("after_seconds", [0.0, 0.5, 1.5, 3.0], ids=str)
@virtual
async def test_e20_closing_frees_everything_in_every_state(after_seconds: float) -> None:
    """0 s: reserving; 0.5 s: prefilling; 1.5 s: transferring; 3 s: decoding."""
    workers = one_each(prefill_token_seconds=0.1, transfer_seconds=1.0, step_seconds=0.1)
    async with rig(*workers) as r:
        task = r.begin(r.request((1,) * 10, max_tokens=400))
        await asyncio.sleep(after_seconds)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.9)
        assert all(worker.num_held == 0 for worker in r.workers.values())
        assert r.router.num_requests == 0
        assert r.metrics.value("jpd:requests_total", outcome="cancelled") == 1


@virtual
async def test_e20_closing_while_waiting_for_room() -> None:
    async with rig(*one_each(slots=1, step_seconds=1.0)) as r:
        running = r.begin(r.request(max_tokens=4))
        await asyncio.sleep(0.1)
        waiting = [r.begin(r.request()) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert r.metrics.value("jpd:requests_waiting") == 3
        waiting[0].cancel()
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)
        assert r.metrics.value("jpd:requests_waiting") == 2
        await running
        await asyncio.gather(*waiting[1:])


@virtual
async def test_a_reader_that_is_cancelled_cancels_its_request() -> None:
    async with rig(*one_each(step_seconds=10.0)) as r:
        stream = r.router.generate(r.request(max_tokens=100))
        await anext(stream)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.5)
        await asyncio.sleep(0.5)
        assert r.router.num_requests == 0 and r["decode-0"].num_held == 0
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@virtual
async def test_closing_before_the_first_step_is_a_cancel_too() -> None:
    async with rig(*one_each()) as r:
        stream = r.router.generate(r.request())
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        with pytest.raises(RequestCancelledError):
            await reader
        assert not r["decode-0"].attempts["reserve"]
        assert r.metrics.value("jpd:requests_total", outcome="cancelled") == 1


@virtual
async def test_a_dropped_stream_is_cancelled() -> None:
    async with rig(*one_each(step_seconds=1.0)) as r:
        stream = r.router.generate(r.request(max_tokens=100))
        await anext(stream)
        del stream
        gc.collect()
        await asyncio.sleep(0.5)
        assert r.router.num_requests == 0
        assert r["decode-0"].num_held == 0


@virtual
async def test_a_stream_that_is_never_read_takes_nothing() -> None:
    async with rig(*one_each()) as r:
        stream = r.router.generate(r.request())
        await asyncio.sleep(1.0)
        assert r.router.num_requests == 0
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@virtual
async def test_finish_ends_as_a_success_with_the_timeline() -> None:
    async with rig(*one_each(step_seconds=1.0)) as r:
        stream = r.router.generate(r.request(max_tokens=100))
        for _ in range(3):
            await anext(stream)
        timeline = await stream.finish()
        assert timeline.decode_worker == "decode-0"
        assert timeline.tpot_seconds == pytest.approx(1.0)
        assert r.metrics.value("jpd:requests_total", outcome="finished") == 1
        assert r.metrics.value("jpd:requests_total", outcome="cancelled") == 0
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@virtual
async def test_closing_the_router_ends_every_stream() -> None:
    async with rig(*one_each(step_seconds=1.0, slots=1)) as r:
        tasks = [r.begin(r.request(max_tokens=100)) for _ in range(3)]
        await asyncio.sleep(5.0)
        await r.router.close()
        for task in tasks:
            with pytest.raises(RequestCancelledError):
                await task


@virtual
async def test_c07_drain_lets_running_streams_end_and_refuses_new_ones() -> None:
    async with rig(*one_each(step_seconds=1.0)) as r:
        running = r.begin(r.request(max_tokens=10))
        await asyncio.sleep(2.0)
        draining = asyncio.create_task(r.router.drain())
        await asyncio.sleep(0.1)
        with pytest.raises(WorkerError, match="shutting down"):
            r.router.generate(r.request())
        assert not r.router.health().is_ready
        assert (await running).finish_reason == "length"
        await draining


@virtual
async def test_the_deadline_ends_a_running_request() -> None:
    async with rig(*one_each(step_seconds=1.0)) as r:
        start = r.now
        with pytest.raises(DeadlineError):
            await r.ask(r.request(max_tokens=100, timeout=5.0))
        assert r.now - start == pytest.approx(5.0)
        assert r.metrics.value("jpd:requests_failed_total", reason="deadline") == 1


@virtual
async def test_a_stale_event_is_dropped_and_counted() -> None:
    async with rig(*one_each()) as r:
        r["decode-0"].emit_stale_events = True
        answer = await r.ask(r.request(max_tokens=4))
        assert answer.token_ids == counted((1, 2, 3), 4)
        assert r.metrics.value("jpd:unknown_attempts_total") == 3


@virtual
async def test_e12_two_live_requests_with_one_id() -> None:
    async with rig(*one_each(step_seconds=0.1)) as r:
        same = [r.request((n,), max_tokens=4) for n in (10, 60)]
        requests = [
            Request("same-id", q.prompt_token_ids, q.sampling, q.arrival_time, q.deadline)
            for q in same
        ]
        answers = await asyncio.gather(*(r.ask(request) for request in requests))
        assert [answer.token_ids for answer in answers] == [counted((n,), 4) for n in (10, 60)]


@virtual
async def test_e24_a_seed_of_its_own_for_each_request_unless_given() -> None:
    async with rig(*one_each(slots=16)) as r:
        requests = [r.request(seed=None) for _ in range(8)] + [r.request(seed=0)]
        await asyncio.gather(*(r.ask(request) for request in requests))
        seeds = [attempt.sampling.seed for attempt in r["prefill-0"].attempts["prefill"]]
        assert len(set(seeds[:8])) == 8 and None not in seeds
        assert seeds[8] == 0, "0 is a seed, not the lack of one"


@virtual
async def test_bad_requests_are_refused_before_anything_runs() -> None:
    async with rig(*one_each()) as r:
        for prompt in ((), (1, VOCAB_SIZE), (-1,)):
            with pytest.raises(RequestError, match="prompt"):
                r.router.generate(r.request(prompt))
        with pytest.raises(RequestError, match="slo"):
            r.router.generate(r.request(slo="gold"))
        assert r.metrics.value("jpd:requests_failed_total", reason="bad_request") == 4
        assert not r["decode-0"].attempts["reserve"]


@virtual
async def test_a_worker_that_sends_too_much_is_cut_to_what_was_asked() -> None:
    class Talker(FakeWorker):
        async def decode(self, attempt_id, first_token_id):  # type: ignore[no-untyped-def]
            async for event in super().decode(attempt_id, first_token_id):
                if event.token_ids:
                    event = type(event)(event.attempt_id, event.token_ids * 3)
                yield event

    async with rig(FakeWorker("prefill-0", "prefill"), Talker("decode-0", "decode")) as r:
        answer = await r.ask(r.request((1,), max_tokens=4))
        assert answer.token_ids == [2, 3, 3, 3]
        assert answer.finish_reason == "length"
