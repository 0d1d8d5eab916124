"""Can a request still meet its targets? Foretold at arrival, so that a late answer costs nobody.

    admit   the first token is foretold in time, or nobody else is in the way
    queue   there is no room, or the batch is too large for the class's time per token
    shed    foretold too late because of others: 429 now, with the time after which it would do

A target that even an idle fleet would miss is no reason to refuse. Pure functions over a snapshot
and a foretold wait; called by `jpd.router.journey`.
"""

from dataclasses import dataclass
from typing import Literal

from jpd.config import SloConfig
from jpd.router.cost import prefill_seconds
from jpd.router.policy import Fleet, Wishes, capable_decoders, capable_prefills

ALONE_FACTOR = 1.25
"""An idle fleet may be this much slower than foretold before its target is taken as its own."""

WAIT_FACTOR = 1.25
"""A wait may be so much longer than foretold: better refused now than after waiting in vain."""

Outcome = Literal["admitted", "queued", "shed"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from now to the first token, were a row there: with the queues, and without."""

    queued: float = 0.0
    alone: float = 0.0


def forecast(fleet: Fleet, wishes: Wishes) -> Forecast:
    """By the best prefill worker there is."""
    views = capable_prefills(fleet, None, wishes) or [
        view for view in capable_decoders(fleet, wishes) if view.can_prefill
    ]
    uncached = [(view, wishes.num_uncached(view.name)) for view in views]
    return Forecast(
        queued=min((prefill_seconds(view, number) for view, number in uncached), default=0.0),
        alone=min((view.prefill_line.at(number) for view, number in uncached), default=0.0),
    )


def ttft_limit(slo: SloConfig | None, found: Forecast) -> float | None:
    """Seconds from arrival after which the first token is not worth computing; None: any time."""
    if slo is None or slo.late == "serve":
        return None
    return max(slo.ttft_ms / 1e3, ALONE_FACTOR * found.alone)


def pace_limit(slo: SloConfig | None) -> float | None:
    """Seconds of a decode step that the class can bear."""
    return None if slo is None or slo.late == "serve" else slo.tpot_ms / 1e3


def excess_seconds(
    seconds_of_wait: float, found: Forecast, limit: float | None, seconds_left: float
) -> float:
    """By how much the request would come too late because of others; 0.0: it may wait.

    `limit` counts from now. Within the deadline there must be time for the wait alone.
    """
    excess = seconds_of_wait - seconds_left if seconds_of_wait > 0.0 else 0.0
    if limit is not None and (seconds_of_wait > 0.0 or found.queued > found.alone):
        excess = max(excess, WAIT_FACTOR * seconds_of_wait + found.queued - limit)
    return max(0.0, excess)
