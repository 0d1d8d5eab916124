"""Streams that outlive their workers: state that is not in the tokens, and fleets that change."""

import asyncio
import contextlib
import random
import re
from collections.abc import Iterator, Sequence

import pytest

from jpd.errors import JpdError
from jpd.grammar import Grammar
from jpd.guidance.compiler import GrammarCompiler
from jpd.guidance.guide import wait_for_any
from jpd.worker.guided import open_guide
from jpd.worker.protocol import Attempt
from tests.frontend.fake_router import EOS, EOS2, VOCAB_SIZE, make_tokenizer
from tests.router.rig import Answer, Rig, rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker, NextToken


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


def fleet(rule: str | NextToken, num_decode: int = 3) -> list[FakeWorker]:
    next_token = RULES[rule] if isinstance(rule, str) else rule
    options = {"next_token": next_token, "step_seconds": 0.01, "prefill_token_seconds": 0.001}
    return [FakeWorker(f"p{n}", "prefill", **options) for n in range(2)] + [  # type: ignore[arg-type]
        FakeWorker(f"d{n}", "decode", **options)  # type: ignore[arg-type]
        for n in range(num_decode)
    ]


async def ask(r: Rig, **fields: object) -> Answer:
    return await r.ask(r.request((5, 6), max_tokens=30, seed=42, temperature=1.0, **fields))


async def check_every_cut(rule: str | NextToken, **fields: object) -> list[int]:
    """The worker dies after any number of tokens: right after the first and before the last too."""
    async with rig(*fleet(rule)) as r:
        expected = (await ask(r, **fields)).token_ids
    assert len(expected) == 30
    for after in (1, 2, 13, 28):
        async with rig(*fleet(rule)) as r:
            task = asyncio.create_task(ask(r, **fields))
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
    return expected


@pytest.mark.parametrize("rule", RULES)
@virtual
async def test_c09_c10_state_that_is_not_in_the_tokens_is_rebuilt_exactly(rule: str) -> None:
    await check_every_cut(rule)


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(make_tokenizer(), VOCAB_SIZE, (EOS, EOS2))
    yield compiler
    compiler.close()


@virtual
async def test_c09_a_guided_answer_goes_on_in_the_place_of_its_grammar_where_it_was(
    grammars: GrammarCompiler,
) -> None:
    """As the engines do it: each attempt's guide takes what was sent before, then its own."""

    def allowed_at_random(sequence: Sequence[int], attempt: Attempt) -> int:
        guide = open_guide(grammars, attempt, sequence[len(attempt.token_ids) :])
        assert guide is not None
        wait_for_any([guide], 10.0)
        tokens = [token for token in range(VOCAB_SIZE) if guide.mask[token // 32] >> token % 32 & 1]
        return random.Random(len(sequence)).choice(tokens)

    expression = r"(\[[0-9]{1,3}(, [0-9]{1,3}){2,4}\]; ){9}"
    sampling = Grammar("regex", expression)
    text = bytes(await check_every_cut(allowed_at_random, grammar=sampling)).decode()
    whole, _, cut = text.rpartition("; ")
    assert re.fullmatch(r"(\[[0-9]{1,3}(, [0-9]{1,3}){2,4}\](; |$))+", whole), text
    assert cut.startswith("["), text


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
