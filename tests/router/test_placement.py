"""Who gets the work: load by phase, sessions, priority, suspension."""

import asyncio
import contextlib
from collections import Counter
from typing import get_args

import pytest

from jpd.cache.page_hashes import page_hashes
from jpd.config import PolicyName, SloConfig
from jpd.errors import OverloadedError, RequestError, WorkerError, WorkerLostError
from tests.router.rig import PAGE_SIZE, Rig, counted, rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker, one_each


def fleet(num_prefill: int, num_decode: int, **options: float) -> list[FakeWorker]:
    return [FakeWorker(f"p{n}", "prefill", **options) for n in range(num_prefill)] + [  # type: ignore[arg-type]
        FakeWorker(f"d{n}", "decode", **options)  # type: ignore[arg-type]
        for n in range(num_decode)
    ]


def prefills(r: Rig) -> Counter[str]:
    done = {name: len(worker.attempts["prefill"]) for name, worker in r.workers.items()}
    return Counter({name: number for name, number in done.items() if number})


async def cancel(*tasks: "asyncio.Task[object]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
async def test_b04_a_popular_session_does_not_pin_the_traffic() -> None:
    workers = fleet(4, 4, slots=64, pages=4000, prefill_token_seconds=0.0001, step_seconds=0.01)
    async with rig(*workers, max_model_len=1024) as r:
        tasks = [
            r.begin(r.request((7,) * 520, max_tokens=50, session_id="popular")) for _ in range(64)
        ]
        await asyncio.sleep(0.001)
        loads = [r.view(f"p{n}").num_prefill_tokens for n in range(4)]
        assert sum(loads) > 50 * 520
        assert max(loads) <= 2.0 * sum(loads) / 4
        await asyncio.sleep(0.1)
        await asyncio.gather(*tasks)
        assert max(prefills(r).values()) <= 32


@virtual
async def test_sessions_stay_where_their_kv_is() -> None:
    async with rig(*fleet(3, 3)) as r:
        first = await r.ask(r.request(session_id="s"))
        await r.ask(r.request())  # would take its turn on the next worker
        for _ in range(4):
            again = await r.ask(r.request(session_id="s"))
            assert again.timeline.decode_worker == first.timeline.decode_worker
            assert again.timeline.prefill_worker == first.timeline.prefill_worker
        others = {(await r.ask(r.request())).timeline.decode_worker for _ in range(6)}
        assert len(others) == 3, "without a session ties go round"


@virtual
async def test_a_session_ends_with_its_ttl() -> None:
    async with rig(*fleet(1, 2), session_ttl_seconds=5.0) as r:
        first = await r.ask(r.request(session_id="s"))
        await asyncio.sleep(6.0)
        second = await r.ask(r.request(session_id="s"))
        assert second.timeline.decode_worker != first.timeline.decode_worker


@virtual
async def test_b05_a_session_moves_when_its_worker_is_gone_and_stays_where_it_went() -> None:
    async with rig(*fleet(1, 2)) as r:
        home = (await r.ask(r.request(session_id="s"))).timeline.decode_worker
        r[home].die()
        await asyncio.sleep(1.0)
        second = await r.ask(r.request(session_id="s"))
        assert second.timeline.decode_worker != home
        assert second.timeline.num_retries == 0, "in one try: its death was known"
        r[home].revive()
        await asyncio.sleep(1.0)
        third = await r.ask(r.request(session_id="s"))
        assert third.timeline.decode_worker == second.timeline.decode_worker


@virtual
async def test_b05_a_retry_never_asks_the_sticky_worker_again() -> None:
    async with rig(*fleet(1, 2)) as r:
        home = (await r.ask(r.request(session_id="s"))).timeline.decode_worker
        r[home].script("reserve", WorkerLostError(home, "connection refused"), times=100)
        answer = await r.ask(r.request(session_id="s"))
        assert answer.timeline.decode_worker != home
        assert answer.timeline.num_retries == 1
        assert len(r[home].attempts["reserve"]) == 2, "once for each turn"


@virtual
async def test_b05_affinity_yields_when_the_worker_is_full() -> None:
    async with rig(*fleet(1, 2, slots=1, step_seconds=1.0)) as r:
        home = (await r.ask(r.request(session_id="s", max_tokens=2))).timeline.decode_worker
        running = r.begin(r.request(session_id="s", max_tokens=50))
        await asyncio.sleep(0.1)
        second = await r.ask(r.request(session_id="s", max_tokens=2))
        assert second.timeline.decode_worker != home
        assert second.timeline.queue_seconds == 0.0
        await cancel(running)


@virtual
async def test_b07_priority_decides_at_the_decode_hop() -> None:
    async with rig(*one_each(slots=1, step_seconds=1.0)) as r:
        ends: list[str] = []

        async def run(name: str, **fields: object) -> None:
            await r.ask(r.request(max_tokens=3, **fields))
            ends.append(name)

        running = asyncio.create_task(run("running"))
        await asyncio.sleep(0.1)
        low = [asyncio.create_task(run(f"low{n}")) for n in range(10)]
        await asyncio.sleep(0.1)
        high = asyncio.create_task(run("high", priority=1))
        await asyncio.gather(running, high, *low)
        assert ends == ["running", "high", *(f"low{n}" for n in range(10))]


@virtual
async def test_b07_priority_and_its_class_reach_the_prefill_hop() -> None:
    workers = one_each(slots=16, pages=400, prefill_token_seconds=1.0)
    slos = [SloConfig("interactive", 500.0, 50.0, priority=10)]
    async with rig(*workers, slos=slos) as r:
        starts: list[int] = []

        async def run(number: int, **fields: object) -> None:
            async for _ in r.router.generate(r.request((number,), max_tokens=2, **fields)):
                starts.append(number)
                break

        tasks = [asyncio.create_task(run(number)) for number in range(4)]
        await asyncio.sleep(0.1)
        tasks.append(asyncio.create_task(run(77, slo="interactive")))
        await asyncio.gather(*tasks)
        assert starts == [0, 77, 1, 2, 3]
        priorities = [attempt.priority for attempt in r["prefill-0"].attempts["prefill"]]
        assert priorities == [0, 0, 0, 0, 10]


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
async def test_no_room_waits_in_the_router_and_then_is_refused() -> None:
    async with rig(*one_each(slots=1, step_seconds=1.0)) as r:
        running = r.begin(r.request(max_tokens=100))
        await asyncio.sleep(0.1)
        start = r.now
        with pytest.raises(OverloadedError) as caught:
            await r.ask(r.request(timeout=20.0))
        assert r.now - start == pytest.approx(20.0)
        assert caught.value.retry_after_seconds >= 1.0
        assert len(r["prefill-0"].attempts["prefill"]) == 1, "it waited in the router alone"
        assert r.metrics.value("jpd:requests_failed_total", reason="overloaded") == 1
        patient = r.begin(r.request())
        assert (await running).finish_reason == "length"
        assert (await patient).timeline.queue_seconds > 70.0


@virtual
async def test_b13_past_saturation_the_surplus_is_refused_fast() -> None:
    """Open loop at three times the capacity for a minute, then at half of it."""
    workers = one_each(slots=4, step_seconds=0.1)  # 4 rows of 1 s each: 4 requests a second
    async with rig(*workers, max_waiting=8) as r:
        waits: list[float] = []
        refused: list[float] = []

        async def one() -> None:
            start = r.now
            try:
                await r.ask(r.request(max_tokens=11))
                waits.append(r.now - start)
            except OverloadedError:
                refused.append(r.now - start)

        tasks = []
        for _ in range(60 * 12):
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(1.0 / 12.0)
        assert len(waits) > 60 * 4 * 0.9
        assert len(refused) > 60 * 7 and max(refused) == 0.0
        await asyncio.sleep(3.0)
        waits.clear()
        for _ in range(20):
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(0.5)
        await asyncio.gather(*tasks)
        assert len(waits) == 20 and max(waits) < 1.1


@virtual
async def test_a_large_request_waits_for_pages_and_gets_them() -> None:
    """Pages, not rows, are scarce; small requests keep coming."""
    async with rig(*one_each(slots=16, pages=8, step_seconds=0.1)) as r:
        stop = asyncio.Event()

        async def flood(number: int) -> None:
            await asyncio.sleep(number * 0.1)
            while not stop.is_set():
                await r.ask(r.request(max_tokens=12))

        flooding = [asyncio.create_task(flood(number)) for number in range(12)]
        await asyncio.sleep(2.0)
        answer = await r.ask(r.request((1,) * 100, max_tokens=20, timeout=30.0))
        assert answer.timeline.queue_seconds < 3.0
        stop.set()
        await asyncio.gather(*flooding)


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


@virtual
async def test_cancelling_in_the_middle_of_a_reservation_frees_what_the_worker_gave() -> None:
    class SlowAnswer(FakeWorker):
        async def reserve(self, attempt):  # type: ignore[no-untyped-def]
            reservation = await super().reserve(attempt)
            await asyncio.sleep(1.0)
            return reservation

    async with rig(FakeWorker("p0", "prefill"), SlowAnswer("d0", "decode")) as r:
        task = r.begin(r.request())
        await asyncio.sleep(0.5)
        assert r["d0"].num_held == 1
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
        assert r["d0"].num_held == 0 and r.view("d0").num_rows == 0


@virtual
async def test_b06_pins_hold_for_their_own_hop_and_a_wrong_role_is_the_clients_error() -> None:
    async with rig(*fleet(2, 2)) as r:
        for _ in range(3):
            answer = await r.ask(r.request(decode_worker="d1"))
            assert answer.timeline.decode_worker == "d1"
            answer = await r.ask(r.request(prefill_worker="p0"))
            assert answer.timeline.prefill_worker == "p0"
        assert prefills(r)["p1"] > 0, "a pin of decode leaves prefill free"
        for pin in ({"decode_worker": "p0"}, {"prefill_worker": "d0"}, {"decode_worker": "x"}):
            with pytest.raises(RequestError, match="must be a worker that can") as caught:
                await r.ask(r.request(**pin))
            assert caught.value.field in pin
        r["d1"].die("no power")
        await asyncio.sleep(1.0)
        with pytest.raises(WorkerError, match="no decode worker is available"):
            await r.ask(r.request(decode_worker="d1"))


@virtual
async def test_b14_a_worker_that_began_anew_is_not_credited_with_what_it_lost() -> None:
    prompt = tuple(range(64))
    workers = fleet(2, 1, prefix_cache=True, slots=64, pages=4000, prefill_token_seconds=0.01)
    async with rig(*workers) as r:
        first = (await r.ask(r.request(prompt))).timeline.prefill_worker
        await asyncio.sleep(1.0)
        for _ in range(3):
            answer = await r.ask(r.request((*prompt, 1)))
            assert answer.timeline.prefill_worker == first
            assert answer.timeline.num_cached_tokens == 64
        index = r.router._parts.fleet.prefixes
        assert index.match(r[first]._prefixes and tuple(r[first]._prefixes)[:4])[first] == 4
        r[first].die()
        await asyncio.sleep(1.0)
        r[first].revive()
        await asyncio.sleep(1.0)
        assert first not in index.match(tuple(r["d0"]._prefixes or ())[:4])
        asked = {(await r.ask(r.request((*prompt, n)))).timeline.prefill_worker for n in range(2)}
        assert asked, "it is served all the same"


@virtual
async def test_b14_evicted_pages_are_not_credited() -> None:
    prompt = tuple(range(64))
    async with rig(*fleet(2, 1, prefix_cache=True)) as r:
        home = (await r.ask(r.request(prompt))).timeline.prefill_worker
        await asyncio.sleep(1.0)
        r[home].evict(prompt)
        await asyncio.sleep(1.0)
        hashes = page_hashes(prompt, PAGE_SIZE)
        assert home not in r.router._parts.fleet.prefixes.match(hashes)


@virtual
async def test_prefixes_of_another_salt_are_neither_hit_nor_followed() -> None:
    prompt = tuple(range(64))
    async with rig(*fleet(1, 1, prefix_cache=True)) as r:
        await r.ask(r.request(prompt, cache_salt="a"))
        again = await r.ask(r.request((*prompt, 1), cache_salt="a"))
        other = await r.ask(r.request((*prompt, 1), cache_salt="b"))
        bare = await r.ask(r.request((*prompt, 1)))
        cached = [answer.timeline.num_cached_tokens for answer in (again, other, bare)]
        assert cached == [64, 0, 0]


@virtual
async def test_the_answer_says_why_these_workers_and_what_became_of_the_sessions_kv() -> None:
    prompt = tuple(range(64))
    async with rig(*fleet(1, 2, prefix_cache=True, step_seconds=0.01)) as r:
        first = (await r.ask(r.request(prompt, session_id="s"))).timeline
        assert first.session_kv == "new"
        assert {"prefill", "decode"} <= first.cost_ms.keys()
        turn = (*prompt, *counted(prompt, 5), 9)
        assert (await r.ask(r.request(turn, session_id="s"))).timeline.session_kv == "kept"
        r[first.decode_worker].die()
        await asyncio.sleep(1.0)
        moved = (await r.ask(r.request((*turn, 8), session_id="s"))).timeline
        assert moved.session_kv == "moved" and moved.decode_worker != first.decode_worker
        for worker in r.workers.values():
            worker.evict((*turn, 8))
        await asyncio.sleep(1.0)
        assert (await r.ask(r.request((*turn, 7), session_id="s"))).timeline.session_kv == "dropped"
        assert (await r.ask(r.request(turn))).timeline.session_kv == ""


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
