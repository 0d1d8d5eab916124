"""Admit, queue or shed: by what is foretold, and only because of others."""

import asyncio
from dataclasses import replace

import pytest

from jpd.config import SloConfig
from jpd.errors import OverloadedError, PreemptedError
from jpd.router import attainment
from jpd.router.attainment import Forecast, excess_seconds, forecast, ttft_limit
from jpd.router.policy import Row, Wishes, free_decoders
from jpd.router.rates import Line
from tests.router.rig import rig
from tests.router.test_policy import names, view
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker, one_each

SLO = SloConfig("fast", ttft_ms=1000.0, tpot_ms=30.0)
WISHES = Wishes(Row(4), num_sequence_pages=4, num_tokens=1000)


def test_the_first_token_is_foretold_with_and_without_the_queue() -> None:
    line = Line(0.1, 1e-3)
    busy = view("p", "prefill", prefill_line=line, num_prefills=1, num_prefill_tokens=500)
    found = forecast([busy, view("d")], WISHES)
    assert (found.queued, found.alone) == (pytest.approx(1.7), pytest.approx(1.1))
    colocated = view("c", "colocated", prefill_line=line)
    assert forecast([colocated], WISHES).queued == pytest.approx(1.1)
    assert forecast([], WISHES) == Forecast(0.0, 0.0)


def test_a_target_that_an_idle_fleet_would_miss_refuses_nobody() -> None:
    slow = Forecast(queued=5.0, alone=5.0)
    assert excess_seconds(0.0, slow, ttft_limit(SLO, slow), 600.0) == 0.0
    assert ttft_limit(SLO, slow) == 5.0 * attainment.ALONE_FACTOR
    assert ttft_limit(SloConfig("x", 1.0, 1.0, late="serve"), slow) is None
    assert ttft_limit(None, slow) is None


@pytest.mark.parametrize(
    ("wait", "queued", "left", "excess"),
    [
        (0.0, 0.2, 600.0, 0.0),
        (0.4, 0.2, 600.0, 0.0),
        (0.0, 1.5, 600.0, 0.5),
        (0.8, 0.2, 600.0, 0.2),
        (5.0, 0.2, 2.0, 5.45),
        (0.0, 0.2, 0.0, 0.0),  # nobody is in the way: its deadline will speak
    ],
)
def test_the_excess_is_what_others_make_it_late(
    wait: float, queued: float, left: float, excess: float
) -> None:
    found = Forecast(queued, alone=0.2)
    assert excess_seconds(wait, found, 1.0, left) == pytest.approx(excess)


def test_without_a_class_only_the_deadline_bounds_the_wait() -> None:
    assert excess_seconds(59.0, Forecast(), None, 60.0) == 0.0
    assert excess_seconds(90.0, Forecast(), None, 60.0) == 30.0


def test_a_batch_that_is_too_large_for_the_pace_is_not_joined() -> None:
    line = Line(0.02, 0.002)
    wishes = Wishes(Row(4), num_sequence_pages=4, pace=0.03)
    fleet = [view(f"d{n}", num_rows=n, step_line=line) for n in (0, 4, 5)]
    assert names(free_decoders(fleet, wishes)) == ["d0", "d4"]
    slow = [view("d", num_rows=n, step_line=Line(0.5, 0.0)) for n in (0, 7)]
    assert len(free_decoders(slow, wishes)) == 2, "no batch is faster: the target is not the point"


def test_a_slow_worker_is_left_alone_by_a_class_that_another_could_serve_in_time() -> None:
    fast = view("fast", num_rows=8, num_slots=8, step_line=Line(0.02, 0.0))
    slow = view("slow", step_line=Line(0.1, 0.0))
    hurried, patient = (Wishes(Row(4), num_sequence_pages=4, pace=pace) for pace in (0.03, None))
    assert free_decoders([fast, slow], hurried) == [], "it waits for the fast one"
    assert names(free_decoders([fast, slow], patient)) == ["slow"]
    gone = replace(fast, is_available=False)
    assert names(free_decoders([gone, slow], hurried)) == ["slow"], "there is nothing better"
    a_little = replace(slow, step_line=Line(0.035, 0.0))
    assert names(free_decoders([fast, a_little], hurried)) == ["slow"]


@virtual
async def test_who_would_come_too_late_is_refused_at_once_and_told_when_to_come_again() -> None:
    slo = SloConfig("fast", ttft_ms=3000.0, tpot_ms=5000.0)
    async with rig(*one_each(slots=1, step_seconds=1.0), slos=[slo]) as r:
        for _ in range(3):  # the pace is known after a few turns
            await asyncio.gather(*(r.ask(r.request(max_tokens=3, timeout=60.0)) for _ in range(3)))
        running = r.begin(r.request(max_tokens=3))
        await asyncio.sleep(0.1)
        start = r.now
        asked = [r.begin(r.request(max_tokens=3, slo="fast")) for _ in range(8)]
        await asyncio.sleep(0.1)
        refused = [task.exception() for task in asked if task.done()]
        assert len(refused) >= 5, "more than one turn is too late"
        for error in refused:
            assert isinstance(error, OverloadedError) and "too late" in str(error)
            assert 1.0 <= error.retry_after_seconds <= 60.0
        shed = r.metrics.value("jpd:admissions_total", slo="fast", outcome="shed")
        assert shed == len(refused)
        rest = await asyncio.gather(running, *(task for task in asked if not task.done()))
        assert all(answer.timeline.ttft_seconds <= 3.0 for answer in rest) and r.now > start
        assert (await r.ask(r.request(max_tokens=2, slo="fast"))).finish_reason == "length"
        assert r.metrics.value("jpd:admissions_total", slo="fast", outcome="admitted") >= 1


@virtual
async def test_a_class_that_waits_is_not_kept_beyond_what_its_first_token_is_worth() -> None:
    slos = [SloConfig("fast", 3000.0, 5000.0), SloConfig("patient", 3000.0, 5000.0, late="serve")]
    async with rig(*one_each(slots=1, step_seconds=1.0), slos=slos) as r:
        running = r.begin(r.request(max_tokens=21))
        await asyncio.sleep(0.1)
        start = r.now
        patient = r.begin(r.request(max_tokens=2, slo="patient"))
        with pytest.raises(OverloadedError):
            await r.ask(r.request(slo="fast"))
        assert r.now - start == pytest.approx(3.0, abs=0.1)
        await running
        assert (await patient).timeline.queue_seconds > 15.0


@virtual
async def test_b08_h07_classes_share_a_full_worker_and_all_are_served() -> None:
    slos = [
        SloConfig("heavy", 1e6, 1e6, weight=3.0, late="serve"),
        SloConfig("light", 1e6, 1e6, weight=1.0, late="serve"),
    ]
    workers = [FakeWorker("p", "prefill"), FakeWorker("d", "decode", slots=1, step_seconds=0.1)]
    async with rig(*workers, slos=slos) as r:
        ends: list[str] = []

        async def run(slo: str) -> None:
            await r.ask(r.request(max_tokens=2, slo=slo))
            ends.append(slo)

        await asyncio.gather(*(run(slo) for slo in ["light"] * 20 + ["heavy"] * 20))
        assert 4 <= ends[:20].count("light") <= 7
        assert len(ends) == 40


@virtual
async def test_b08_who_yielded_three_times_has_the_highest_priority_of_all_classes() -> None:
    """So a class that floods the fleet cannot starve the others by preempting them for ever."""
    slos = [SloConfig("low", 1e6, 1e6, priority=1), SloConfig("high", 1e6, 1e6, priority=9)]
    async with rig(*one_each(step_seconds=0.1), slos=slos) as r:
        r["decode-0"].script("decode", PreemptedError("decode-0", "for others"), times=5)
        answer = await r.ask(r.request(max_tokens=9, slo="low"))
        assert answer.timeline.path.count("preempted") == 5
        for verb in ("reserve", "prefill"):
            attempts = r["decode-0" if verb == "reserve" else "prefill-0"].attempts[verb]
            assert [attempt.priority for attempt in attempts] == [1, 1, 1, 9, 9, 9], verb
    async with rig(*one_each(step_seconds=0.1)) as r:
        r["decode-0"].script("decode", PreemptedError("decode-0", "for others"), times=5)
        await r.ask(r.request(max_tokens=9))
        assert {attempt.priority for attempt in r["decode-0"].attempts["reserve"]} == {0}
