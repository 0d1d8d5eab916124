"""Traffic drawn at random over a real fleet in a pool that is always short: nothing compiles,
nothing is left, every request ends once, and an answer is what its request gets alone."""

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jpd
from jpd.api import Server
from jpd.errors import DeadlineError, JpdError, OverloadedError
from jpd.frontend.service import TextDelta
from jpd.mesh_file import resolve_platform
from jpd.request import PromptLogprobs, RequestState, TokenLogprobs
from tests.launch.tiny_fleets import MAX_LEN, deployment, fleet_of, worker
from tests.support.tiny_tokenizer import VOCAB_SIZE, copy_with_tokenizer

pytestmark = pytest.mark.slow  # a fleet of its own is compiled

NUM_PAGES = 13  # one and a half sequences of full length for four slots, and the bin
NUM_REQUESTS, MAX_AT_ONCE, NUM_ALONE = 100, 16, 24
SEED = 20
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 96, 112, 126)
"""Lengths around those of pages, chunks and tables."""

SCHEMA = {
    "type": "object",
    "properties": {"the": {"enum": ["on", "off"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["the", "n"],
    "additionalProperties": False,
}
CHOICES, REGEX = ["yes", "no", "the other"], "(a|the|[b-z]{2,5})( the){0,3}"
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
    with jpd.launch(model, resolve_platform(config), can_prefill_locally=True) as server:
        yield server


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, and whether its client leaves before the end."""

    prompt: str | list[int]
    options: dict[str, Any]
    leaves_after_seconds: float | None = None
    leaves_after_deltas: int | None = None

    @property
    def stays(self) -> bool:
        return self.leaves_after_seconds is None and self.leaves_after_deltas is None

    @property
    def is_determined(self) -> bool:
        has_seed = self.options["temperature"] == 0.0 or "seed" in self.options
        return self.stays and has_seed and "timeout_seconds" not in self.options

    def alone(self, number: int) -> "Asked":
        """On the other path, without drafts, without a prefix that somebody else computed."""
        options = dict(self.options, cache_salt=f"alone {number}")
        for name in ("session_id", "priority", "num_speculative_tokens"):
            options.pop(name, None)
        options["disaggregate"] = not options.get("disaggregate", True)
        return replace(self, options=options)


class Draw(random.Random):
    """Requests of every kind, in the proportions of no workload."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.prefixes = [self.token_ids(MAX_LEN) for _ in range(3)]

    def token_ids(self, num_tokens: int) -> list[int]:
        return [self.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]

    def is_so(self, probability: float) -> bool:
        return self.random() < probability

    def asked(self) -> Asked:
        prompt, num_tokens = self.prompt()
        options = self.lengths(MAX_LEN - num_tokens) | self.sampling() | self.routing()
        asked = Asked(prompt, options | self.ends(options) | self.guidance())
        if self.is_so(0.12):
            return replace(asked, leaves_after_seconds=self.uniform(0.0, 0.5))
        if self.is_so(0.12):
            return replace(asked, leaves_after_deltas=self.randint(1, 8))
        return asked

    def prompt(self) -> tuple[str | list[int], int]:
        """Text, or token ids that may begin as others do; and at most how many tokens it has."""
        if self.is_so(0.2):
            text = " ".join(self.choices(["the", "cat", "in", "é", "🙂"], k=self.randint(1, 8)))
            return text, 1 + len(text.encode())
        num_tokens = self.choice(EDGES) if self.is_so(0.5) else self.randint(1, 100)
        if self.is_so(0.4):
            return self.choice(self.prefixes)[:num_tokens], num_tokens
        return self.token_ids(num_tokens), num_tokens

    def lengths(self, room: int) -> dict[str, Any]:
        """Up to the end of the context, sometimes without a word about it."""
        if self.is_so(0.1):
            return {}
        longest = room if self.is_so(0.2) else min(room, 40)
        max_tokens = 1 if self.is_so(0.1) else self.randint(1, longest)
        found: dict[str, Any] = {"max_tokens": max_tokens}
        if self.is_so(0.25):
            found["min_tokens"] = self.randint(0, max_tokens)
        return found

    def sampling(self) -> dict[str, Any]:
        biased = self.sample(range(3, VOCAB_SIZE), 5)
        some: dict[str, tuple[float, Any]] = {
            "top_p": (0.3, self.uniform(0.3, 1.0)),
            "top_k": (0.3, self.randint(1, VOCAB_SIZE)),
            "min_p": (0.2, self.uniform(0.0, 0.3)),
            "repetition_penalty": (0.25, self.uniform(0.7, 1.5)),
            "presence_penalty": (0.25, self.uniform(-1.0, 2.0)),
            "frequency_penalty": (0.25, self.uniform(-1.0, 2.0)),
            "logit_bias": (0.25, {token: self.choice((-100, 3, 30, 30)) for token in biased}),
            "seed": (0.7, self.randrange(-(1 << 63), 1 << 63)),
            "logprobs": (0.3, self.randint(0, 20)),
            "prompt_logprobs": (0.15, self.randint(0, 20)),
            "num_speculative_tokens": (0.3, self.randint(1, 3)),
            "n": (0.15, self.randint(2, 3)),
        }
        chosen = {name: value for name, (p, value) in some.items() if self.is_so(p)}
        return {"temperature": self.choice((0.0, 0.0, 0.7, 1.5))} | chosen

    def ends(self, options: dict[str, Any]) -> dict[str, Any]:
        some: dict[str, tuple[float, Any]] = {
            "stop": (0.2, self.choices(["a", "he", "th", "!?", "  "], k=2)),
            "stop_token_ids": (0.2, self.sample(range(3, VOCAB_SIZE), 8)),
            "ignore_eos": (0.4, True),
            "include_stop_str_in_output": (0.2, True),
        }
        return {name: value for name, (p, value) in some.items() if self.is_so(p)}

    def guidance(self) -> dict[str, Any]:
        if not self.is_so(0.25):
            return {}
        kinds: tuple[dict[str, Any], ...] = (
            {"guided_regex": REGEX},
            {"guided_choice": CHOICES},
            {"guided_json": SCHEMA},
        )
        return self.choice(kinds)

    def routing(self) -> dict[str, Any]:
        some: dict[str, tuple[float, Any]] = {
            "session_id": (0.2, f"session {self.randint(0, 2)}"),
            "cache_salt": (0.1, "salt"),
            "priority": (0.3, self.randint(-1, 2)),
            "disaggregate": (0.6, self.is_so(0.5)),
            "timeout_seconds": (0.1, self.choice((0.02, 0.1, 5.0))),
        }
        return {name: value for name, (p, value) in some.items() if self.is_so(p)}


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
