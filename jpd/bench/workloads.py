"""Requests of a load, all fixed before the first is sent: when each comes, its prompt, its output.

A workload has a mean rate of one request a second; `at_rate` makes it any other. Arrivals and
lengths follow from the seed alone; the tokens also from `run`, so that what a server kept from one
run is no help in the next. Called by the benchmarks `serve` and `compare`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jpd.bench.traces import TRACE_PAGE_SIZE, read_trace
from jpd.errors import ConfigError, Problem

FIRST_TOKEN = 3  # those before it are special in most vocabularies
MIN_OUTPUT_TOKENS = 2  # there is no time per token with fewer
SHARED_SHARE = 0.25
"""Of a session's first prompt, what all sessions begin with."""
NEW_SESSION_SHARE = 0.2

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, decided before the load starts."""

    arrival_seconds: float  # since the start of the load
    token_ids: tuple[int, ...]
    max_tokens: int
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """What a workload is made of; lengths are means in tokens."""

    kind: str
    num_requests: int
    max_len: int  # of prompt and output together
    vocab_size: int
    prompt_tokens: int = 256
    output_tokens: int = 64
    spread: float = 0.5  # of lengths: standard deviation / mean; 0: all are equal
    burstiness: float = 3.0  # of gaps between arrivals, in a bursty workload: the same ratio
    trace: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError with every problem."""
        rules = {
            "workload": (self.kind, self.kind in WORKLOADS, f"is one of {', '.join(WORKLOADS)}"),
            "num-requests": (self.num_requests, self.num_requests > 0, "must be at least 1"),
            "prompt-tokens": (self.prompt_tokens, self.prompt_tokens > 0, "must be at least 1"),
            "output-tokens": (
                self.output_tokens,
                self.output_tokens >= MIN_OUTPUT_TOKENS,
                f"must be at least {MIN_OUTPUT_TOKENS}",
            ),
            "max-len": (
                self.max_len,
                self.max_len > MIN_OUTPUT_TOKENS,
                "has no room for a prompt and its output",
            ),
            "vocab-size": (self.vocab_size, self.vocab_size > FIRST_TOKEN, "is too small"),
            "spread": (self.spread, 0.0 <= self.spread <= 2.0, "must be between 0 and 2"),
            "burstiness": (self.burstiness, 0.0 < self.burstiness <= 10.0, "must be in (0, 10]"),
            "trace": (
                self.trace,
                (self.kind == "trace") == (self.trace is not None),
                "belongs to the workload trace, which needs it",
            ),
        }
        problems = [
            Problem("jpd bench", f"--{name}", value, rule)
            for name, (value, is_right, rule) in rules.items()
            if not is_right
        ]
        if problems:
            raise ConfigError(problems)


def make_workload(spec: WorkloadSpec, run: int = 0) -> list[PlannedRequest]:
    """In order of arrival, the first at 0. Raises ConfigError for a trace that cannot be read."""
    requests = WORKLOADS[spec.kind](spec, run)
    span = requests[-1].arrival_seconds - requests[0].arrival_seconds
    return at_rate(requests, span / max(1, len(requests) - 1) or 1.0)


def at_rate(requests: Sequence[PlannedRequest], factor: float) -> list[PlannedRequest]:
    """The same requests, their gaps divided by `factor`."""
    start = requests[0].arrival_seconds
    return [
        replace(request, arrival_seconds=(request.arrival_seconds - start) / factor)
        for request in requests
    ]


class _Author:
    """Draws lengths and arrivals from the seed, tokens from the seed and the run."""

    def __init__(self, spec: WorkloadSpec, run: int) -> None:
        self.spec, self._run = spec, run
        self.draw = np.random.default_rng(spec.seed)
        self._token_draw = np.random.default_rng((spec.seed, run))

    def arrivals(self, variation: float) -> list[float]:
        """Gaps are gamma-distributed around 1 second; a variation of 1 is a Poisson process."""
        return [float(time) for time in np.cumsum(self._around(1.0, variation))]

    def lengths(self, mean: float) -> list[int]:
        return [round(length) for length in self._around(mean, self.spec.spread)]

    def tokens(self, count: int) -> tuple[int, ...]:
        return self._ids(self._token_draw, count)

    def page(self, page_id: int, count: int) -> tuple[int, ...]:
        """The tokens that a page of a trace has in this run."""
        return self._ids(np.random.default_rng((self.spec.seed, self._run, page_id)), count)

    def request(
        self, arrival: float, prompt: Sequence[int], max_tokens: int, session: str | None = None
    ) -> PlannedRequest:
        """What is too long is cut: the output first, then the end of the prompt."""
        prompt = prompt[: self.spec.max_len - MIN_OUTPUT_TOKENS]
        room = self.spec.max_len - len(prompt)
        max_tokens = min(max(max_tokens, MIN_OUTPUT_TOKENS), room)
        return PlannedRequest(arrival, tuple(prompt), max_tokens, session)

    def _around(self, mean: float, variation: float) -> Floats:
        """Gamma-distributed: never negative, of this mean and this standard deviation / mean."""
        if variation == 0.0:
            return np.full(self.spec.num_requests, mean)
        shape = 1.0 / variation**2
        return self.draw.gamma(shape, mean / shape, self.spec.num_requests)

    def _ids(self, draw: np.random.Generator, count: int) -> tuple[int, ...]:
        return tuple(draw.integers(FIRST_TOKEN, self.spec.vocab_size, max(1, count)).tolist())


def _unrelated(spec: WorkloadSpec, run: int, variation: float) -> list[PlannedRequest]:
    """Prompts that share nothing."""
    author = _Author(spec, run)
    drawn = zip(
        author.arrivals(variation),
        author.lengths(spec.prompt_tokens),
        author.lengths(spec.output_tokens),
        strict=True,
    )
    return [author.request(at, author.tokens(prompt), output) for at, prompt, output in drawn]


def _poisson(spec: WorkloadSpec, run: int) -> list[PlannedRequest]:
    return _unrelated(spec, run, 1.0)


def _bursty(spec: WorkloadSpec, run: int) -> list[PlannedRequest]:
    return _unrelated(spec, run, spec.burstiness)


def _sessions(spec: WorkloadSpec, run: int) -> list[PlannedRequest]:
    """Conversations: a turn's prompt is the one before it, a made-up answer, and a new question.

    A turn does not wait for the answer before it: arrivals are fixed. So an answer as the server
    gave it is never part of a prompt; prompts are. A conversation that is too long begins anew.
    """
    author = _Author(spec, run)
    shared = author.tokens(round(spec.prompt_tokens * SHARED_SHARE))
    turns = zip(
        author.arrivals(1.0),
        author.lengths(spec.prompt_tokens * (1.0 - SHARED_SHARE)),
        author.lengths(spec.output_tokens),
        author.draw.random((spec.num_requests, 2)).tolist(),
        strict=True,
    )
    live: list[tuple[str, tuple[int, ...]]] = []
    requests = []
    for number, (arrival, question, output, (is_new, which)) in enumerate(turns):
        place = int(which * len(live))
        if not live or is_new < NEW_SESSION_SHARE:
            place = len(live)
            live.append((f"session-{number}", shared))
        name, history = live[place]
        if len(history) + question + output > spec.max_len:
            name, history = f"session-{number}", shared
        prompt = history + author.tokens(question)
        requests.append(author.request(arrival, prompt, output, name))
        live[place] = (name, prompt + author.tokens(output))
    return requests


def _trace(spec: WorkloadSpec, run: int) -> list[PlannedRequest]:
    """The first requests of a file, all lengths by one factor, so that the longest just fits.

    A page of the trace has the same tokens wherever its id stands: prefixes stay shared.
    """
    assert spec.trace is not None
    author, requests = _Author(spec, run), []
    found = read_trace(spec.trace)[: spec.num_requests]
    longest = max(request.num_tokens + request.num_output_tokens for request in found)
    factor = min(1.0, spec.max_len / longest)
    page_tokens = max(1, round(TRACE_PAGE_SIZE * factor))
    for request in found:
        pages = (author.page(page_id, page_tokens) for page_id in request.page_ids)
        prompt = [token for page in pages for token in page]
        num_tokens = max(1, round(request.num_tokens * factor))
        output = round(request.num_output_tokens * factor)
        requests.append(author.request(request.arrival_seconds, prompt[:num_tokens], output))
    return requests


WORKLOADS: Mapping[str, Callable[[WorkloadSpec, int], list[PlannedRequest]]] = {
    "poisson": _poisson,
    "bursty": _bursty,
    "sessions": _sessions,
    "trace": _trace,
}
