"""Goodput: the highest rate at which at least 90 % of requests meet both targets, by search.

1. From a first rate, double while enough requests meet them, or halve until enough do.
2. Then halve the interval, on a logarithmic scale, until it is narrow or the probes are spent.
Assumes that a higher rate is never easier. Knows no server. Called by the benchmarks `serve` and
`compare`.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

SHARE = 0.9
PRECISION = 1.1
"""The search ends when the lowest rate that failed is at most this times the highest that did."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One load: requests per second, and the share that met both targets."""

    rate: float
    attainment: float

    @property
    def is_good(self) -> bool:
        return self.attainment >= SHARE


@dataclass(frozen=True, slots=True)
class Goodput:
    """What the search found."""

    probes: tuple[Probe, ...]

    @property
    def rate(self) -> float:
        """The highest good rate below the lowest bad one; 0 when none was good."""
        return max((p.rate for p in self.probes if p.is_good and p.rate < self.bad), default=0.0)

    @property
    def bad(self) -> float:
        """The lowest rate that was not good; infinite when all were."""
        return min((p.rate for p in self.probes if not p.is_good), default=math.inf)

    @property
    def lowest(self) -> float:
        """The lowest rate that was tried: with a rate of 0 the goodput is below it."""
        return min(probe.rate for probe in self.probes)

    @property
    def is_found(self) -> bool:
        """False: the probes were spent before the interval was narrow."""
        return self.rate > 0.0 and self.bad <= self.rate * PRECISION


Measure = Callable[[float], Awaitable[float]]
"""Requests per second → share that met both targets."""


async def search_goodput(measure: Measure, first_rate: float, max_probes: int) -> Goodput:
    """At most `max_probes` loads, the first at `first_rate`."""
    found = Goodput((Probe(first_rate, await measure(first_rate)),))
    for _ in range(max_probes - 1):
        found = await narrowed(found, measure)
    return found


async def narrowed(found: Goodput, measure: Measure) -> Goodput:
    """With one more probe, unless it is narrow enough."""
    if found.is_found:
        return found
    rate = next_rate(found)
    return Goodput((*found.probes, Probe(rate, await measure(rate))))


def goodput_name(found: Goodput) -> str:
    """What the number is: found, or a bound of it."""
    known = "" if found.is_found else ", not narrowed further" if found.rate else ", below"
    return f"goodput: rate at which 90 % meet both{known}"


def next_rate(found: Goodput) -> float:
    if found.rate == 0.0:
        return found.bad / 2.0
    if found.bad == math.inf:
        return found.rate * 2.0
    return math.sqrt(found.rate * found.bad)
