"""When a worker that faults is left alone, and how it is tried again.

    closed     faults in a row are counted; a success forgives them
    open       after FAULTS_TO_SUSPEND: the worker is the last choice for a while, longer each time
    half open  the time is up: it gets one piece of work at a time, until one ends well

Counts faults of the worker only, never what a client did wrong. Knows no worker and no clock. One
for each worker of `jpd.router.fleet`.
"""

from dataclasses import dataclass

FAULTS_TO_SUSPEND = 3
FIRST_SUSPENSION_SECONDS = 1.0
MAX_SUSPENSION_SECONDS = 30.0
MIN_SHARE = 0.8
"""Of the full time, by lot: workers that failed together are not tried again together."""


@dataclass(slots=True)
class Breaker:
    """The state of one worker; times are seconds of the fleet's clock."""

    num_faults: int = 0  # in a row
    open_until: float = 0.0

    @property
    def is_tripped(self) -> bool:
        """Open or half open."""
        return self.num_faults >= FAULTS_TO_SUSPEND

    def keeps_away(self, now: float, has_work: bool) -> bool:
        """Whether the worker is the last choice. Half open: while it has work to prove itself by.

        Should nothing tell how that went, it is as good as any other after the longest suspension.
        """
        if not self.is_tripped or now >= self.open_until + MAX_SUSPENSION_SECONDS:
            return False
        return now < self.open_until or has_work

    def fault(self, now: float, draw: float) -> float:
        """One more fault; returns for how many seconds it is open. `draw` is between 0 and 1."""
        self.num_faults += 1
        excess = self.num_faults - FAULTS_TO_SUSPEND
        if excess < 0:
            return 0.0
        longest = min(MAX_SUSPENSION_SECONDS, FIRST_SUSPENSION_SECONDS * 2.0 ** min(excess, 10))
        seconds = longest * (MIN_SHARE + (1.0 - MIN_SHARE) * draw)
        self.open_until = now + seconds
        return seconds

    def success(self) -> None:
        self.num_faults, self.open_until = 0, 0.0
