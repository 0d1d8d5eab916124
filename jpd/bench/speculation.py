"""What prompt lookup gains: the same answers from one server, with and without it.

The prompt asks for a list to be copied, the best case; the other is a story, close to the worst.
Greedy, one request at a time.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jpd.bench.results import Result
from jpd.request import Timeline

MAX_DRAFTS = 4
CONTEXT = 512
ENGINE: Mapping[str, object] = {
    "max_speculative_tokens": MAX_DRAFTS,
    "max_model_len": CONTEXT,
    "context_buckets": (CONTEXT,),
    "max_steps_per_call": 1,
}
"""What of [engine] the server must have; few shapes to compile."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long the answers are, and of how many runs the shortest counts."""

    max_tokens: int
    num_runs: int


FULL = Effort(max_tokens=96, num_runs=3)
QUICK = Effort(max_tokens=64, num_runs=2)

ITEMS = "apple pear plum cherry grape lemon melon fig quince lime date olive".split()
LIST = "".join(f"{number}. {item} tart with cream\n" for number, item in enumerate(ITEMS, 1))
PROMPTS = {
    "a list copied": f"The list:\n{LIST}\nThe same list again:\n{LIST}\nThe same list again:\n",
    "a story": "Once upon a time there was a",
}


class Delta(Protocol):
    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def timeline(self) -> Timeline | None: ...


class Streams(Protocol):
    """What is needed of `jpd.api.Server`."""

    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int,
        temperature: float,
        ignore_eos: bool,
        num_speculative_tokens: int,
    ) -> Iterator[Delta]: ...


def run(server: Streams, effort: Effort) -> list[Result]:
    """`server` is launched with ENGINE."""
    results = []
    for name, prompt in PROMPTS.items():
        plain_seconds, plain_ids, _ = _measure(server, prompt, 0, effort)
        seconds, token_ids, timeline = _measure(server, prompt, MAX_DRAFTS, effort)
        num_steps = len(token_ids) - 1 - timeline.num_accepted_tokens
        rate = timeline.num_accepted_tokens / max(timeline.num_draft_tokens, 1)
        num_same = next(
            (i for i, (a, b) in enumerate(zip(plain_ids, token_ids, strict=False)) if a != b),
            len(plain_ids),
        )
        results += [
            Result(f"{name}: tokens per step", (len(token_ids) - 1) / num_steps, ""),
            Result(f"{name}: drafts that were right", 100 * rate, "%"),
            Result(f"{name}: decode time, without / with", plain_seconds / seconds, ""),
            Result(f"{name}: equal tokens", num_same / len(plain_ids), "", 1.0, at_most=False),
        ]
    return results


def _measure(
    server: Streams, prompt: str, num_drafts: int, effort: Effort
) -> tuple[float, Sequence[int], Timeline]:
    """The shortest decode time of several runs, the tokens and the timeline."""
    best = float("inf")
    for _ in range(effort.num_runs):
        first_time = last_time = time.monotonic()
        token_ids: list[int] = []
        timeline: Timeline | None = None
        for delta in server.stream(
            prompt,
            max_tokens=effort.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            num_speculative_tokens=num_drafts,
        ):
            last_time = time.monotonic()
            first_time = first_time if token_ids else last_time
            token_ids += delta.token_ids
            timeline = delta.timeline or timeline
        best = min(best, last_time - first_time)
    assert timeline is not None
    return best, token_ids, timeline
