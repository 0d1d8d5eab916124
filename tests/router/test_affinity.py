"""Where a prompt's KV is: sessions, prefixes, pins, and what an answer tells of them."""

import asyncio
from dataclasses import replace

import pytest

from jpd.cache.page_hashes import page_hashes
from jpd.cache.prefix_log import PrefixChanges
from jpd.errors import RequestError, WorkerError, WorkerLostError
from jpd.worker.protocol import Attempt, PrefillResult, Reservation, SentBack
from tests.router.rig import PAGE_SIZE, cancel, counted, fleet, prefills, rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker


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
        index, hashes = r.router._parts.fleet.prefixes, page_hashes(prompt, PAGE_SIZE)
        assert index.match(hashes)[first] == 4
        r[first].die()
        await asyncio.sleep(1.0)
        r[first].revive()
        await asyncio.sleep(1.0)
        assert first not in index.match(hashes)
        again = await r.ask(r.request((*prompt, 1)))
        assert again.timeline.num_cached_tokens == 0, "it is served all the same"


@virtual
async def test_b14_it_is_not_credited_while_it_does_not_say_what_it_holds_now() -> None:
    prompt = tuple(range(64))

    class Reticent(FakeWorker):
        is_silent = False

        async def prefix_changes(self, incarnation: str, sequence: int) -> PrefixChanges:
            while self.is_silent:
                await asyncio.sleep(0.1)
            return await super().prefix_changes(incarnation, sequence)

    worker = Reticent("p0", "prefill", prefix_cache=True)
    async with rig(worker, FakeWorker("d0", "decode", prefix_cache=True)) as r:
        await r.ask(r.request(prompt))
        await asyncio.sleep(1.0)
        index, hashes = r.router._parts.fleet.prefixes, page_hashes(prompt, PAGE_SIZE)
        assert index.match(hashes)["p0"] == 4
        worker.is_silent = True
        worker.revive()  # so soon that nobody saw it down
        await asyncio.sleep(1.0)
        assert "p0" not in index.match(hashes)
        worker.is_silent = False


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


@pytest.mark.parametrize(
    ("sent_back", "step", "outcome"),
    [
        (SentBack(64, 512, 0.1), "send_back", "sent"),
        (SentBack(0, 0, 5.0), "send_back_failed", "computed"),
    ],
)
@virtual
async def test_the_answer_says_whether_kv_that_was_asked_back_came(
    sent_back: SentBack, step: str, outcome: str
) -> None:
    class Asking(FakeWorker):
        async def prefill(self, attempt: Attempt, reservation: Reservation) -> PrefillResult:
            return replace(await super().prefill(attempt, reservation), sent_back=sent_back)

    async with rig(Asking("p0", "prefill"), FakeWorker("d0", "decode")) as r:
        timeline = (await r.ask(r.request())).timeline
        assert timeline.path == ["disaggregated", step]
        assert timeline.sent_back_kv_bytes == sent_back.num_bytes
        assert r.metrics.value("jpd:kv_sent_back_total", outcome=outcome) == 1
