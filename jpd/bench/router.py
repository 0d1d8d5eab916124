"""The router's own benchmark: decisions, replays of traces, overload. Needs no device.

Called by `jpd bench router`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from jpd.bench import router_decisions, router_overload, router_replay, traces
from jpd.bench.results import Result
from jpd.config import PolicyName

COMPARED_TRACE = "sessions"
"""The made-up trace through which every policy goes; the others only tell of the first."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is decided, replayed and refused."""

    index_sizes: Sequence[int]
    num_decisions: int
    num_requests: int  # of each made-up trace
    overload_seconds: float
    calm_seconds: float  # before and after it


FULL = Effort((10_000, 100_000, 1_000_000, 10_000_000), 5000, 4000, 3600.0, 200.0)
QUICK = Effort((10_000, 1_000_000), 1000, 800, 180.0, 200.0)


def run(effort: Effort, trace: Path | None = None) -> list[Result]:
    """All results; a trace that is given goes through every policy too."""
    policies = get_args(PolicyName)
    requests = None if trace is None else traces.read_trace(trace)
    found = router_decisions.results(effort.index_sizes, effort.num_decisions)
    for name, write in traces.SYNTHETIC.items():
        compared = policies if name == COMPARED_TRACE else policies[:1]
        hit_share = None if name == "bursts" else router_replay.HIT_SHARE
        found += router_replay.results(name, write(effort.num_requests), compared, hit_share)
    if trace is not None and requests is not None:
        found += router_replay.results(trace.name, requests, policies)
    return found + router_overload.results(effort.overload_seconds, effort.calm_seconds)
