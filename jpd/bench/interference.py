"""`jpd bench interference`: what running streams lose while long prompts keep arriving.

1. Two hosts, each pinned to a core: one prefills and one decodes, or both do both.
2. Four streams alone, then the same streams while one long prompt follows another; and so on in
   turns, so that their growing context, and what else the machine does, weighs on both. Prompts
   have 2,000 tokens, in a quick run 1,000.
3. The gaps between their tokens, alone and under that load: p50, p99, longest, and a picture.

The router shares the first core, so that the second belongs to its host alone. A prompt asks for
its first token only: what is measured is prefill, and its KV on the way, beside decode.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np

from jpd.bench import two_cores
from jpd.bench.latency import percentile
from jpd.bench.results import Result
from jpd.config import DeploymentConfig

NUM_STREAMS = 4
STREAM_PROMPT_TOKENS = 32
CHUNK, PAGE_SIZE = 128, 16
P99_RATIO_TARGET = 1.2


@dataclass(frozen=True, slots=True)
class Effort:
    """How long prompts are, how long each phase is watched, and how often each comes."""

    prompt_tokens: int
    max_model_len: int  # streams have half of it
    context_buckets: tuple[int, ...]
    warm_seconds: float
    alone_seconds: float
    loaded_seconds: float
    rounds: int


FULL = Effort(
    2000,
    2304,
    (1152, 2304),
    warm_seconds=3.0,
    alone_seconds=10.0,
    loaded_seconds=20.0,
    rounds=3,
)
QUICK = Effort(
    1000,
    1280,
    (1280,),
    warm_seconds=1.0,
    alone_seconds=3.0,
    loaded_seconds=3.0,
    rounds=2,
)


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps between tokens of all streams of one mode: when each ended, and how long it was."""

    mode: str
    alone: tuple[tuple[float, float], ...]  # seconds since the mode's first token, seconds
    loaded: tuple[tuple[float, float], ...]
    prompts: tuple[float, ...]  # when each long prompt had its first token
    loaded_seconds: float  # of all rounds together
    prompt_tokens: int  # of each of those


class Delta(Protocol):
    @property
    def token_ids(self) -> tuple[int, ...]: ...


class Streams(Protocol):
    """What is needed of `jpd.api.Server`."""

    def astream(
        self, prompt: Sequence[int], *, max_tokens: int, temperature: float, ignore_eos: bool
    ) -> AsyncIterator[Delta]: ...


class Running(Protocol):
    """A server to be used in `with`."""

    def __enter__(self) -> Streams: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None: ...


Launch = Callable[[DeploymentConfig], Running]


def deployments(cores: Sequence[int], effort: Effort) -> dict[str, DeploymentConfig]:
    """By mode; each has a host on each of the two cores."""
    sizes = two_cores.Sizes(
        effort.max_model_len,
        effort.prompt_tokens,
        CHUNK,
        PAGE_SIZE,
        slots=8,
        sequences=NUM_STREAMS + 2,
        context_buckets=effort.context_buckets,
    )
    return two_cores.deployments("jpd bench interference", cores, sizes)


async def measure_gaps(mode: str, server: Streams, vocab_size: int, effort: Effort) -> Gaps:
    """Run the streams alone, then under load, and keep when every token came."""
    draw = np.random.default_rng(0)

    def prompt(num_tokens: int) -> list[int]:
        return [int(token) for token in draw.integers(0, vocab_size, num_tokens)]

    num_tokens = effort.max_model_len // 2 - STREAM_PROMPT_TOKENS
    times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    arrivals, loads = list[float](), list[tuple[float, float]]()
    async with asyncio.TaskGroup() as group:
        streams = [
            group.create_task(
                _stream(server, prompt(STREAM_PROMPT_TOKENS), stream_times, num_tokens)
            )
            for stream_times in times
        ]
        while not all(times):
            await asyncio.sleep(0.05)
        await asyncio.sleep(effort.warm_seconds)
        origin = time.monotonic()
        for _ in range(effort.rounds):
            await asyncio.sleep(effort.alone_seconds)
            load_start = time.monotonic()
            while time.monotonic() < load_start + effort.loaded_seconds:
                await _stream(server, prompt(effort.prompt_tokens), arrivals, 1)
            loads.append((load_start, time.monotonic()))
        for stream in streams:
            stream.cancel()
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for begin, end in _gaps(times):
        is_loaded = any(begin < load_end and load_start < end for load_start, load_end in loads)
        if origin <= begin and (is_loaded or end < loads[-1][1]):
            found[is_loaded].append((end - origin, end - begin))
    return Gaps(
        mode,
        tuple(found[False]),
        tuple(found[True]),
        tuple(arrival - origin for arrival in arrivals),
        sum(load_end - load_start for load_start, load_end in loads),
        effort.prompt_tokens,
    )


async def _stream(
    server: Streams, prompt: Sequence[int], times: list[float], max_tokens: int
) -> None:
    stream = server.astream(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    async for delta in stream:
        times += [time.monotonic()] * len(delta.token_ids)


def _gaps(times: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Begin and end of each gap of all streams, in the order of their ends."""
    gaps = [gap for stream in times for gap in zip(stream, stream[1:], strict=False)]
    return sorted(gaps, key=lambda gap: gap[1])


def gap_results(gaps: Gaps) -> list[Result]:
    """Percentiles alone and under load, and how much the load costs."""
    target = P99_RATIO_TARGET if gaps.mode == two_cores.DISAGGREGATED else None
    results = []
    for phase, found in (("alone", gaps.alone), ("under load", gaps.loaded)):
        seconds = [gap for _, gap in found]
        for name, value in (
            ("p50", statistics.median(seconds)),
            ("p99", percentile(seconds, 0.99)),
            ("longest", max(seconds)),
        ):
            results.append(Result(f"{gaps.mode}: ITL {name}, {phase}", value * 1000, "ms"))
    ratio = percentile([g for _, g in gaps.loaded], 0.99) / percentile(
        [g for _, g in gaps.alone], 0.99
    )
    results.append(Result(f"{gaps.mode}: ITL p99 under load / alone", ratio, "x", target))
    rate = len(gaps.prompts) * gaps.prompt_tokens / gaps.loaded_seconds
    name = f"{gaps.mode}: prompts of {gaps.prompt_tokens} tokens under way"
    results.append(Result(name, rate, "tokens/s"))
    return results


def run(launch: Launch, vocab_size: int, cores: Sequence[int], effort: Effort) -> list[Gaps]:
    """Every mode in turn, each with hosts of its own."""
    found = []
    for mode, deployment in deployments(cores, effort).items():
        with launch(deployment) as server:
            found.append(asyncio.run(measure_gaps(mode, server, vocab_size, effort)))
    return found
