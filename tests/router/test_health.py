"""Health tells the truth: down, stuck, compiling, draining; and it recovers."""

import asyncio
import contextlib

import pytest

from jpd.errors import WorkerError
from tests.router.rig import rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker, one_each


@virtual
async def test_a_well_fleet_is_ok() -> None:
    async with rig(*one_each()) as r:
        health = r.router.health()
        assert (health.status, health.reasons, health.is_ready) == ("ok", (), True)
        workers = [(worker.name, worker.state) for worker in health.workers]
        assert workers == [("prefill-0", "up"), ("decode-0", "up")]


@virtual
async def test_c08_a_frozen_engine_turns_health_red_and_back() -> None:
    async with rig(*one_each(step_seconds=0.1), options={"stuck_seconds": 5.0}) as r:
        task = r.begin(r.request(max_tokens=500))
        await asyncio.sleep(10.0)
        assert r.router.health().status == "ok"
        r["decode-0"].freeze()
        await asyncio.sleep(6.0)
        health = r.router.health()
        assert health.status == "failed" and not health.is_ready
        assert "decode-0 is down: no progress for 5 s" in " ".join(health.reasons)
        with pytest.raises(WorkerError):
            await task
        with pytest.raises(WorkerError, match="no progress"):
            await r.ask(r.request())
        r["decode-0"].thaw()
        await asyncio.sleep(1.0)
        assert r.router.health().status == "ok"
        assert (await r.ask(r.request())).finish_reason == "length"


@virtual
async def test_an_idle_worker_is_not_stuck_however_long_it_has_been_idle() -> None:
    workers = one_each(prefill_token_seconds=1.0, step_seconds=1.0)
    async with rig(*workers, options={"stuck_seconds": 5.0}) as r:
        await asyncio.sleep(600.0)
        assert r.router.health().status == "ok"
        task = r.begin(r.request(max_tokens=20))
        for _ in range(10):
            await asyncio.sleep(1.0)
            assert r.router.health().status == "ok", "its last turn was long ago, and that is fine"
        await task


@virtual
async def test_a_worker_that_does_not_answer_is_down() -> None:
    async with rig(FakeWorker("p", "prefill"), FakeWorker("d", "decode")) as r:
        r["d"].status_hangs = True
        await asyncio.sleep(6.0)
        assert "d is down: no status within 5 s" in r.router.health().reasons[1]
        gauges = r.metrics.render().decode()
        assert 'kv_pages_in_use{worker="p"}' in gauges
        assert 'kv_pages_in_use{worker="d"}' not in gauges, "nobody knows how many"
        r["d"].status_hangs = False
        await asyncio.sleep(6.0)
        assert r.router.health().status == "ok"
        assert 'kv_pages_in_use{worker="d"}' in r.metrics.render().decode()


@virtual
async def test_a_status_that_raises_is_a_worker_that_is_down_and_is_asked_again() -> None:
    class Broken(FakeWorker):
        is_broken = True

        async def status(self):  # type: ignore[no-untyped-def]
            if self.is_broken:
                raise ConnectionResetError("peer")
            return await super().status()

    async with rig(FakeWorker("p", "prefill"), Broken("d", "decode")) as r:
        assert "ConnectionResetError" in r.router.health().reasons[1]
        r["d"].is_broken = False
        await asyncio.sleep(1.0)
        assert r.router.health().status == "ok"


@virtual
async def test_a_missing_role_is_failed_and_a_missing_replica_degraded() -> None:
    workers = [FakeWorker("p", "prefill"), FakeWorker("d0", "decode"), FakeWorker("d1", "decode")]
    async with rig(*workers) as r:
        r["d0"].die("engine raised: boom")
        await asyncio.sleep(1.0)
        health = r.router.health()
        assert (health.status, health.is_ready) == ("degraded", True)
        assert health.reasons == ("d0 is down: engine raised: boom",)
        r["p"].die()
        await asyncio.sleep(1.0)
        health = r.router.health()
        assert (health.status, health.is_ready) == ("failed", False)
        assert health.reasons[0] == "no prefill worker is available"


@virtual
async def test_a_decode_worker_that_prefills_short_prompts_keeps_the_server_degraded() -> None:
    async with rig(*one_each(), local_prefill_tokens=32) as r:
        r["prefill-0"].die()
        await asyncio.sleep(1.0)
        assert r.router.health().status == "degraded"
        r["decode-0"].can_prefill = False
        await asyncio.sleep(1.0)


@virtual
async def test_a_compilation_after_ready_is_counted_and_degrades() -> None:
    async with rig(*one_each()) as r:
        r["decode-0"].num_compilations_after_ready = 2
        await asyncio.sleep(1.0)
        assert r.metrics.value("jpd:compilations_after_ready_total") == 2
        r["decode-0"].num_compilations_after_ready = 3
        await asyncio.sleep(1.0)
        assert r.metrics.value("jpd:compilations_after_ready_total") == 3
        health = r.router.health()
        assert health.status == "degraded"
        assert health.reasons == ("decode-0: 3 compilations after ready",)


@virtual
async def test_a_draining_worker_takes_no_new_work() -> None:
    workers = [FakeWorker("p", "prefill"), FakeWorker("d0", "decode"), FakeWorker("d1", "decode")]
    async with rig(*workers) as r:
        await r["d0"].drain()
        await asyncio.sleep(1.0)
        assert r.router.health().status == "degraded"
        for _ in range(4):
            assert (await r.ask(r.request())).timeline.decode_worker == "d1"


@virtual
async def test_pages_in_use_are_exported() -> None:
    async with rig(*one_each(step_seconds=1.0)) as r:
        task = r.begin(r.request((1,) * 20, max_tokens=20))
        await asyncio.sleep(1.0)
        assert r.metrics.value("jpd:kv_pages_in_use", worker="decode-0") == 3
        assert r.metrics.value("jpd:requests_running", worker="decode-0", role="decode") == 1
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@virtual
async def test_a_worker_that_is_down_at_the_start_may_come_later() -> None:
    prefill, decode = one_each()
    decode.die("still loading")
    async with rig(prefill, decode) as r:
        assert r.router.health().status == "failed"
        decode.revive()
        await asyncio.sleep(1.0)
        assert (await r.ask(r.request())).finish_reason == "length"
