"""Loop, health, drain and roles of a worker."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable

import pytest

from jpd.errors import WorkerError, WorkerLostError
from jpd.worker import worker as worker_module
from jpd.worker.inbox import Call
from jpd.worker.worker import Worker
from tests.worker.fleet import attempt_of, fleet, start_fleet
from tests.worker.paper import Gate, reference


def explode() -> None:
    raise RuntimeError("the engine fell over")


async def test_an_exception_in_the_loop_ends_its_attempts_and_nothing_else() -> None:
    roles = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    async with fleet(roles=roles, num_pages=100) as running:
        running["decode-0"].decode.before_step = lambda: time.sleep(0.01)
        doomed = [attempt_of(range(i, i + 9), max_tokens=60) for i in range(3)]
        silent = attempt_of(range(9), max_tokens=60)
        tasks = [asyncio.ensure_future(running.run(attempt)) for attempt in doomed]
        await running["decode-0"].client.reserve(silent)
        while not all(len(running.tokens.get(a.attempt_id, ())) > 2 for a in doomed):
            await asyncio.sleep(0.005)
        running["decode-0"].decode.before_step = explode
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, WorkerLostError) for error in errors)
        status = running["decode-0"].status
        assert not status.healthy and "the engine fell over" in status.reason
        assert status.num_slots_used == 0
        with pytest.raises(WorkerLostError, match="the engine fell over"):
            await running["decode-0"].client.reserve(attempt_of(range(3)))
        await running["decode-0"].client.cancel(silent.attempt_id)  # holds nothing: no error
        survivor = attempt_of(range(9))
        assert await running.run(survivor, decode="decode-1") == reference(survivor)
        assert running["decode-1"].status.healthy and running["prefill-0"].status.healthy


async def test_an_exception_in_prefill_is_told_to_all_who_wait_for_it() -> None:
    async with fleet() as running:
        gate = Gate()
        gate.close()
        running["prefill-0"].prefill.before_step = lambda: (gate(), explode())
        attempts = [attempt_of(range(i, i + 9)) for i in range(3)]
        tasks = [asyncio.ensure_future(running.run(attempt)) for attempt in attempts]
        while running["decode-0"].status.num_slots_used < 3:
            await asyncio.sleep(0.002)
        gate.open()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, WorkerLostError) for error in errors)
        assert not running["prefill-0"].status.healthy and running["decode-0"].status.healthy


async def test_a_call_that_raises_is_told_to_those_behind_it_too() -> None:
    async with fleet() as running:
        gate = Gate()
        gate.close()
        running["decode-0"].decode.before_step = gate
        busy = asyncio.ensure_future(running.run(attempt_of(range(9))))
        await asyncio.to_thread(gate.entered.wait, 5)
        failed: list[Exception] = []
        running["decode-0"].worker.submit(Call(explode, failed.append))
        behind = asyncio.ensure_future(running["decode-0"].client.reserve(attempt_of(range(9))))
        await asyncio.sleep(0.01)
        gate.open()
        for waiting in (behind, busy):
            with pytest.raises(WorkerLostError, match="the engine fell over"):
                await asyncio.wait_for(waiting, 5)
        assert isinstance(failed[0], WorkerLostError)


@pytest.mark.field_report("C15")
async def test_an_attempt_that_cannot_be_taken_in_ends_alone() -> None:
    """I4: whatever the engine thinks of one attempt is no matter of its neighbours."""

    def refuse(_: object) -> None:
        raise ValueError("not this one")

    async with fleet() as running:
        neighbour = attempt_of(range(9), max_tokens=40)
        streaming = asyncio.ensure_future(running.run(neighbour))
        while len(running.tokens.get(neighbour.attempt_id, ())) < 2:  # it is in the batch
            await asyncio.sleep(0.002)
        for engine, verb in (
            (running["prefill-0"].prefill, "add"),
            (running["decode-0"].decode, "insert"),
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine, verb, refuse)
                with pytest.raises(WorkerError, match="not this one"):
                    await running.run(attempt_of(range(30, 50)))
        assert await streaming == reference(neighbour)
        await running.assert_at_rest()
        assert all(member.status.healthy for member in running.members.values())


async def test_a_stuck_turn_shows_in_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "STALL_SECONDS", 0.1)
    async with fleet() as running:
        gate = Gate()
        running["decode-0"].decode.before_step = gate
        gate.close()
        attempt = attempt_of(range(9))
        task = asyncio.ensure_future(running.run(attempt))
        await asyncio.to_thread(gate.entered.wait, 5)
        assert running["decode-0"].status.healthy
        await asyncio.sleep(0.15)
        assert not running["decode-0"].status.healthy
        assert "one turn of its loop" in running["decode-0"].status.reason
        gate.open()
        assert await task == reference(attempt)
        assert running["decode-0"].status.healthy


async def test_drain_waits_for_the_running_and_admits_no_new_ones() -> None:
    async with fleet() as running:
        running["decode-0"].decode.before_step = lambda: time.sleep(0.005)
        attempt = attempt_of(range(9), max_tokens=30)
        task = asyncio.ensure_future(running.run(attempt))
        while not running.tokens.get(attempt.attempt_id):
            await asyncio.sleep(0.002)
        draining = asyncio.ensure_future(running["decode-0"].client.drain())
        await asyncio.sleep(0.02)
        assert not draining.done()
        assert running["decode-0"].status.draining
        assert await running["decode-0"].client.reserve(attempt_of(range(3))) is None
        assert await task == reference(attempt)
        await asyncio.wait_for(draining, 5)


async def test_a_draining_prefill_worker_is_lost_to_new_attempts() -> None:
    async with fleet() as running:
        await running["prefill-0"].client.drain()
        with pytest.raises(WorkerLostError, match="draining"):
            await running.run(attempt_of(range(9)))
        await running.assert_at_rest()


async def test_set_role_takes_an_idle_worker_and_what_it_was_built_for() -> None:
    async with fleet(roles={"both-0": "colocated", "decode-0": "decode"}) as running:
        client = running["both-0"].client
        held = attempt_of(range(9))
        await client.reserve(held)
        with pytest.raises(WorkerError, match="drain first"):
            await client.set_role("decode")
        await client.cancel(held.attempt_id)
        await client.drain()
        await client.set_role("prefill")
        assert client.role == "prefill" and not running["both-0"].status.draining
        with pytest.raises(WorkerError, match="role prefill reserves nothing"):
            await client.reserve(attempt_of(range(9)))
        attempt = attempt_of(range(9))
        assert await running.run(attempt, prefill="both-0") == reference(attempt)
        with pytest.raises(WorkerError, match="its executables are those of decode"):
            await running["decode-0"].client.set_role("prefill")


async def test_room_is_told_after_it_was_freed() -> None:
    async with fleet(slots=1) as running:
        client = running["decode-0"].client
        room = asyncio.Event()
        client.on_room(room.set)
        first, second = attempt_of(range(9)), attempt_of(range(9))
        assert await client.reserve(first) is not None
        assert await client.reserve(second) is None
        assert not room.is_set()
        await client.cancel(first.attempt_id)
        await asyncio.wait_for(room.wait(), 5)
        assert await client.reserve(second) is not None
        await client.cancel(second.attempt_id)


async def test_a_cancelled_reserve_leaves_no_reservation() -> None:
    async with fleet() as running:
        gate = Gate()
        gate.close()
        running["decode-0"].decode.before_step = gate
        busy = asyncio.ensure_future(running.run(attempt_of(range(9), max_tokens=3)))
        await asyncio.to_thread(gate.entered.wait, 5)
        asking = asyncio.ensure_future(running["decode-0"].client.reserve(attempt_of(range(9))))
        await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        gate.open()
        await busy
        await running.assert_at_rest()


async def test_closing_ends_the_thread_and_tells_those_who_wait() -> None:
    async with fleet() as running:
        running["decode-0"].decode.before_step = lambda: time.sleep(0.01)
        attempt = attempt_of(range(9), max_tokens=60)
        task = asyncio.ensure_future(running.run(attempt))
        while len(running.tokens.get(attempt.attempt_id, ())) < 2:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(running["decode-0"].worker.close)
        with pytest.raises(WorkerLostError, match="closed"):
            await task
        assert "worker-decode-0" not in [thread.name for thread in threading.enumerate()]
        assert not running["decode-0"].status.healthy


async def test_a_worker_closed_while_it_compiles_ends_between_two_executables() -> None:
    started, num_made = threading.Event(), 0

    def warm_up(after_each: Callable[[], None]) -> None:
        nonlocal num_made
        for num_made in range(1, 1000):  # noqa: B007
            started.set()
            time.sleep(0.005)
            after_each()

    async with fleet() as running:
        parts = dataclasses.replace(running["prefill-0"].worker._parts, warm_up=warm_up)
        worker = Worker("late-0", "prefill", parts)
        running.transfer.register("late-0", running["prefill-0"].kv.mesh, worker.deliver)
        worker.start()
        assert await asyncio.to_thread(started.wait, 5)
        await asyncio.to_thread(worker.close)
        assert isinstance(worker.ready.exception(0), WorkerLostError)
        assert num_made < 500 and not worker.status().healthy


def test_a_second_event_loop_can_use_the_same_fleet() -> None:
    running = start_fleet()
    try:
        attempt = attempt_of(range(9))
        assert asyncio.run(running.run(attempt)) == reference(attempt)
        again = attempt_of(range(20))
        assert asyncio.run(running.run(again)) == reference(again)
    finally:
        running.close()


async def test_prefills_without_room_wait_their_turn_by_priority() -> None:
    async with fleet(num_pages={"prefill-0": 5, "decode-0": 60}, slots=8) as running:
        gate, order = Gate(), []
        running["prefill-0"].prefill.before_step = gate
        gate.close()

        async def run(name: str, priority: int) -> None:
            attempt = attempt_of(range(16), attempt_id=name, priority=priority, max_tokens=1)
            await running.run(attempt)
            order.append(name)

        tasks = []
        for name, priority in (("first", 0), ("second", 0), ("urgent", 5)):
            tasks.append(asyncio.ensure_future(run(name, priority)))
            while running["prefill-0"].status.num_prefills_waiting < len(tasks):
                if gate.entered.is_set():
                    break
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.02)
        gate.open()
        await asyncio.gather(*tasks)
        assert order == ["first", "urgent", "second"]
        await running.assert_at_rest()
