"""Room that runs out: rows grow, the youngest of the lowest priority yields, and is replayed."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from jpd.config import RouterConfig
from jpd.errors import PreemptedError, RequestError
from jpd.metrics import Metrics
from jpd.request import Request, SamplingParams, Timeline
from jpd.router.router import Router
from jpd.worker.protocol import Attempt
from jpd.worker.room import by_seniority, junior
from tests.worker.fleet import TestFleet, attempt_of, fleet
from tests.worker.paper import reference

PAGE = 4


def test_the_youngest_of_the_lowest_priority_yields() -> None:
    def of(name: str, priority: int, sequence: int) -> Attempt:
        return replace(attempt_of((1,), attempt_id=name, priority=priority), sequence=sequence)

    rows = [of("old", 0, 1), of("high", 5, 9), of("young", 0, 7), of("older", 0, 0)]
    assert junior(rows) is rows[2]
    assert junior(rows[:2]) is rows[0]
    assert junior(rows, below=0) is None
    assert junior(rows, below=5) is rows[2]
    assert [a.attempt_id for a in sorted(rows, key=by_seniority)] == [
        "high",
        "older",
        "old",
        "young",
    ]
    assert junior([of("first", 0, 0), of("last", 0, 0)]).attempt_id == "last"  # type: ignore[union-attr]


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[TestFleet, Router, Metrics]]:
    """A router over workers whose rows begin with pages for few tokens."""
    options = {"page_size": PAGE, "reserve_tokens": PAGE} | options
    async with fleet(**options) as running:
        metrics = Metrics()
        router = Router(
            [member.client for member in running.members.values()],
            RouterConfig(),
            (),
            metrics,
            max_model_len=128,
            page_size=PAGE,
            reserve_tokens=options["reserve_tokens"],
        )
        await router.start()
        try:
            yield running, router, metrics
            await router.settle()
            router.check_integrity()
            await running.assert_at_rest()
        finally:
            await router.close()


async def ask(
    router: Router, prompt: tuple[int, ...], max_tokens: int, **fields: Any
) -> tuple[list[int], Timeline]:
    now = time.monotonic()
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0)
    request = Request("r", prompt, sampling, now, now + 30, **fields)
    tokens: list[int] = []
    timeline = None
    async for output in router.generate(request):
        tokens += output.token_ids
        timeline = output.timeline or timeline
    assert timeline is not None
    return tokens, timeline


def slow_down(running: TestFleet) -> None:
    """So that requests meet on the decode worker."""
    decode = running["decode-0"].decode
    assert decode is not None
    decode.before_step = lambda: time.sleep(0.002)


def wanted(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return reference(attempt_of(prompt, max_tokens))


async def test_a15_d12_two_sequences_in_a_pool_for_one_and_a_half() -> None:
    prompts = [tuple(range(5, 13)), tuple(range(50, 57))]
    pages = {"prefill-0": 64, "decode-0": 15}  # each sequence takes 10
    async with served(num_pages=pages) as (running, router, metrics):
        slow_down(running)
        answers = await asyncio.gather(*(ask(router, prompt, 32) for prompt in prompts))
        for prompt, (tokens, _) in zip(prompts, answers, strict=True):
            assert tokens == wanted(prompt, 32)
        num_preempted = metrics.value("jpd:preemptions_total", worker="decode-0")
        assert num_preempted >= 1
        older, younger = (timeline for _, timeline in answers)
        assert "preempted" not in older.path, "the oldest always goes on"
        assert younger.path.count("preempted") == num_preempted
        assert younger.path.count("replay") == num_preempted
        assert younger.num_replayed_tokens > 0 and younger.num_retries == 0
        assert metrics.value("jpd:retries_total", reason="preempted") == 0
        assert metrics.value("jpd:output_tokens_total") == 64
        assert router.health().status == "ok", "nobody is blamed"


async def test_no_livelock_in_a_pool_that_barely_holds_one_sequence() -> None:
    prompts = [tuple(range(n, n + 6)) for n in (5, 20, 40, 60, 80)]
    async with served(num_pages={"prefill-0": 64, "decode-0": 10}, slots=4) as (
        running,
        router,
        metrics,
    ):
        slow_down(running)
        answers = await asyncio.gather(*(ask(router, prompt, 34) for prompt in prompts))
        for prompt, (tokens, _) in zip(prompts, answers, strict=True):
            assert tokens == wanted(prompt, 34)
        assert 1 <= metrics.value("jpd:preemptions_total", worker="decode-0") <= 40


async def test_what_can_never_fit_is_refused_though_its_beginning_would() -> None:
    async with served(num_pages={"prefill-0": 64, "decode-0": 10}) as (running, router, _):
        with pytest.raises(RequestError, match="max_tokens"):
            await ask(router, tuple(range(6)), 35)
        with pytest.raises(RequestError, match="needs 11 KV pages"):
            await running["decode-0"].client.reserve(attempt_of(range(6), 35))


async def test_a_higher_priority_is_never_preempted_by_a_lower_one() -> None:
    async with served(num_pages={"prefill-0": 64, "decode-0": 15}) as (_, router, _):
        low = asyncio.create_task(ask(router, tuple(range(5, 13)), 32, priority=0))
        await asyncio.sleep(0.005)
        high = asyncio.create_task(ask(router, tuple(range(50, 57)), 32, priority=3))
        for task, prompt in ((low, range(5, 13)), (high, range(50, 57))):
            assert (await task)[0] == wanted(tuple(prompt), 32)
        assert "preempted" not in (await high)[1].path


async def test_b08_a_high_priority_gets_a_slot_though_all_are_taken() -> None:
    async with served(slots=2, reserve_tokens=64) as (running, router, _):
        slow_down(running)
        low = [asyncio.create_task(ask(router, tuple(range(n, n + 5)), 90)) for n in (5, 30)]
        while running["decode-0"].status.num_slots_used < 2:
            await asyncio.sleep(0.002)
        tokens, timeline = await ask(router, (1, 2, 3), 10, priority=1)
        assert tokens == wanted((1, 2, 3), 10)
        assert not any(task.done() for task in low), "it did not wait for them"
        for task, n in zip(low, (5, 30), strict=True):
            assert (await task)[0] == wanted(tuple(range(n, n + 5)), 90)
        assert [("preempted" in (await task)[1].path) for task in low] == [False, True]
        assert "preempted" not in timeline.path


async def test_a_page_is_kept_for_each_row_that_may_grow() -> None:
    async with fleet(num_pages=8, page_size=PAGE, reserve_tokens=PAGE) as running:
        reserve = running["decode-0"].client.reserve
        first, second = attempt_of(range(8), 12), attempt_of(range(20, 32), 4)
        assert await reserve(first) is not None  # three pages, up to five
        assert await reserve(replace(second, token_ids=tuple(range(20, 36)))) is None  # 5 + 1 > 5
        assert await reserve(second) is not None
        for attempt in (first, second):
            await running["decode-0"].client.cancel(attempt.attempt_id)
        await running.assert_at_rest()


async def test_a_preempted_reservation_hears_of_it_when_it_asks_to_decode() -> None:
    async with fleet(num_pages=4, page_size=PAGE) as running:
        client = running["decode-0"].client
        low, high = attempt_of(range(8), 8), attempt_of(range(30, 38), 8, priority=1)
        assert await client.reserve(low) is not None
        assert await client.reserve(high) is not None, "the lower one's room was taken"
        with pytest.raises(PreemptedError, match="was needed for attempt"):
            async for _ in client.decode(low.attempt_id, 1):
                pass
        await client.cancel(high.attempt_id)
        await running.assert_at_rest()


async def test_a_reservation_preempted_before_its_local_prefill_hears_why() -> None:
    roles: Any = {"both-0": "colocated"}
    async with fleet(num_pages=4, page_size=PAGE, roles=roles) as running:
        client = running["both-0"].client
        low, high = attempt_of(range(8), 8), attempt_of(range(30, 38), 8, priority=1)
        reservation = await client.reserve(low)
        assert reservation is not None
        assert await client.reserve(high) is not None, "the lower one's room was taken"
        with pytest.raises(PreemptedError, match="was needed for attempt"):
            await client.prefill(low, reservation)
        for attempt in (low, high):
            await client.cancel(attempt.attempt_id)
        await running.assert_at_rest()


async def test_a_local_prefill_ends_with_its_reservation() -> None:
    roles: Any = {"both-0": "colocated"}
    async with fleet(num_pages=4, page_size=PAGE, roles=roles, chunk=1) as running:
        member = running["both-0"]
        low, high = attempt_of(range(8), 8), attempt_of(range(30, 38), 8, priority=1)
        reservation = await member.client.reserve(low)
        assert reservation is not None and member.prefill is not None
        member.prefill.before_step = lambda: time.sleep(0.005)
        prefill = asyncio.ensure_future(member.client.prefill(low, reservation))
        while low.attempt_id not in member.prefill.num_computed:
            await asyncio.sleep(0.001)
        assert await member.client.reserve(high) is not None
        with pytest.raises(PreemptedError):
            await prefill
        assert low.attempt_id not in member.prefill.unfinished
        for attempt in (low, high):
            await member.client.cancel(attempt.attempt_id)
        await running.assert_at_rest()


async def test_random_traffic_in_a_pool_that_is_always_short() -> None:
    """Lengths, priorities, cancels at random: every answer is its reference, nothing is left."""
    draw = random.Random(3)
    pages = {"prefill-0": 40, "decode-0": 14}
    async with served(num_pages=pages, slots=3) as (running, router, metrics):

        async def one(number: int) -> None:
            await asyncio.sleep(draw.random() * 0.2)
            prompt = tuple(draw.randrange(2, 200) for _ in range(draw.randint(1, 20)))
            max_tokens = draw.randint(1, 30)
            asked = ask(router, prompt, max_tokens, priority=draw.choice((0, 0, 1)))
            if number % 5:
                tokens, _ = await asked
                assert tokens == wanted(prompt, max_tokens)
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asked, draw.random() * 0.1)

        await asyncio.gather(*(one(number) for number in range(60)))
        assert metrics.value("jpd:preemptions_total", worker="decode-0") >= 1
        assert router.health().status == "ok"
