"""The router's own benchmark: decisions, replays of traces, overload. Needs no device.

Called by `jpd bench router`.
"""

from pathlib import Path
from typing import get_args

from jpd.bench import router_decisions, router_overload, router_replay, traces
from jpd.bench.results import Result
from jpd.config import PolicyName

QUICK_INDEX_SIZES = (10_000, 1_000_000)
INDEX_SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
NUM_DECISIONS = 5000
NUM_REQUESTS = 4000
OVERLOAD_SECONDS, QUICK_OVERLOAD_SECONDS = 3600.0, 180.0
COMPARED_TRACE = "sessions"
"""The made-up trace through which every policy goes; the others only tell of the first."""


def run(*, trace: Path | None = None, is_quick: bool = False) -> list[Result]:
    """All results. Quick: smaller indexes, fewer decisions and requests."""
    share = 5 if is_quick else 1
    policies = get_args(PolicyName)
    requests = None if trace is None else traces.read_trace(trace)
    sizes = QUICK_INDEX_SIZES if is_quick else INDEX_SIZES
    found = router_decisions.results(sizes, NUM_DECISIONS // share)
    for name, write in traces.SYNTHETIC.items():
        compared = policies if name == COMPARED_TRACE else policies[:1]
        hit_share = None if name == "bursts" else router_replay.HIT_SHARE
        found += router_replay.results(name, write(NUM_REQUESTS // share), compared, hit_share)
    if trace is not None and requests is not None:
        found += router_replay.results(trace.name, requests, policies)
    return found + router_overload.results(QUICK_OVERLOAD_SECONDS if is_quick else OVERLOAD_SECONDS)
