"""The path of an attempt through real workers on fake engines: tokens equal the reference."""

import asyncio
import time

import pytest

from jpd.errors import RequestError, WorkerError
from jpd.worker.protocol import DecodeEvent, UnknownAttemptError
from tests.worker.fleet import attempt_of, fleet
from tests.worker.paper import reference


async def test_one_attempt_end_to_end() -> None:
    async with fleet() as running:
        attempt = attempt_of(range(1, 11), max_tokens=6)
        assert await running.run(attempt) == reference(attempt)
        await running.assert_at_rest()


@pytest.mark.parametrize("page_size", [4])
async def test_a05_prompts_at_page_borders(page_size: int) -> None:
    async with fleet(page_size=page_size, chunk=8) as running:
        for length in (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33):
            attempt = attempt_of([length * 10 + i for i in range(length)], max_tokens=9)
            assert await running.run(attempt) == reference(attempt), length
        await running.assert_at_rest()


async def test_a14_every_position_of_a_chunked_prompt_is_computed_once() -> None:
    async with fleet(page_size=4, chunk=8, max_model_len=256) as running:
        engine = running["prefill-0"].prefill
        for length in (7, 8, 9, 16, 17, 50):
            attempt = attempt_of([length * 100 + i for i in range(length)])
            assert await running.run(attempt) == reference(attempt)
            assert engine.num_computed[attempt.attempt_id] == length
        await running.assert_at_rest()


async def test_many_at_once_keep_their_tokens_apart() -> None:
    async with fleet(slots=4, num_pages=40) as running:
        attempts = [attempt_of(range(i, i + 5 + i % 9), max_tokens=3 + i % 5) for i in range(24)]
        outputs = await asyncio.gather(*(running.run(attempt) for attempt in attempts))
        assert outputs == [reference(attempt) for attempt in attempts]
        await running.assert_at_rest()


async def test_a_colocated_worker_does_both_and_nothing_travels() -> None:
    async with fleet(roles={"both-0": "colocated"}) as running:
        attempts = [attempt_of(range(i, i + 3 * i + 1), max_tokens=5) for i in range(1, 7)]
        outputs = await asyncio.gather(
            *(running.run(attempt, "both-0", "both-0") for attempt in attempts)
        )
        assert outputs == [reference(attempt) for attempt in attempts]
        await running.assert_at_rest()


async def test_a_decode_worker_prefills_for_itself_only() -> None:
    async with fleet() as running:
        attempt = attempt_of(range(9))
        assert await running.run(attempt, prefill="decode-0") == reference(attempt)
        other = attempt_of(range(9))
        reservation = await running["decode-0"].client.reserve(other)
        foreign = type(reservation)(other.attempt_id, "decode-9", 0)
        with pytest.raises(WorkerError, match="role decode cannot prefill for decode-9"):
            await running["decode-0"].client.prefill(other, foreign)
        with pytest.raises(WorkerError, match="role prefill cannot prefill for decode-9"):
            await running["prefill-0"].client.prefill(other, foreign)
        await running["decode-0"].client.cancel(other.attempt_id)
        await running.assert_at_rest()


async def test_a_prefix_is_sent_once_and_computed_once() -> None:
    async with fleet(page_size=4, chunk=8) as running:
        prompt = list(range(100, 118))
        first = attempt_of(prompt, max_tokens=7)
        answer = await running.run(first)
        follow_up = attempt_of([*prompt, *answer, 5, 6, 7], max_tokens=4)
        reservation = await running["decode-0"].client.reserve(follow_up)
        # 18 prompt tokens and 6 of the 7 generated ones have KV there: 6 full pages of 4.
        assert reservation.num_cached_tokens == 24
        result = await running["prefill-0"].client.prefill(follow_up, reservation)
        assert result.num_cached_tokens == 16  # prefill has seen the prompt only
        tokens = [result.token_id]
        events = [
            event
            async for event in running["decode-0"].client.decode(
                follow_up.attempt_id, result.token_id
            )
        ]
        tokens += [token for event in events for token in event.token_ids]
        assert tokens == reference(follow_up)
        assert (
            events[0].kv_bytes == 2 * 4 * 4
        )  # of two layers a page of four int32: the rest was there
        await running.assert_at_rest()


async def test_the_first_event_tells_when_the_kv_was_complete() -> None:
    async with fleet() as running:
        attempt = attempt_of(range(10), max_tokens=3)
        client = running["decode-0"].client
        reservation = await client.reserve(attempt)
        before = time.monotonic()
        first = await running["prefill-0"].client.prefill(attempt, reservation)
        events = [event async for event in client.decode(attempt.attempt_id, first.token_id)]
        assert events[0].token_ids == () and events[0].kv_bytes == 3 * 2 * 4 * 4
        assert before <= events[0].kv_complete_time <= time.monotonic()
        assert all(event.kv_complete_time is None for event in events[1:])
        assert [event.finish_reason for event in events[1:]] == [None, "length"]
        assert isinstance(events[-1], DecodeEvent)


async def test_what_can_never_fit_is_refused_by_its_numbers() -> None:
    async with fleet(num_pages={"prefill-0": 4, "decode-0": 8}, max_model_len=64) as running:
        decode = running["decode-0"].client
        with pytest.raises(RequestError, match="exceed 64 tokens"):
            await decode.reserve(attempt_of(range(60), max_tokens=5))
        with pytest.raises(RequestError, match="needs 10 KV pages of 4, worker decode-0 has 8"):
            await decode.reserve(attempt_of(range(30), max_tokens=10))
        await running.assert_at_rest()


async def test_a_message_about_an_unknown_attempt_is_an_error_and_counted() -> None:
    async with fleet() as running:
        with pytest.raises(UnknownAttemptError, match="ghost"):
            async for _ in running["decode-0"].client.decode("ghost", 1):
                pass
        await running["decode-0"].client.cancel("ghost")  # idempotent: no error, not counted
        assert running["decode-0"].status.num_unknown_attempts == 1


async def test_the_deadline_of_an_attempt_ends_it_on_both_sides() -> None:
    async with fleet() as running:
        late = attempt_of(range(9), deadline=time.monotonic() + 0.1)
        assert await running["decode-0"].client.reserve(late) is not None
        assert running["decode-0"].status.num_slots_used == 1
        await running.assert_at_rest(seconds=2)  # nobody said a word: the deadline did it


async def test_unused_prefixes_are_forgotten_while_idle() -> None:
    async with fleet(retain_seconds=0.2) as running:
        await running.run(attempt_of(range(20)))
        assert running["decode-0"].status.num_pages_cached > 0
        await asyncio.sleep(0.4)
        assert running["decode-0"].status.num_pages_cached == 0
        assert running["prefill-0"].status.num_pages_cached == 0
