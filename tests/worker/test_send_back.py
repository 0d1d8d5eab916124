"""A prefix that only the decode worker has goes back to who prefills; or is computed, and told."""

import asyncio
from dataclasses import replace

import pytest

from jpd.transfer.faulty import Fault, FaultyTransfer, Stage
from jpd.worker.protocol import Attempt
from tests.worker.fleet import TestFleet, attempt_of, fleet
from tests.worker.paper import Gate, reference

PAGE_SIZE, PAGE_BYTES = 4, 2 * 4 * 4  # of two layers four int32
FIRST = tuple(range(10))


async def second_turn(running: TestFleet) -> Attempt:
    """After a first one: its prompt is known on both workers, its answer on the decode worker."""
    first = attempt_of(FIRST, max_tokens=9)
    answer = await running.run(first)
    return attempt_of((*FIRST, *answer, 5, 6), max_tokens=4)


def broken(*faults: Fault):
    return lambda inner: FaultyTransfer(inner, faults)


async def test_only_what_is_new_is_computed_and_only_what_is_missing_travels() -> None:
    async with fleet() as running:
        attempt = await second_turn(running)  # of 21 tokens, 16 on decode and 8 on prefill
        assert await running.run(attempt, is_sent_back=True) == reference(attempt)
        result = running.results[attempt.attempt_id]
        assert (result.num_cached_tokens, result.num_computed_tokens) == (16, 5)
        assert result.sent_back is not None
        assert (result.sent_back.num_tokens, result.sent_back.num_bytes) == (8, 2 * PAGE_BYTES)
        await running.assert_at_rest()

        third = replace(attempt, attempt_id="third")  # both have everything now
        assert await running.run(third, is_sent_back=True) == reference(third)
        assert running.results["third"].sent_back is None


async def test_without_the_routers_word_nothing_is_asked_for() -> None:
    async with fleet() as running:
        attempt = await second_turn(running)
        assert await running.run(attempt) == reference(attempt)
        result = running.results[attempt.attempt_id]
        assert (result.sent_back, result.num_cached_tokens) == (None, 8)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("drop", piece_index=0, attempt_id="turn", stage="arrive"),
        Fault("raise", piece_index=0, attempt_id="turn", stage="arrive"),
        Fault("raise", piece_index=0, attempt_id="turn", stage="pull"),
        Fault("raise", piece_index=0, attempt_id="turn", stage="offer"),
        Fault("delay", piece_index=0, attempt_id="turn", delay_seconds=0.5, stage="offer"),
    ],
    ids=lambda fault: f"{fault.action}-{fault.stage}",
)
@pytest.mark.field_report("A03", "A10")
async def test_what_does_not_come_back_is_computed_and_the_answer_says_so(fault: Fault) -> None:
    options = {"transfer_wrapper": broken(fault), "transfer_timeout_seconds": 0.3}
    async with fleet(**options) as running:
        attempt = replace(await second_turn(running), attempt_id="turn")
        assert await running.run(attempt, is_sent_back=True) == reference(attempt)
        result = running.results["turn"]
        assert result.sent_back is not None and result.sent_back.num_tokens == 0
        assert (result.num_cached_tokens, result.num_computed_tokens) == (8, 13)
        await running.assert_at_rest()


@pytest.mark.parametrize("stage", ["offer", "pull", "arrive"])
@pytest.mark.field_report("A04", "A18")
async def test_a_cancel_while_pages_come_back_frees_both_sides_within_a_second(
    stage: Stage,
) -> None:
    late = Fault("delay", attempt_id="turn", delay_seconds=0.2, stage=stage)
    async with fleet(transfer_wrapper=broken(late)) as running:
        attempt = replace(await second_turn(running), attempt_id="turn")
        task = asyncio.create_task(running.run(attempt, is_sent_back=True))
        while not running["prefill-0"].status.num_prefills_waiting:
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await running.assert_at_rest(seconds=1.0)
        # Pages that were waited for are another's now: what comes late is written nowhere.
        other = attempt_of(range(50, 72), max_tokens=6)
        assert await running.run(other) == reference(other)


async def test_a_reservation_that_is_gone_is_told_at_once() -> None:
    async with fleet(transfer_timeout_seconds=30.0) as running:
        attempt = await second_turn(running)
        decode, prefill = running["decode-0"].client, running["prefill-0"].client
        reservation = await decode.reserve(attempt)
        assert reservation is not None
        await decode.cancel(attempt.attempt_id)
        asked = prefill.prefill(attempt, replace(reservation, is_sent_back=True))
        result = await asyncio.wait_for(asked, 5)
        assert result.sent_back is not None and result.sent_back.num_tokens == 0
        assert running["decode-0"].status.num_unknown_attempts == 1
        await prefill.cancel(attempt.attempt_id)


async def test_others_are_prefilled_while_one_waits_for_its_pages() -> None:
    late = Fault("delay", attempt_id="turn", delay_seconds=0.3)
    async with fleet(transfer_wrapper=broken(late)) as running:
        attempt = replace(await second_turn(running), attempt_id="turn")
        waiting = asyncio.create_task(running.run(attempt, is_sent_back=True))
        while not running["prefill-0"].status.num_prefills_waiting:
            await asyncio.sleep(0.002)
        assert running["prefill-0"].status.num_prefill_tokens_waiting == len(attempt.token_ids)
        other = attempt_of(range(50, 72), max_tokens=2)
        assert await running.run(other) == reference(other)
        assert not waiting.done()
        assert await waiting == reference(attempt)


async def test_a_worker_that_ends_while_pages_come_back_ends_the_attempt() -> None:
    late = Fault("drop", attempt_id="turn")
    async with fleet(transfer_wrapper=broken(late)) as running:
        attempt = replace(await second_turn(running), attempt_id="turn")
        gate = Gate()
        running["prefill-0"].prefill.before_step = gate
        task = asyncio.create_task(running.run(attempt, is_sent_back=True))
        while not running["prefill-0"].status.num_prefills_waiting:
            await asyncio.sleep(0.002)
        await asyncio.to_thread(running["prefill-0"].worker.close)
        with pytest.raises(Exception, match="prefill-0"):
            await asyncio.wait_for(task, 5)
