"""Traffic drawn at random over a real fleet in a pool that is always short: nothing compiles,
nothing is left, every request ends once, and an answer is what its request gets alone."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

import jpd
from jpd.api import Server
from jpd.errors import DeadlineError, JpdError, OverloadedError
from jpd.frontend.service import TextDelta
from jpd.request import PromptLogprobs, RequestState, TokenLogprobs
from tests.launch.random_requests import CHOICES, REGEX, Asked, Draw
from tests.launch.tiny_fleets import MAX_LEN, deployment, fleet_of, worker
from tests.support.tiny_tokenizer import copy_with_tokenizer

pytestmark = pytest.mark.slow  # a fleet of its own is compiled

NUM_PAGES = 13  # one and a half sequences of full length for four slots, and the bin
NUM_REQUESTS, MAX_AT_ONCE, NUM_ALONE = 100, 16, 24
SEED = 20
CAPACITIES = {"jpd:kv_pages", "jpd:kv_pages_cached", "jpd:worker_up"}
"""The gauges that are not zero at rest."""


@pytest.fixture(scope="module")
def server(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Prefill apart and on the decode worker; rows begin with pages for one page of output."""
    golden, folder = repo / "tests" / "golden" / "llama3", tmp_path_factory.mktemp("model")
    config = deployment(worker("prefill-0", "prefill", [0]), worker("decode-0", "decode", [1]))
    config = replace(
        config,
        cache=replace(config.cache, pages=NUM_PAGES, retain_seconds=60.0, reserve_tokens=16),
        engine=replace(
            config.engine,
            context_buckets=(32, MAX_LEN),
            max_speculative_tokens=3,
            max_steps_per_call=4,
        ),
    )
    model = str(copy_with_tokenizer(golden, folder))
    with jpd.launch(model, config, can_prefill_locally=True) as server:
        yield server


@dataclass(slots=True)
class Answer:
    """What came of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs = ()
    end: str | None = None

    def add(self, delta: TextDelta) -> None:
        assert self.end is None, "something follows the end"
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.end = delta.finish_reason


@dataclass(frozen=True, slots=True)
class Heard:
    """All that a client was told: its choices, and the error that ended them."""

    asked: Asked
    choices: list[Answer]
    error: JpdError | None = None

    @property
    def num_ends(self) -> int:
        return sum(choice.end is not None for choice in self.choices)


async def listen(server: Server, asked: Asked) -> Heard:
    choices = [Answer() for _ in range(asked.options.get("n", 1))]
    num_deltas, error = 0, None
    try:
        async with asyncio.timeout(asked.leaves_after_seconds):
            async with aclosing(server.astream(asked.prompt, **asked.options)) as deltas:
                async for delta in deltas:
                    choices[delta.index].add(delta)
                    num_deltas += 1
                    if num_deltas == asked.leaves_after_deltas:
                        break
    except TimeoutError:
        assert asked.leaves_after_seconds is not None
    except JpdError as raised:
        error = raised
    return Heard(asked, choices, error)


async def hour(server: Server, draw: Draw) -> list[Heard]:
    """Arrivals in bursts with lulls between them, so that batches of every size are met."""
    places = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(asked: Asked, arrival: float) -> Heard:
        await asyncio.sleep(arrival)
        async with places:
            return await listen(server, asked)

    arrival, running = 0.0, []
    for _ in range(NUM_REQUESTS):
        arrival += draw.uniform(0.1, 0.5) if draw.is_so(0.1) else draw.uniform(0.0, 0.02)
        running.append(one(draw.asked(), arrival))
    return await asyncio.gather(*running)


def busy_gauges(server: Server) -> list[object]:
    families = server.metrics.registry.collect()
    samples = [sample for family in families if family.type == "gauge" for sample in family.samples]
    return [sample for sample in samples if sample.value and sample.name not in CAPACITIES]


def check_rest(server: Server) -> None:
    """Gauges follow the workers' reports, so they may take a moment."""
    router = server._core()._router  # type: ignore[attr-defined]

    async def settle() -> None:
        await router.settle()
        assert router.num_requests == router.num_releases == 0
        router.check_integrity()

    server._bridge().run(settle())
    fleet_of(server).check_integrity()
    deadline = time.monotonic() + 5.0
    while busy_gauges(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert busy_gauges(server) == []
    for member in fleet_of(server).members:
        status = member.worker.status()
        assert (status.num_slots_used, status.num_pages_used) == (0, 0)
        assert (status.num_prefills_waiting, status.num_prefill_tokens_waiting) == (0, 0)
        assert status.num_transfers_in_flight == 0
    assert server.metrics.value("jpd:compilations_after_ready_total") == 0
    assert fleet_of(server).compile_counter.num_after_ready == 0
    assert server.health().status == "ok"


def check_ends(server: Server, heard: list[Heard]) -> None:
    """Each choice ended once for its client, each request once for the router."""
    ended = server.trace.requests()
    assert len({request.request_id for request in ended}) == len(ended)
    counts = {state: sum(one.state is state for one in ended) for state in RequestState}
    for state, count in counts.items():
        assert server.metrics.value("jpd:requests_total", outcome=state.value) == count
    stayed = [one for one in heard if one.asked.stays]
    for one in stayed:
        assert one.error is not None or one.num_ends == len(one.choices), one
    num_told = sum(one.num_ends for one in heard)
    num_left = sum(len(one.choices) - one.num_ends for one in heard)
    assert num_told <= counts[RequestState.FINISHED] <= num_told + num_left
    num_failed = sum(one.error is not None for one in stayed)
    assert num_failed <= counts[RequestState.FAILED] <= num_failed + num_left
    assert sum(counts.values()) <= num_told + num_left


def check_answer(one: Heard) -> None:
    """What an answer must be whatever its tokens are."""
    if one.error is not None:
        assert isinstance(one.error, DeadlineError | OverloadedError), one
        assert "timeout_seconds" in one.asked.options, one
    options = one.asked.options
    for choice in one.choices:
        assert len(choice.token_ids) <= options.get("max_tokens", MAX_LEN)
        if "logprobs" in options:
            assert len(choice.logprobs) == len(choice.token_ids)
        if choice.end != "stop":
            continue
        is_guided = bool(options.keys() & {"guided_choice", "guided_regex", "guided_json"})
        assert is_guided or len(choice.token_ids) >= options.get("min_tokens", 0), one
        if options.keys() & {"stop", "stop_token_ids"}:
            continue
        if "guided_choice" in options:
            assert choice.text in CHOICES, one
        if "guided_regex" in options:
            assert re.fullmatch(REGEX, choice.text), one
        if "guided_json" in options:
            assert json.loads(choice.text)["the"] in ("on", "off"), one


def check_same(one: Heard, alone: Heard) -> None:
    for found, wanted in zip(one.choices, alone.choices, strict=True):
        assert (found.token_ids, found.text, found.end) == (
            wanted.token_ids,
            wanted.text,
            wanted.end,
        ), one.asked
        for entries, expected in (
            (found.logprobs, wanted.logprobs),
            (found.prompt_logprobs, wanted.prompt_logprobs),
        ):
            numbers = [
                [entry.logprob for entry in of if entry is not None] for of in (entries, expected)
            ]
            np.testing.assert_allclose(numbers[0], numbers[1], atol=2e-4)


def test_an_hour_of_traffic_compiles_nothing_leaves_nothing_and_changes_no_answer(
    server: Server,
) -> None:
    heard = asyncio.run(hour(server, Draw(SEED)))
    for one in heard:
        check_answer(one)
    check_ends(server, heard)
    check_rest(server)
    value = server.metrics.value
    assert value("jpd:preemptions_total", worker="decode-0") >= 1, "the pool was not short"
    assert value("jpd:prefix_cache_hit_tokens_total") > 0
    assert value("jpd:spec_decode_num_draft_tokens_total", worker="decode-0") > 0
    determined = [one for one in heard if one.asked.is_determined]
    assert len(determined) >= NUM_ALONE
    for number, one in enumerate(determined[:NUM_ALONE]):
        check_same(one, asyncio.run(listen(server, one.asked.alone(number))))
    check_rest(server)
