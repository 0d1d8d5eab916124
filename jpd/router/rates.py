"""How fast each worker and each link is: seeded by roofline, learned from what happens.

Every rate is a line, seconds = base + slope x amount: a prefill by its tokens, a decode step by
its rows, a transfer by its bytes. `LineEstimate` fits it to decayed observations; one that is far
off is cut, so that a stall does not ruin an estimate, while a lasting change is followed. Knows no
requests and no clock. Owned by `jpd.router.fleet`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

DECAY = 0.95
"""Weight of what was known, at each observation: about the last twenty count."""
SEED_WEIGHT = 0.5
"""Of each of the two seed points among the observations: enough to make any fit definite."""
OUTLIER_FACTOR = 4.0
POOL_SHIFT = 0.1
"""Change of the pace of all measured workers after which the others are seen anew."""
NUM_TRUSTED = 4
"""Observations after which one that is further off than OUTLIER_FACTOR is cut."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of an amount."""

    base: float
    slope: float

    def at(self, amount: float) -> float:
        return self.base + self.slope * amount

    def scaled(self, factor: float) -> "Line":
        return Line(self.base * factor, self.slope * factor)


@dataclass(frozen=True, slots=True)
class RateSeed:
    """What is assumed of a worker until it was measured."""

    prefill: Line = Line(0.005, 1e-4)  # by tokens computed
    step: Line = Line(0.02, 1e-4)  # by rows of the decode batch
    link: Line = Line(0.001, 1e-10)  # to any other worker, by bytes
    kv_bytes_per_token: float = 0.0  # 0: not known


PREFILL_TOKENS, STEP_ROWS, LINK_BYTES = 1024.0, 16.0, float(1 << 24)
"""Typical amounts: the second of the two points that a seed stands for."""


@dataclass(slots=True)
class LineEstimate:
    """A line fitted to decayed observations by least squares, kept from going below zero."""

    seed: Line
    typical: float
    num_seen: int = 0
    line: Line = field(init=False)
    _sums: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        self.line = self.seed

    @property
    def ratio(self) -> float:
        """Measured seconds over those of the seed, for the same amounts."""
        weight, amounts, seconds, _, _ = self._sums
        assumed = self.seed.base * weight + self.seed.slope * amounts
        return seconds / assumed if assumed > 0.0 else 1.0

    def observe(self, amount: float, seconds: float) -> None:
        """Something of this amount took so long."""
        self.num_seen += 1
        if self.num_seen > NUM_TRUSTED:
            known = self.line.at(amount)
            seconds = min(max(seconds, known / OUTLIER_FACTOR), known * OUTLIER_FACTOR + 1e-6)
        w, x, y, xx, xy = self._sums
        self._sums = (
            w * DECAY + 1.0,
            x * DECAY + amount,
            y * DECAY + seconds,
            xx * DECAY + amount * amount,
            xy * DECAY + amount * seconds,
        )
        self.line = self._fit()

    def _fit(self) -> Line:
        assumed, far = self.seed.scaled(self.ratio), self.typical
        w, x, y, xx, xy = self._sums
        w += 2 * SEED_WEIGHT
        x += SEED_WEIGHT * far
        y += SEED_WEIGHT * (assumed.base + assumed.at(far))
        xx += SEED_WEIGHT * far * far
        xy += SEED_WEIGHT * far * assumed.at(far)
        slope = (w * xy - x * y) / (w * xx - x * x)
        base = (y - slope * x) / w
        if slope < 0.0:
            return Line(max(0.0, y / w), 0.0)
        if base < 0.0:
            return Line(0.0, xy / xx)
        return Line(base, slope)


class RateBook:
    """The estimates of all workers and pairs."""

    def __init__(self, seeds: Mapping[str, RateSeed]) -> None:
        self._seeds = seeds
        self._prefills: dict[str, LineEstimate] = {}
        self._steps: dict[str, LineEstimate] = {}
        self._links: dict[str, dict[str, LineEstimate]] = {}
        self._link_lines: dict[str, dict[str, Line]] = {}
        self._pool_ratios: dict[str, float] = {}
        self._told_ratios: dict[str, float] = {}
        self._assumed: dict[tuple[str, str], Line] = {}  # of those not measured
        self.num_shifts = 0  # times that workers not measured yet are to be seen anew
        self._bytes_per_token = 0.0

    def seed(self, worker: str) -> RateSeed:
        return self._seeds.get(worker, _DEFAULT)

    def prefill(self, worker: str) -> Line:
        return self._line(self._prefills, "prefill", worker, self.seed(worker).prefill)

    def step(self, worker: str) -> Line:
        return self._line(self._steps, "step", worker, self.seed(worker).step)

    def link(self, worker: str) -> Line:
        """Of a sender to those it has not sent to yet."""
        return self._line({}, "link", worker, self.seed(worker).link)

    def links(self, worker: str) -> Mapping[str, Line]:
        """Measured links of a sender, by receiver. Replaced as a whole, never changed in place."""
        return self._link_lines.get(worker, {})

    def kv_bytes_per_token(self, worker: str) -> float:
        return self._bytes_per_token or self.seed(worker).kv_bytes_per_token

    def forget(self, worker: str) -> None:
        """The worker has left for good."""
        for known in (self._prefills, self._steps, self._links, self._link_lines):
            known.pop(worker, None)

    def see_prefill(self, worker: str, num_tokens: int, seconds: float) -> None:
        estimate = self._prefills.get(worker)
        if estimate is None:
            estimate = LineEstimate(self.seed(worker).prefill, PREFILL_TOKENS)
            self._prefills[worker] = estimate
        self._see(estimate, "prefill", num_tokens, seconds)

    def see_step(self, worker: str, num_rows: int, seconds: float) -> None:
        estimate = self._steps.get(worker)
        if estimate is None:
            estimate = self._steps[worker] = LineEstimate(self.seed(worker).step, STEP_ROWS)
        self._see(estimate, "step", num_rows, seconds)

    def see_transfer(
        self, sender: str, receiver: str, num_tokens: int, num_bytes: int, seconds: float
    ) -> None:
        """Seconds: those by which the KV came later than the first token."""
        links = self._links.setdefault(sender, {})
        if receiver not in links:
            links[receiver] = LineEstimate(self.seed(sender).link, LINK_BYTES)
        self._see(links[receiver], "link", num_bytes, seconds)
        lines = self._link_lines.get(sender, {})
        self._link_lines[sender] = lines | {receiver: links[receiver].line}
        if num_tokens > 0:
            newest = num_bytes / num_tokens
            known = self._bytes_per_token or newest
            self._bytes_per_token = known + (1.0 - DECAY) * (newest - known)

    def _see(self, estimate: LineEstimate, kind: str, amount: float, seconds: float) -> None:
        estimate.observe(amount, max(0.0, seconds))
        known = self._pool_ratios.get(kind, estimate.ratio)
        ratio = self._pool_ratios[kind] = known + (1.0 - DECAY) * (estimate.ratio - known)
        if abs(ratio - self._told_ratios.get(kind, 1.0)) > POOL_SHIFT * ratio:
            self._told_ratios[kind] = ratio
            self.num_shifts += 1
            self._assumed.clear()

    def _line(
        self, estimates: Mapping[str, LineEstimate], kind: str, worker: str, seed: Line
    ) -> Line:
        """Its own, or, of a worker not measured yet, its seed at the pace of its measured peers."""
        estimate = estimates.get(worker)
        if estimate is not None:
            return estimate.line
        assumed = self._assumed.get((kind, worker))
        if assumed is None:
            assumed = seed.scaled(self._told_ratios.get(kind, 1.0))
            self._assumed[kind, worker] = assumed
        return assumed


_DEFAULT = RateSeed()
