"""What clients saw of a load: times to first token and between tokens, and targets met jointly.

All times count from when a request was due, not from when it was sent: a load generator that falls
behind makes them longer, never shorter. Called by the benchmarks of servers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jpd.bench.results import Result

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it; seconds since the start of the load."""

    due_seconds: float
    sent_seconds: float
    chunk_seconds: tuple[float, ...] = ()  # when parts with tokens came
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    end_seconds: float = 0.0
    error: str | None = None
    details: Mapping[str, float] = field(default_factory=dict)  # what the server says of it

    @property
    def is_answered(self) -> bool:
        return self.error is None and bool(self.chunk_seconds)

    @property
    def ttft_seconds(self) -> float:
        return self.chunk_seconds[0] - self.due_seconds

    @property
    def tpot_seconds(self) -> float | None:
        """Time per token after the first; None with one token only."""
        if self.num_output_tokens < 2:
            return None
        return (self.chunk_seconds[-1] - self.chunk_seconds[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_seconds(self) -> list[float]:
        pairs = zip(self.chunk_seconds, self.chunk_seconds[1:], strict=False)
        return [later - earlier for earlier, later in pairs]


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets of one request, to be met both."""

    ttft_seconds: float
    tpot_seconds: float

    def is_met(self, outcome: Outcome) -> bool:
        if not outcome.is_answered or outcome.ttft_seconds > self.ttft_seconds:
            return False
        tpot = outcome.tpot_seconds
        return tpot is None or tpot <= self.tpot_seconds


def attainment(outcomes: Sequence[Outcome], slo: Slo) -> float:
    """The share of all requests, failed ones included, that met both targets."""
    return sum(slo.is_met(outcome) for outcome in outcomes) / len(outcomes)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ttfts(outcomes: Sequence[Outcome]) -> list[float]:
    return [outcome.ttft_seconds for outcome in outcomes if outcome.is_answered]


def tpots(outcomes: Sequence[Outcome]) -> list[float]:
    found = (outcome.tpot_seconds for outcome in outcomes if outcome.is_answered)
    return [tpot for tpot in found if tpot is not None]


def gaps(outcomes: Sequence[Outcome]) -> list[float]:
    return [gap for outcome in outcomes if outcome.is_answered for gap in outcome.gaps_seconds]


MEASURES: Mapping[str, Callable[[Sequence[Outcome]], list[float]]] = {
    "TTFT": ttfts,
    "TPOT": tpots,
    "ITL": gaps,
}


def latency_results(name: str, outcomes: Sequence[Outcome], slo: Slo) -> list[Result]:
    """Percentiles, throughput, SLO attainment; those that failed are counted, not averaged."""
    results = []
    for measure, values_of in MEASURES.items():
        values = values_of(outcomes)
        results += [
            Result(f"{name}: {measure} {share_name}", percentile(values, share) * 1000, "ms")
            for share_name, share in SHARES.items()
            if values
        ]
    span = max(outcome.end_seconds for outcome in outcomes)
    answered = [outcome for outcome in outcomes if outcome.is_answered]
    num_output = sum(outcome.num_output_tokens for outcome in answered)
    num_all = num_output + sum(outcome.num_prompt_tokens for outcome in answered)
    target = f"TTFT {slo.ttft_seconds * 1000:.4g} ms and TPOT {slo.tpot_seconds * 1000:.4g} ms"
    late = max(outcome.sent_seconds - outcome.due_seconds for outcome in outcomes)
    return [
        *results,
        Result(f"{name}: requests answered", len(answered) / span, "1/s"),
        Result(f"{name}: output", num_output / span, "tokens/s"),
        Result(f"{name}: prompt and output", num_all / span, "tokens/s"),
        Result(f"{name}: requests that failed", len(outcomes) - len(answered), ""),
        Result(f"{name}: {target} met", attainment(outcomes, slo) * 100, "%"),
        Result(f"{name}: latest sending after its time", late * 1000, "ms"),
    ]
