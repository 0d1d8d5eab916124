"""What all requests of one router share. Made by `jpd.router.router`, read by journeys."""

from collections.abc import Callable
from dataclasses import dataclass

from jpd.config import RouterConfig
from jpd.metrics import Metrics
from jpd.router.admission import WaitingRoom
from jpd.router.fleet import Fleet
from jpd.router.placement import Placement
from jpd.router.releases import Releases
from jpd.router.sessions import SessionTable
from jpd.router.trace import TraceLog


@dataclass(frozen=True, slots=True)
class RouterParts:
    """The router's state, by part; each part guards its own."""

    config: RouterConfig
    page_size: int
    reserve_tokens: int  # output tokens that workers reserve with a prompt
    fleet: Fleet
    placement: Placement
    waiting_room: WaitingRoom
    sessions: SessionTable
    releases: Releases
    metrics: Metrics
    trace: TraceLog
    clock: Callable[[], float]  # seconds of time.monotonic, or a test's own
