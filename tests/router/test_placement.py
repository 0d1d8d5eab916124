"""Who gets the work: load by phase, suspension, the path of a prompt, every policy."""

import asyncio
from typing import get_args

import pytest

from jpd.config import PolicyName
from jpd.errors import RequestError, WorkerError, WorkerLostError
from tests.router.rig import cancel, counted, fleet, prefills, rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker, one_each


@virtual
async def test_b01_prefill_load_ends_with_the_prefill_reply() -> None:
    async with rig(*fleet(2, 1, slots=64, pages=2000, step_seconds=0.1)) as r:
        tasks = [r.begin(r.request((1,) * 10, max_tokens=200)) for _ in range(20)]
        await asyncio.sleep(1.0)
        assert r.view("d0").num_rows == 20
        for name in ("p0", "p1"):
            assert r.view(name).num_prefills == 0
            assert r.view(name).num_prefill_tokens == 0
            assert r.metrics.value("jpd:requests_running", worker=name, role="prefill") == 0
        before = prefills(r)
        new = [r.begin(r.request((2,) * 10, max_tokens=2)) for _ in range(10)]
        await asyncio.gather(*new)
        assert prefills(r)["p0"] - before["p0"] == 5
        await cancel(*tasks)


@virtual
async def test_b02_tokens_of_a_long_prompt_count_from_the_first_moment() -> None:
    workers = fleet(2, 1, slots=64, pages=2000, prefill_token_seconds=0.001)
    async with rig(*workers, max_model_len=4096) as r:
        long = r.begin(r.request((1,) * 2000))
        await asyncio.sleep(0.01)
        (busy,) = [name for name, worker in r.workers.items() if worker.attempts["prefill"]]
        short = [r.begin(r.request((2,) * 8, max_tokens=2)) for _ in range(5)]
        await asyncio.gather(*short)
        assert len(r[busy].attempts["prefill"]) == 1
        await cancel(long)
        assert r.view("p0").num_prefill_tokens == r.view("p1").num_prefill_tokens == 0


@virtual
async def test_b09_bad_requests_never_count_against_a_worker() -> None:
    prefill, decode = one_each()
    decode.max_model_len = 64  # stricter than the router knows
    async with rig(prefill, decode, max_model_len=512) as r:
        for _ in range(20):
            with pytest.raises(RequestError):
                await r.ask(r.request((1,) * 600))
            with pytest.raises(RequestError, match="decode-0 holds 64"):
                await r.ask(r.request((1,) * 100))
        assert not prefill.attempts["prefill"], "a02: nothing was prefilled for them"
        assert not r.view("decode-0").is_suspended
        assert r.router.health().status == "ok"
        assert (await r.ask(r.request())).finish_reason == "length"
        assert r.metrics.value("jpd:requests_failed_total", reason="bad_request") == 40


@virtual
async def test_b10_a_worker_that_fails_everything_stops_being_chosen_until_it_is_well() -> None:
    async with rig(*fleet(2, 1)) as r:
        r["p0"].script("prefill", WorkerLostError("p0", "500"), times=100)
        for _ in range(100):
            assert (await r.ask(r.request())).finish_reason == "length"
        assert len(r["p0"].attempts["prefill"]) <= 4
        assert r.view("p0").is_suspended
        assert r.router.health().status == "degraded"
        for _ in range(40):  # probed now and then, less and less often while it fails
            await asyncio.sleep(10.0)
            await r.ask(r.request())
            await r.ask(r.request())
        assert len(r["p0"].attempts["prefill"]) <= 25
        r["p0"]._faults.add("prefill", WorkerLostError("p0", "500"), 0)
        r["p0"]._faults._entries.clear()
        await asyncio.sleep(31.0)
        for _ in range(10):
            await r.ask(r.request())
        assert not r.view("p0").is_suspended
        before = len(r["p0"].attempts["prefill"])
        for _ in range(10):
            await r.ask(r.request())
        assert len(r["p0"].attempts["prefill"]) - before == 5


@virtual
async def test_b11_no_prefill_worker_is_an_error_or_a_counted_local_prefill() -> None:
    for limit in (0, 64):
        async with rig(*one_each(), local_prefill_tokens=limit) as r:
            r["prefill-0"].die("no power")
            await asyncio.sleep(1.0)
            if limit == 0:
                assert r.router.health().status == "failed"
                with pytest.raises(WorkerError, match="prefill-0: no power"):
                    await r.ask(r.request((1,) * 50))
            else:
                assert r.router.health().status == "degraded"
                answer = await r.ask(r.request((1,) * 50))
                assert answer.timeline.path == ["local"]
                assert r.metrics.value("jpd:router_decisions_total", path="local") == 1
                with pytest.raises(WorkerError, match="no prefill worker is available"):
                    await r.ask(r.request((1,) * 65))
            r["prefill-0"].revive()
            await asyncio.sleep(1.0)
            answer = await r.ask(r.request((1,) * 65))
            assert answer.timeline.path == ["disaggregated"]
            assert r.router.health().status == "ok"


@virtual
async def test_the_uncached_suffix_decides_the_path() -> None:
    workers = one_each(prefix_cache=True)
    async with rig(*workers, local_prefill_tokens=8) as r:
        prompt = list(range(40))
        first = await r.ask(r.request(prompt, max_tokens=9))
        assert first.timeline.path == ["disaggregated"]
        assert first.timeline.num_cached_tokens == 0
        turn = prompt + first.token_ids + [3, 4]
        second = await r.ask(r.request(turn, max_tokens=4))
        assert second.timeline.path == ["local"], "51 tokens, 48 of them cached"
        assert second.timeline.prefill_worker == second.timeline.decode_worker == "decode-0"
        assert second.timeline.num_cached_tokens == 48
        assert second.timeline.kv_bytes == 0 and second.timeline.transfer_seconds == 0.0
        assert second.token_ids == counted(turn, 4)
        assert r.metrics.value("jpd:prefix_cache_hit_tokens_total") == 48


@virtual
async def test_a_colocated_fleet_serves_without_prefill_workers() -> None:
    async with rig(FakeWorker("c0", "colocated"), FakeWorker("c1", "colocated")) as r:
        answer = await r.ask(r.request())
        assert answer.timeline.path == ["local"]
        assert r.router.health().status == "ok"
        forced = await r.ask(r.request(disaggregate=True))
        assert forced.timeline.path == ["disaggregated"]
        assert forced.timeline.prefill_worker != forced.timeline.decode_worker
        assert forced.token_ids == answer.token_ids


@virtual
async def test_b15_cancelling_everything_empties_the_load_at_once() -> None:
    async with rig(*one_each(slots=20, pages=400, step_seconds=0.1)) as r:
        tasks = [r.begin(r.request(max_tokens=200)) for _ in range(18)]
        await asyncio.sleep(1.0)
        assert r.view("decode-0").num_rows == 18
        await cancel(*tasks)
        assert r.view("decode-0").num_rows == 0
        assert r.metrics.value("jpd:requests_running", worker="decode-0", role="decode") == 0


@virtual
async def test_a_request_that_fits_only_a_large_worker_goes_there() -> None:
    small, large = FakeWorker("d0", "decode", pages=4), FakeWorker("d1", "decode", pages=40)
    async with rig(FakeWorker("p0", "prefill"), small, large) as r:
        for _ in range(3):
            answer = await r.ask(r.request((1,) * 60, max_tokens=20))
            assert answer.timeline.decode_worker == "d1"
        large.die()
        await asyncio.sleep(1.0)
        with pytest.raises(WorkerError, match="no decode worker is available"):
            await r.ask(r.request((1,) * 60, max_tokens=20))


@pytest.mark.parametrize("name", get_args(PolicyName))
@virtual
async def test_every_policy_serves_a_mixed_load(name: str) -> None:
    workers = fleet(3, 3, prefix_cache=True, step_seconds=0.01, prefill_token_seconds=0.001)
    async with rig(*workers, policy=name) as r:
        requests = [
            r.request((n % 5,) * (16 * (n % 4) + 1), session_id=f"s{n % 6}" if n % 2 else None)
            for n in range(40)
        ]
        answers = await asyncio.gather(*map(r.ask, requests))
        assert all(answer.finish_reason == "length" for answer in answers)
