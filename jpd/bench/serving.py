"""TTFT and ITL of one server: requests alone, at once, and beside a long prompt.

The last says what a stream loses while somebody else's prompt is prefilled, which is what separate
meshes are for. On one CPU all meshes share its cores: expect interference there.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jpd.bench.results import Result

NUM_REQUESTS = 8
SHORT_TOKENS = 32
OUTPUT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Measured:
    """One request as its client saw it, seconds."""

    ttft_seconds: float
    gaps_seconds: tuple[float, ...]


class Delta(Protocol):
    @property
    def token_ids(self) -> tuple[int, ...]: ...


class Streams(Protocol):
    """What is needed of `jpd.api.Server`."""

    @property
    def max_model_len(self) -> int: ...

    def astream(
        self, prompt: Sequence[int], *, max_tokens: int, temperature: float, ignore_eos: bool
    ) -> AsyncIterator[Delta]: ...


async def measure_serving(server: Streams, vocab_size: int) -> list[Result]:
    draw = np.random.default_rng(0)

    def prompt(num_tokens: int) -> list[int]:
        return [int(token) for token in draw.integers(0, vocab_size, num_tokens)]

    alone = [await _request(server, prompt(SHORT_TOKENS)) for _ in range(NUM_REQUESTS)]
    start = time.monotonic()
    batch = await asyncio.gather(
        *(_request(server, prompt(SHORT_TOKENS)) for _ in range(NUM_REQUESTS))
    )
    batch_seconds = time.monotonic() - start
    long = prompt(server.max_model_len - OUTPUT_TOKENS)
    beside, _ = await asyncio.gather(
        _request(server, prompt(SHORT_TOKENS), delay_seconds=0.01), _request(server, long)
    )
    rate = NUM_REQUESTS * OUTPUT_TOKENS / batch_seconds
    return [
        *_results("alone", alone),
        *_results(f"{NUM_REQUESTS} at once", batch),
        Result(f"{NUM_REQUESTS} at once: output", rate, "tokens/s"),
        *_results(f"beside a prompt of {len(long)} tokens", [beside]),
    ]


async def _request(server: Streams, prompt: Sequence[int], delay_seconds: float = 0.0) -> Measured:
    await asyncio.sleep(delay_seconds)
    times = [time.monotonic()]
    stream = server.astream(prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    async for delta in stream:
        times += [time.monotonic()] * len(delta.token_ids)
    gaps = tuple(later - earlier for earlier, later in zip(times[1:], times[2:], strict=False))
    return Measured(times[1] - times[0], gaps)


def _results(name: str, measured: Sequence[Measured]) -> list[Result]:
    gaps = [gap for one in measured for gap in one.gaps_seconds]
    ttft = statistics.median(one.ttft_seconds for one in measured)
    return [
        Result(f"{name}: TTFT, median", ttft * 1000, "ms"),
        Result(f"{name}: ITL, median", statistics.median(gaps) * 1000, "ms"),
        Result(f"{name}: ITL, longest", max(gaps) * 1000, "ms"),
    ]
