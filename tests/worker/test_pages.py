"""Pages of attempts that end early: what stays known as a prefix, and who writes there later."""

import asyncio
import time
from dataclasses import replace

import pytest

from tests.worker.fleet import TestFleet, attempt_of, fleet
from tests.worker.paper import Gate, reference


async def stream_some(running: TestFleet, attempt, num_tokens: int) -> list[int]:
    """The first tokens of an attempt, which is then cancelled."""
    task = asyncio.ensure_future(running.run(attempt))
    while len(running.tokens.get(attempt.attempt_id, ())) < num_tokens:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return running.tokens[attempt.attempt_id]


async def test_a_cancelled_row_writes_no_more() -> None:
    async with fleet(num_pages={"prefill-0": 64, "decode-0": 12}, slots=4) as running:
        running["decode-0"].decode.before_step = lambda: time.sleep(0.002)
        for start in range(8):
            await stream_some(running, attempt_of(range(start, start + 9), max_tokens=39), 3)
            heir = attempt_of(range(40 + start, 60 + start), max_tokens=28)  # takes every page
            assert await running.run(heir) == reference(heir)
        await running.assert_at_rest()


async def test_a_cancelled_prefill_computes_no_more() -> None:
    async with fleet(num_pages={"prefill-0": 10, "decode-0": 64}, chunk=4) as running:
        gate = Gate()
        running["prefill-0"].prefill.before_step = gate
        for start in range(5):
            gate.close()
            gone = attempt_of(range(start, start + 36))
            task = asyncio.ensure_future(running.run(gone))
            await asyncio.to_thread(gate.entered.wait, 5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                gate.open()
                await task
            await running["prefill-0"].client.cancel(gone.attempt_id)
            assert gone.attempt_id not in running["prefill-0"].prefill.unfinished
            heir = attempt_of(range(60 + start, 97 + start))
            assert await running.run(heir) == reference(heir)
        await running.assert_at_rest()


@pytest.mark.parametrize("num_tokens", [5, 6, 7])
async def test_only_tokens_whose_kv_was_written_are_kept(num_tokens: int) -> None:
    """The last token was never fed back: with 10 + 6 tokens the fourth page of 4 is not full."""
    async with fleet() as running:
        first = attempt_of(range(10), max_tokens=num_tokens)
        answer = await running.run(first)
        follow_up = attempt_of([*first.token_ids, *answer, 1, 2, 3, 4, 5])
        reservation = await running["decode-0"].client.reserve(follow_up)
        assert reservation.num_cached_tokens == (10 + num_tokens - 1) // 4 * 4
        await running["decode-0"].client.cancel(follow_up.attempt_id)
        again = attempt_of(follow_up.token_ids)
        assert await running.run(again) == reference(again)


async def test_what_a_cancelled_stream_wrote_is_kept_for_the_next_turn() -> None:
    """A stop string ends a stream by a cancel, and the session goes on from there."""
    async with fleet() as running:
        running["decode-0"].decode.before_step = lambda: time.sleep(0.005)
        first = attempt_of(range(10), max_tokens=60)
        answer = await stream_some(running, first, 11)
        running["decode-0"].decode.before_step = lambda: None
        follow_up = attempt_of([*first.token_ids, *answer, 1, 2, 3])
        reservation = await running["decode-0"].client.reserve(follow_up)
        assert reservation.num_cached_tokens >= 20
        await running["decode-0"].client.cancel(follow_up.attempt_id)
        again = attempt_of(follow_up.token_ids)
        assert await running.run(again) == reference(again)
        await running.assert_at_rest()


async def test_two_attempts_share_the_pages_of_a_prefix() -> None:
    async with fleet(num_pages=64) as running:
        system = list(range(200, 232))
        await running.run(attempt_of([*system, 1], max_tokens=2))
        attempts = [attempt_of([*system, 2 + i], max_tokens=12) for i in range(4)]
        reservations = [await running["decode-0"].client.reserve(a) for a in attempts]
        assert [r.num_cached_tokens for r in reservations] == [32] * 4
        assert running["decode-0"].status.num_pages_used == 8 + 4 * 4
        for attempt in attempts:
            await running["decode-0"].client.cancel(attempt.attempt_id)
        again = [attempt_of(a.token_ids, max_tokens=12) for a in attempts]
        assert await asyncio.gather(*map(running.run, again)) == [reference(a) for a in again]
        await running.assert_at_rest()


async def test_d06_tenants_share_no_pages_on_either_worker() -> None:
    """Neither prompts nor answers of one salt are found under another one, or under none."""
    async with fleet() as running:
        first = replace(attempt_of(range(10), max_tokens=9), cache_salt="a")
        next_turn = (*first.token_ids, *await running.run(first), 5, 6)
        for salt, num_on_prefill, num_on_decode in ((None, 0, 0), ("b", 0, 0), ("a", 8, 16)):
            asked = replace(attempt_of(next_turn), cache_salt=salt)
            reservation = await running["decode-0"].client.reserve(asked)
            assert reservation.num_cached_tokens == num_on_decode
            await running["decode-0"].client.cancel(asked.attempt_id)
            served = replace(asked, attempt_id=f"served-{salt}")
            assert await running.run(served) == reference(served)
            assert running.results[served.attempt_id].num_cached_tokens == num_on_prefill
        await running.assert_at_rest()
