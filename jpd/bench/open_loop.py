"""Sends a load whose arrival times are fixed: slow answers delay no request, and none is left out.

Knows no server: a Sender does, one for HTTP (`load_client`) and one for a server of this process.
Called by the benchmarks `serve` and `compare`.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from jpd.bench.latency import Outcome
from jpd.bench.workloads import PlannedRequest

START_SECONDS = 0.1
"""From making the tasks to the first arrival."""


class SendError(Exception):
    """The server did not answer a request as it should; the message says how."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an answer. What the server counts itself replaces what was counted here."""

    num_tokens: int = 0
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    details: Mapping[str, float] = field(default_factory=dict)


class Sender(Protocol):
    def send(self, request: PlannedRequest) -> AsyncGenerator[Part, None]:
        """The parts of the answer as they come. Raises SendError."""
        ...


async def run_load(
    sender: Sender, requests: Sequence[PlannedRequest], timeout_seconds: float
) -> list[Outcome]:
    """Send each at its time; what each client saw. A request is given up after the timeout."""
    start = asyncio.get_running_loop().time() + START_SECONDS
    waiting = (_one(sender, request, start, timeout_seconds) for request in requests)
    return list(await asyncio.gather(*waiting))


async def _one(
    sender: Sender, request: PlannedRequest, start: float, timeout_seconds: float
) -> Outcome:
    loop = asyncio.get_running_loop()
    due = start + request.arrival_seconds
    await asyncio.sleep(due - loop.time())
    sent, times, error = loop.time(), list[float](), None
    num_tokens, num_prompt, details = 0, len(request.token_ids), dict[str, float]()
    try:
        async with asyncio.timeout_at(due + timeout_seconds):
            async with aclosing(sender.send(request)) as parts:
                async for part in parts:
                    if part.num_tokens:
                        times.append(loop.time() - start)
                    num_tokens += part.num_tokens
                    num_prompt = part.num_prompt_tokens or num_prompt
                    num_tokens = part.num_output_tokens or num_tokens
                    details |= part.details
    except TimeoutError:
        error = f"not answered within {timeout_seconds:g} s"
    except SendError as raised:
        error = str(raised)
    if error is None and not times:
        error = "an answer without tokens"
    return Outcome(
        due_seconds=request.arrival_seconds,
        sent_seconds=sent - start,
        chunk_seconds=tuple(times),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_tokens,
        end_seconds=loop.time() - start,
        error=error,
        details=details,
    )
