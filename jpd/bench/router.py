"""The router's own benchmark: decisions, replays of traces, overload. Needs no device.

Called by `jpd bench router`.
"""

from jpd.bench import router_decisions
from jpd.bench.results import Result

QUICK_INDEX_SIZES = (10_000, 1_000_000)
INDEX_SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
NUM_DECISIONS = 5000


def run(*, is_quick: bool = False) -> list[Result]:
    """All results. Quick: smaller indexes and fewer decisions."""
    sizes = QUICK_INDEX_SIZES if is_quick else INDEX_SIZES
    return router_decisions.results(sizes, NUM_DECISIONS // (5 if is_quick else 1))
