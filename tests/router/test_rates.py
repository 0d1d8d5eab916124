"""Rates learned from noisy measurements, and what is assumed before there are any."""

import asyncio
import random

import pytest

from jpd.router.rates import Line, LineEstimate, RateBook, RateSeed
from tests.router.rig import rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker

TRUE = Line(0.02, 3e-5)


def learn(estimate: LineEstimate, line: Line, count: int, seed: int = 0) -> None:
    draw = random.Random(seed)
    for _ in range(count):
        amount = draw.choice((16, 100, 1000, 4000))
        estimate.observe(amount, line.at(amount) * draw.uniform(0.8, 1.2))


def test_a_line_is_learned_from_a_wrong_seed() -> None:
    estimate = LineEstimate(Line(0.5, 1e-2), 1024.0)
    learn(estimate, TRUE, 60)
    for amount in (16, 1000, 4000):
        assert estimate.line.at(amount) == pytest.approx(TRUE.at(amount), rel=0.4)


def test_one_measurement_moves_the_whole_line_by_the_pace_it_shows() -> None:
    estimate = LineEstimate(Line(0.01, 1e-4), 1024.0)
    estimate.observe(1000, 1.1)
    assert estimate.line.at(2000) == pytest.approx(2.1, rel=0.1)


def test_a_stall_does_not_ruin_an_estimate_and_a_lasting_change_is_followed() -> None:
    estimate = LineEstimate(TRUE, 1024.0)
    learn(estimate, TRUE, 40)
    estimate.observe(1000, 60.0)
    assert estimate.line.at(1000) < 2.0 * TRUE.at(1000)
    learn(estimate, TRUE.scaled(10.0), 40)
    assert estimate.line.at(1000) == pytest.approx(10.0 * TRUE.at(1000), rel=0.4)


def test_a_line_never_goes_below_zero() -> None:
    estimate, draw = LineEstimate(TRUE, 1024.0), random.Random(1)
    for _ in range(500):
        estimate.observe(draw.choice((0, 1, 5, 1e6)), draw.choice((0.0, 1e-6, 30.0)))
        assert estimate.line.base >= 0.0 and estimate.line.slope >= 0.0


def test_a_worker_not_measured_yet_goes_at_the_pace_of_its_peers_by_its_own_seed() -> None:
    """Both are three times slower than the roofline said; one is half as fast as the other."""
    seeds = {
        "fast": RateSeed(prefill=Line(0.0, 1e-4)),
        "slow": RateSeed(prefill=Line(0.0, 2e-4)),
    }
    book = RateBook(seeds)
    assert book.prefill("slow").slope == 2e-4
    for _ in range(50):
        book.see_prefill("fast", 1000, 0.3)
    assert book.prefill("fast").at(1000) == pytest.approx(0.3, rel=0.05)
    assert book.prefill("slow").at(1000) == pytest.approx(0.6, rel=0.05)
    assert book.num_shifts >= 1


def test_links_are_measured_by_pair_and_bytes_of_a_token_too() -> None:
    book = RateBook({})
    before = book.links("p")
    for _ in range(30):
        book.see_transfer("p", "d0", 100, 100_000, 0.5)
    assert before == {} and set(book.links("p")) == {"d0"}
    assert book.links("p")["d0"].at(100_000) == pytest.approx(0.5, rel=0.1)
    assert book.kv_bytes_per_token("anybody") == 1000.0


@virtual
async def test_the_router_measures_its_workers_and_pairs_as_it_serves() -> None:
    prefill = FakeWorker("p", "prefill", prefill_token_seconds=0.002)
    decode = FakeWorker("d", "decode", step_seconds=0.07, transfer_seconds=0.3, slots=8, pages=512)
    async with rig(prefill, decode) as r:
        for length in (10, 60, 30, 100, 20) * 6:
            await r.ask(r.request((1,) * length, max_tokens=6))
        p, d = r.view("p"), r.view("d")
        assert p.prefill_line.at(50) == pytest.approx(0.1, rel=0.1)
        assert d.step_line.at(1) == pytest.approx(0.07, rel=0.1), "the transfer is no step"
        assert p.links["d"].at(50 * decode.bytes_per_token) == pytest.approx(0.3, rel=0.1)
        assert d.kv_bytes_per_token == decode.bytes_per_token


@virtual
async def test_a_slow_worker_gets_less_of_the_work_once_it_was_measured() -> None:
    """One prefill worker is four times faster than the other, and nobody said so."""
    slow = FakeWorker("slow", "prefill", prefill_token_seconds=0.004)
    fast = FakeWorker("fast", "prefill", prefill_token_seconds=0.001)
    decode = FakeWorker("d", "decode", slots=64, pages=4000)
    async with rig(slow, fast, decode) as r:
        await asyncio.gather(*(r.ask(r.request((1,) * 100, max_tokens=2)) for _ in range(10)))
        before = len(fast.attempts["prefill"]), len(slow.attempts["prefill"])
        await asyncio.gather(*(r.ask(r.request((1,) * 100, max_tokens=2)) for _ in range(50)))
        num_fast = len(fast.attempts["prefill"]) - before[0]
        assert 35 <= num_fast <= 45, "four of five"
