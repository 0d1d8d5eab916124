"""Streams that outlive their workers: state that is not in the tokens, and fleets that change."""

import asyncio
import contextlib
import random
from collections.abc import Sequence

import pytest

from jpd.errors import JpdError
from jpd.worker.protocol import Attempt
from tests.router.rig import Answer, Rig, rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker


def seeded(sequence: Sequence[int], attempt: Attempt) -> int:
    """By the seed and the position alone, as the engines draw."""
    assert attempt.sampling.seed is not None
    return random.Random(attempt.sampling.seed * 1009 + len(sequence)).randrange(200)


def guided(sequence: Sequence[int], attempt: Attempt) -> int:
    """A grammar: brackets open as they were opened before, which only the output tells."""
    num_before = attempt.num_output_tokens
    output = sequence[len(attempt.token_ids) - num_before :]
    depth = sum(1 if token == 1 else -1 if token == 2 else 0 for token in output)
    return 1 if depth < 3 and len(output) % 4 < 2 else 2 if depth > 0 else 9


def penalised(sequence: Sequence[int], attempt: Attempt) -> int:
    """Never a token that was generated before: counts start at the prompt's end."""
    output = set(sequence[len(attempt.token_ids) - attempt.num_output_tokens :])
    return next(token for token in range(200) if token not in output)


RULES = {"seeded": seeded, "guided": guided, "penalised": penalised}


def fleet(rule: str, num_decode: int = 3) -> list[FakeWorker]:
    options = {"next_token": RULES[rule], "step_seconds": 0.01, "prefill_token_seconds": 0.001}
    return [FakeWorker(f"p{n}", "prefill", **options) for n in range(2)] + [  # type: ignore[arg-type]
        FakeWorker(f"d{n}", "decode", **options)  # type: ignore[arg-type]
        for n in range(num_decode)
    ]


async def ask(r: Rig) -> Answer:
    return await r.ask(r.request((5, 6), max_tokens=30, seed=42, temperature=1.0))


async def undisturbed(rule: str) -> list[int]:
    async with rig(*fleet(rule)) as r:
        return (await ask(r)).token_ids


@pytest.mark.parametrize("rule", RULES)
@virtual
async def test_c09_c10_state_that_is_not_in_the_tokens_is_rebuilt_exactly(rule: str) -> None:
    """The worker dies after any number of tokens: right after the first and before the last too."""
    expected = await undisturbed(rule)
    assert len(expected) == 30
    for after in (1, 2, 13, 28):
        async with rig(*fleet(rule)) as r:
            task = asyncio.create_task(ask(r))
            while not any(view.num_rows for view in r.router.fleet_views()):
                await asyncio.sleep(0.001)
            (busy,) = [view.name for view in r.router.fleet_views() if view.num_rows]
            await asyncio.sleep(0.002 + 0.01 * after)
            r[busy].die()
            answer = await task
            assert answer.token_ids == expected, after
            assert answer.timeline.path[-1] == "replay" and answer.timeline.num_retries == 1
            r[busy].revive()
            await asyncio.sleep(1.0)


@virtual
async def test_c05_workers_that_come_and_go_lose_no_request() -> None:
    draw = random.Random(0)
    async with rig(*fleet("seeded", num_decode=4), check=False) as r:
        ends: list[str] = []

        async def one() -> None:
            try:
                await r.ask(r.request((5, 6), max_tokens=20, timeout=20.0))
                ends.append("finished")
            except JpdError:
                ends.append("failed")

        async def change() -> None:
            for number in range(30):
                await asyncio.sleep(0.2)
                name = f"d{draw.randrange(1, 4)}"
                worker = r[name]
                if number % 2:
                    worker.die("removed")
                    await asyncio.sleep(0.1)
                    worker.revive()
                else:
                    with contextlib.suppress(JpdError):
                        await r.router.roster.remove(name)
                        await r.router.roster.add(worker)

        changing = asyncio.create_task(change())
        tasks = []
        while not changing.done():
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(draw.expovariate(20.0))
        await changing
        async with asyncio.timeout(25.0):
            await asyncio.gather(*tasks)
        assert len(ends) == len(tasks), "every one has an end"
        assert ends.count("finished") > 0.9 * len(ends)


@virtual
async def test_e21_a_turn_that_was_dropped_leaves_no_ghost_in_the_next() -> None:
    async with rig(*fleet("seeded")) as r:
        first = await r.ask(r.request((5, 6), max_tokens=4, session_id="s"))
        turn = (5, 6, *first.token_ids, 8)
        dropped = r.router.generate(r.request(turn, max_tokens=30, session_id="s"))
        await anext(dropped)
        await dropped.aclose()
        following = (*turn[:-1], 9)
        answer = await r.ask(r.request(following, max_tokens=4, session_id="s", seed=3))
        alone = await r.ask(r.request(following, max_tokens=4, seed=3))
        assert answer.token_ids == alone.token_ids
        assert answer.timeline.decode_worker == first.timeline.decode_worker
        asked = [a for w in r.workers.values() for a in w.attempts["prefill"]]
        assert {a.token_ids for a in asked} == {(5, 6), turn, following}
