"""Faults that users of other systems met between prefill and decode, tried on our workers."""

import asyncio
import itertools
import random
import time

import pytest

from jpd.errors import PreemptedError, RequestError, TransferError
from jpd.transfer.faulty import Fault, FaultyTransfer
from jpd.transfer.protocol import KVPiece
from tests.worker.fleet import TestFleet, attempt_of, fleet, is_at_rest
from tests.worker.paper import Gate, reference


def broken(*faults: Fault):
    return lambda inner: FaultyTransfer(inner, faults)


async def wait_for(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        await asyncio.sleep(0.002)


async def prefilled(running: TestFleet, attempt) -> int:
    reservation = await running["decode-0"].client.reserve(attempt)
    assert reservation is not None
    return (await running["prefill-0"].client.prefill(attempt, reservation)).token_id


async def test_a01_cancel_between_prefill_and_decode_frees_both_sides_at_once() -> None:
    async with fleet() as running:
        attempt = attempt_of(range(20))
        await prefilled(running, attempt)
        assert running["decode-0"].status.num_slots_used == 1
        for member in running.members.values():
            await member.client.cancel(attempt.attempt_id)
        await running.assert_at_rest(seconds=1)


async def test_a06_no_message_of_two_hundred_requests_names_an_unknown_attempt() -> None:
    async with fleet(slots=8, num_pages=128) as running:
        attempts = [attempt_of(range(n, n + 5 + n % 9), max_tokens=2) for n in range(200)]
        for some in range(0, 200, 8):
            await asyncio.gather(*(running.run(attempt) for attempt in attempts[some : some + 8]))
        await running.assert_at_rest()
        for name in ("prefill-0", "decode-0"):
            status = running[name].status
            assert (status.num_unknown_attempts, status.num_late_pieces) == (0, 0)


async def test_a03_a_lost_piece_ends_the_attempt_within_the_transfer_deadline() -> None:
    wrapper = broken(Fault("drop", piece_index=1, attempt_id="lost"))
    async with fleet(transfer_wrapper=wrapper, transfer_timeout_seconds=0.3) as running:
        lost = attempt_of(range(20), attempt_id="lost")
        start = time.monotonic()
        neighbours = [attempt_of(range(i, i + 9)) for i in range(1, 12)]
        results = await asyncio.gather(
            running.run(lost), *map(running.run, neighbours), return_exceptions=True
        )
        assert isinstance(results[0], TransferError) and "2 KV pages of lost" in str(results[0])
        assert len(running.tokens["lost"]) == 1, "a token came from a half-filled cache"
        assert 0.3 <= time.monotonic() - start < 2
        assert results[1:] == [reference(attempt) for attempt in neighbours]
        await running.assert_at_rest()


async def test_a03_a_lost_piece_and_an_abort_while_it_is_waited_for() -> None:
    wrapper = broken(Fault("drop", piece_index=0))
    async with fleet(transfer_wrapper=wrapper, transfer_timeout_seconds=60) as running:
        attempt = attempt_of(range(20))
        token = await prefilled(running, attempt)
        stream = running["decode-0"].client.decode(attempt.attempt_id, token)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await running.assert_at_rest(seconds=1)


async def test_a04_a_late_copy_of_an_aborted_attempt_never_touches_the_next_one() -> None:
    wrapper = broken(Fault("delay", piece_index=0, attempt_id="x", delay_seconds=0.3))
    pages = {"prefill-0": 64, "decode-0": 6}  # the next attempt must reuse the pages of x
    async with fleet(transfer_wrapper=wrapper, num_pages=pages) as running:
        x = attempt_of(range(500, 516), max_tokens=8, attempt_id="x")
        await prefilled(running, x)
        await wait_for(lambda: running.transfer.num_faults == 1)  # its copy is on the way
        for member in running.members.values():
            await member.client.cancel("x")
        # y generates slowly enough for the copy of x to land in the middle of it
        running["decode-0"].decode.before_step = lambda: time.sleep(0.06)
        y = attempt_of(range(16), max_tokens=8)
        tokens = await running.run(y)
        assert running["decode-0"].status.num_late_pieces == 1, "it came too late to do harm"
        assert tokens == reference(y)
        await running.assert_at_rest()


async def test_a08_leftovers_are_cleaned_without_new_work() -> None:
    wrapper = broken(Fault("drop", piece_index=0))
    pages = {"prefill-0": 12, "decode-0": 24}
    async with fleet(
        transfer_wrapper=wrapper, num_pages=pages, transfer_timeout_seconds=0.2
    ) as running:
        stuck = [attempt_of(range(i, i + 16)) for i in range(4)]
        for attempt in stuck:
            token = await prefilled(running, attempt)
            stream = running["decode-0"].client.decode(attempt.attempt_id, token)
            task = asyncio.ensure_future(anext(stream))
            task.add_done_callback(lambda task: task.exception())
        assert running["decode-0"].status.num_slots_used == 4
        await running.assert_at_rest(seconds=1)  # nobody asks for anything meanwhile
        with pytest.raises(TransferError):
            await running.run(attempt_of(range(16)))  # the probe is admitted at once


async def test_a09_pages_travel_as_they_were_however_the_cache_turns_over() -> None:
    wrapper = broken(Fault("delay", piece_index=0, attempt_id="slow", delay_seconds=0.3))
    pages = {"prefill-0": 8, "decode-0": 200}
    async with fleet(transfer_wrapper=wrapper, num_pages=pages, slots=40) as running:
        slow = attempt_of(range(900, 918), attempt_id="slow")
        others = [attempt_of(range(20 * i, 20 * i + 20), max_tokens=2) for i in range(20)]
        first, *rest = await asyncio.gather(running.run(slow), *map(running.run, others))
        assert first == reference(slow)
        assert rest == [reference(attempt) for attempt in others]
        await running.assert_at_rest()


async def test_a10_a_failed_piece_fails_its_attempt_promptly_on_both_sides() -> None:
    wrapper = broken(Fault("raise", piece_index=1, attempt_id="half"))
    async with fleet(transfer_wrapper=wrapper, transfer_timeout_seconds=60) as running:
        half, whole = attempt_of(range(20), attempt_id="half"), attempt_of(range(30, 50))
        results = await asyncio.gather(
            running.run(half), running.run(whole), return_exceptions=True
        )
        assert isinstance(results[0], TransferError)
        assert len(running.tokens["half"]) == 1
        assert results[1] == reference(whole)
        await running.assert_at_rest(seconds=2)


@pytest.mark.parametrize("is_asked_late", [False, True])
async def test_c16_a_last_piece_after_one_that_failed_makes_no_success_of_it(
    is_asked_late: bool,
) -> None:
    wrapper = broken(
        Fault("raise", piece_index=1, attempt_id="half"),
        Fault("delay", piece_index=2, attempt_id="half", delay_seconds=0.2),
    )
    async with fleet(transfer_wrapper=wrapper, transfer_timeout_seconds=60) as running:
        half, again = attempt_of(range(20), attempt_id="half"), attempt_of(range(20))
        token = await prefilled(running, half)
        decode = running["decode-0"]
        if is_asked_late:
            await wait_for(lambda: decode.status.num_late_pieces == 1)
        with pytest.raises(TransferError):
            async for event in decode.client.decode("half", token):
                pytest.fail(f"the failed attempt goes on: {event}")
        await wait_for(lambda: decode.status.num_late_pieces == 1)
        assert decode.status.num_slots_used == 0, "it was not taken up again"
        reservation = await decode.client.reserve(again)
        assert reservation is not None
        assert reservation.num_cached_tokens == 0, "half a prompt is no prefix"
        for member in running.members.values():
            for attempt in (half, again):
                await member.client.cancel(attempt.attempt_id)
        await running.assert_at_rest(seconds=2)


async def test_a10_a_piece_that_cannot_be_offered_fails_the_prefill_not_the_worker() -> None:
    class Refusing(FaultyTransfer):
        def offer(self, piece: KVPiece) -> None:
            if piece.attempt_id == "unlucky" and piece.page_start:
                raise OSError("no route")
            super().offer(piece)

    async with fleet(transfer_wrapper=lambda inner: Refusing(inner, ())) as running:
        unlucky = attempt_of(range(20), attempt_id="unlucky")
        with pytest.raises(
            TransferError, match="pages 2.2, layers 0.2 of unlucky cannot be sent: OSError"
        ):
            await running.run(unlucky)
        fine = attempt_of(range(20))
        assert await running.run(fine) == reference(fine)
        await running.assert_at_rest()


async def test_a11_aborts_after_arrival_and_before_decode_leak_nothing() -> None:
    async with fleet(slots=3, num_pages=24) as running:
        long = attempt_of(range(9), max_tokens=60)
        running["decode-0"].decode.before_step = lambda: time.sleep(0.002)
        streaming = asyncio.ensure_future(running.run(long))
        for round_number in range(100):
            arrival = attempt_of(range(round_number, round_number + 9), max_tokens=3)
            await prefilled(running, arrival)
            for member in running.members.values():
                await member.client.cancel(arrival.attempt_id)
        assert await streaming == reference(long)
        await running.assert_at_rest()
        fine = attempt_of(range(9))
        assert await running.run(fine) == reference(fine)


async def test_a12_the_result_of_an_aborted_chunk_is_thrown_away() -> None:
    async with fleet(chunk=8) as running:
        engine, gate = running["prefill-0"].prefill, Gate()
        engine.before_step = gate
        attempt = attempt_of(range(300, 324))
        reservation = await running["decode-0"].client.reserve(attempt)
        steps = []
        engine.before_step = lambda: (steps.append(1), len(steps) == 3 and gate())
        gate.close()
        answer = asyncio.ensure_future(running["prefill-0"].client.prefill(attempt, reservation))
        await wait_for(gate.entered.is_set)  # two of three chunks are computed
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        gate.open()
        await running["decode-0"].client.cancel(attempt.attempt_id)
        await running.assert_at_rest()
        assert all(member.status.num_pages_cached == 0 for member in running.members.values())


async def test_a13_a_prompt_that_prefill_refuses_is_not_decoded() -> None:
    async with fleet(num_pages={"prefill-0": 4, "decode-0": 32}) as running:
        neighbour = attempt_of(range(9), max_tokens=50)
        streaming = asyncio.ensure_future(running.run(neighbour))
        for _ in range(10):
            refused = attempt_of(range(17))
            with pytest.raises(RequestError, match="needs 5 KV pages, worker prefill-0 has 4"):
                await running.run(refused)
            assert running.tokens[refused.attempt_id] == []
        assert await streaming == reference(neighbour)
        await running.assert_at_rest()


async def test_a16_four_prefills_for_two_slots_start_two_and_two() -> None:
    async with fleet(slots=2) as running:
        attempts = [attempt_of(range(i, i + 9), max_tokens=8) for i in range(4)]
        client = running["decode-0"].client
        got = [await client.reserve(attempt) for attempt in attempts]
        assert [reservation is not None for reservation in got] == [True, True, False, False]
        for attempt in attempts[:2]:
            await client.cancel(attempt.attempt_id)
        assert await asyncio.gather(*map(running.run, attempts)) == [
            reference(attempt) for attempt in attempts
        ]
        await running.assert_at_rest()


async def test_a17_a_transfer_faster_than_the_answer_loses_nothing() -> None:
    async with fleet() as running:
        for number in range(200):
            attempt = attempt_of([number], max_tokens=2)
            reservation = await running["decode-0"].client.reserve(attempt)
            first = await running["prefill-0"].client.prefill(attempt, reservation)
            if number % 20 == 0:  # the KV is there long before decode is asked for
                await asyncio.sleep(0.02)
            tokens = [first.token_id]
            async for event in running["decode-0"].client.decode(
                attempt.attempt_id, first.token_id
            ):
                tokens += event.token_ids
            assert tokens == reference(attempt)
        await running.assert_at_rest()


async def test_a18_cancelling_everything_at_random_times_leaves_a_working_fleet() -> None:
    chance = random.Random(5)
    wrapper = broken(Fault("delay", piece_index=2, delay_seconds=0.02))
    pages = {"prefill-0": 40, "decode-0": 60}
    async with fleet(transfer_wrapper=wrapper, num_pages=pages, slots=8) as running:
        for _ in range(5):
            lengths = [chance.randrange(1, 60) for _ in range(60)]
            tasks = [
                asyncio.ensure_future(running.run(attempt_of(range(length), max_tokens=20)))
                for length in lengths
            ]
            for task in chance.sample(tasks, len(tasks)):
                await asyncio.sleep(chance.random() * 0.004)
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert not [e for e in ended if isinstance(e, Exception)]
            probe = attempt_of(range(70, 90))
            assert await asyncio.wait_for(running.run(probe), 5) == reference(probe)
            await running.assert_at_rest()
        assert all(map(is_at_rest, running.members.values()))


async def test_c12_a_row_that_must_grow_takes_the_room_of_mere_reservations() -> None:
    pages = {"prefill-0": 64, "decode-0": 20}
    async with fleet(num_pages=pages, reserve_tokens=4, slots=8) as running:
        growing = attempt_of(range(40), max_tokens=36)  # 11 pages at first, 19 at last
        running["decode-0"].decode.before_step = lambda: time.sleep(0.002)
        streaming = asyncio.ensure_future(running.run(growing))
        await wait_for(lambda: len(running.tokens.get(growing.attempt_id, ())) > 1)
        arrivals = [attempt_of(range(n, n + 7), max_tokens=8) for n in (100, 200, 300)]
        client = running["decode-0"].client
        held = [a for a in arrivals if await client.reserve(a) is not None]
        assert held, "there was room for somebody"
        assert await streaming == reference(growing)
        with pytest.raises(PreemptedError, match=f"of {growing.attempt_id}"):
            async for _ in client.decode(held[-1].attempt_id, 1):
                pass
        for attempt in held:
            await client.cancel(attempt.attempt_id)
        assert await running.run(attempt_of(range(9))) == reference(attempt_of(range(9)))
        await running.assert_at_rest()


async def test_g02_a_burst_of_transfers_takes_no_longer_a_piece_than_a_few() -> None:
    async def seconds_for(num_prompts: int) -> float:
        async with fleet(num_pages=40 * num_prompts, slots=num_prompts) as running:
            prompts = [range(1000 * n, 1000 * n + 100) for n in range(num_prompts)]
            start = time.monotonic()
            await asyncio.gather(*(running.run(attempt_of(p, max_tokens=2)) for p in prompts))
            return time.monotonic() - start

    few = min([await seconds_for(16) for _ in range(2)])
    many = min([await seconds_for(64) for _ in range(2)])
    assert many < 10 * few, "four times as many: what grows with the queue would make it sixteen"


async def test_g06_between_two_chunks_every_row_of_the_same_worker_takes_its_step() -> None:
    async with fleet(roles={"both-0": "colocated"}, num_pages=200) as running:
        steps, both = list[str](), running["both-0"]
        both.decode.before_step = lambda: (steps.append("row"), time.sleep(0.002))
        both.prefill.before_step = lambda: steps.append("chunk")
        short, long = attempt_of(range(5), max_tokens=100), attempt_of(range(40, 140), 2)

        def run(attempt):
            return asyncio.ensure_future(running.run(attempt, "both-0", "both-0"))

        streaming = run(short)
        await wait_for(lambda: len(running.tokens.get(short.attempt_id, ())) > 1)
        steps.clear()
        assert await run(long) == reference(long)
        assert steps.count("chunk") >= 13 and not streaming.done()
        assert all(pair != ("chunk", "chunk") for pair in itertools.pairwise(steps))
        assert await streaming == reference(short)
