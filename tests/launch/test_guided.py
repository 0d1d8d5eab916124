"""Guided answers through launched workers: both paths, replays, cancels, and nothing compiles."""

import asyncio
import json

import pytest

import jpd
from jpd.api import Server
from jpd.grammar import json_schema_grammar
from jpd.request import SamplingParams
from jpd.tokenizer import Tokenizer
from jpd.worker.protocol import Attempt
from tests.launch.tiny_fleets import client, fleet_of
from tests.support.tiny_tokenizer import EOS_ID

pytestmark = pytest.mark.slow  # a fleet of its own is compiled

SCHEMA = {
    "type": "object",
    "properties": {"the": {"enum": ["on", "off"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["the", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def test_valid_and_the_same_on_both_paths(server: Server) -> None:
    for seed in range(3):
        texts = {
            disaggregate: server.generate(
                ["the cat", "in a "],
                response_format=FORMAT,
                max_tokens=60,
                seed=seed,
                temperature=1.3,
                disaggregate=disaggregate,
            )
            for disaggregate in (True, False)
        }
        for apart, coupled in zip(texts[True], texts[False], strict=True):
            assert apart.text == coupled.text and apart.finish_reason == "stop"
            assert json.loads(apart.text)["the"] in ("on", "off")


def test_choice_n_and_free_neighbours(server: Server) -> None:
    async def both() -> tuple[list[jpd.Generation], list[jpd.Generation]]:
        guided = server.agenerate(
            "the", guided_choice=["yes", "no", "the other"], n=4, seed=1, max_tokens=20
        )
        return tuple(await asyncio.gather(guided, free()))  # type: ignore[return-value]

    async def free() -> list[jpd.Generation]:
        return await server.agenerate("the", seed=3, max_tokens=20, ignore_eos=True)

    guided, neighbour = asyncio.run(both())
    assert {answer.text for answer in guided} <= {"yes", "no", "the other"}
    assert neighbour[0].token_ids == asyncio.run(free())[0].token_ids


def test_forced_answers_need_no_end_token(server: Server) -> None:
    (answer,) = server.generate("a", structured_outputs={"regex": "the end"}, max_tokens=20)
    assert answer.text == "the end" and answer.finish_reason == "stop"
    assert EOS_ID not in answer.token_ids
    (answer,) = server.generate("a", guided_regex="the end", max_tokens=1)
    assert answer.finish_reason == "length"


def test_a_replay_goes_on_where_it_broke(server: Server) -> None:
    """Attempts that carry tokens sent before: none doubled, none missing."""
    fleet = fleet_of(server)
    tokenizer: Tokenizer | None = server._model.tokenizer
    assert tokenizer is not None
    prompt = tuple(tokenizer.encode("the on"))
    grammar = json_schema_grammar("schema", SCHEMA)

    async def run(name: str, sent: tuple[int, ...]) -> list[int]:
        sampling = SamplingParams(max_tokens=60 - len(sent), seed=9, grammar=grammar)
        attempt = Attempt(name, prompt + sent, sampling, (EOS_ID,), num_output_tokens=len(sent))
        reservation = await client(fleet, "decode-0").reserve(attempt)
        assert reservation is not None
        first = await client(fleet, "prefill-0").prefill(attempt, reservation)
        tokens = [first.token_id]
        if first.finish_reason is None:
            async for event in client(fleet, "decode-0").decode(name, first.token_id):
                tokens += event.token_ids
        for worker_name in ("prefill-0", "decode-0"):
            await client(fleet, worker_name).cancel(name)
        return tokens

    whole = asyncio.run(run("whole", ()))
    json.loads(tokenizer.decode(whole))
    for num_sent in (1, 5, len(whole) - 1):
        sent = tuple(whole[:num_sent])
        assert asyncio.run(run(f"after {num_sent}", sent)) == whole[num_sent:]


def test_wrong_and_heavy_grammars_fail_alone(server: Server) -> None:
    with pytest.raises(jpd.RequestError, match="guided_regex = '\\[a': cannot be followed"):
        server.generate("a", guided_regex="[a")
    with pytest.raises(jpd.RequestError, match="too many"):
        server.generate("a", guided_regex="(a?){1000}a{1000}", max_tokens=20)
    with pytest.raises(jpd.RequestError, match="cannot be given together"):
        server.generate("a", guided_regex="a", guided_choice=["a"])
    assert server.generate("a", guided_choice=["a"])[0].text == "a"


def test_leaving_while_it_compiles_or_runs_leaves_nothing(server: Server) -> None:
    async def leave_soon(seconds: float, index: int) -> None:
        wait = server.agenerate("a", guided_regex=f"(a|the|[b-z]{{{index},}}){{99}}", max_tokens=90)
        with pytest.raises((TimeoutError, asyncio.TimeoutError)):
            async with asyncio.timeout(seconds):
                await wait

    async def all_of_them() -> None:
        await asyncio.gather(*(leave_soon(0.001 * index, index) for index in range(1, 9)))

    asyncio.run(all_of_them())
    assert server.generate("a", guided_choice=["ok"])[0].text == "ok"
