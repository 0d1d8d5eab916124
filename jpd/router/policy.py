"""One look at the fleet, what a request wants of it, and who can serve that at all.

Pure functions over frozen snapshots: who may be chosen, whether there is room, which path a prompt
takes. Who is best among them is the business of `jpd.router.cost` and `jpd.router.policies`. Knows
no clients and keeps no state.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

from jpd.config import SendBackPolicy
from jpd.router.rates import Line, RateSeed
from jpd.worker.protocol import Role

Path = Literal["disaggregated", "local"]
Fleet = Sequence["WorkerView"]

_SEED = RateSeed()
PACE_FACTOR = 1.25
"""A step may be this much longer where no batch is smaller or no worker faster."""


@dataclass(slots=True)
class WorkerView:
    """One worker at one moment. Counts of work are the router's own, taken at once.

    Never changed once it is made; not frozen, for then making one takes twice as long.
    """

    name: str
    role: Role
    is_available: bool  # healthy, moving, not draining
    is_suspended: bool  # faulted several times in a row: only when there is no other
    can_prefill: bool
    num_slots: int
    num_pages: int
    num_rows: int = 0  # reservations held
    num_reserved_pages: int = 0
    num_prefills: int = 0
    num_prefill_tokens: int = 0  # uncached ones, of prompts that were not answered yet
    num_growing_rows: int = 0  # that may need more pages than were reserved
    lowest_priority: int | None = None  # of the rows; None: there is none
    last_chosen: int = 0  # order of the last assignment: ties go round
    recent_tokens: float = 0.0  # prefilled lately, in the units of Wishes.recent_scale
    prefill_line: Line = _SEED.prefill  # seconds by tokens
    step_line: Line = _SEED.step  # seconds by rows
    link_line: Line = _SEED.link  # seconds by bytes, to workers it has not sent to yet
    links: Mapping[str, Line] = field(default_factory=dict)  # by receiver, measured
    kv_bytes_per_token: float = 0.0

    @property
    def decodes(self) -> bool:
        return self.role != "prefill" and self.num_slots > 0

    def link_to(self, receiver: str) -> Line:
        return self.links.get(receiver, self.link_line)


@dataclass(frozen=True, slots=True)
class Row:
    """What one attempt takes of a decode worker before it begins."""

    num_pages: int
    grows: bool = False  # it may need more than these
    priority: int = 0


class Wishes(NamedTuple):
    """What one request wants of the fleet."""

    row: Row
    num_sequence_pages: int  # for prompt and output together
    num_tokens: int = 0  # of the prompt, and of what was generated before a replay
    num_output_tokens: float = 128.0  # expected
    cached_tokens: Mapping[str, int] = MappingProxyType({})  # of the prompt, by worker
    session_id: str | None = None
    sticky_decode: str | None = None  # where the session's KV lives
    sticky_prefill: str | None = None
    pinned_decode: str | None = None  # nobody else will do
    pinned_prefill: str | None = None
    lost: Collection[str] = ()  # never again for this request
    avoided: Collection[str] = ()  # only when there is no other
    disaggregate: bool | None = None  # forced path; None: whichever is cheaper
    send_back: SendBackPolicy = "never"  # KV that only the decode worker has, to who prefills
    local_prefill_tokens: int = 0  # longer uncached suffixes are never prefilled on decode
    is_long: bool = False  # among the prompts of late
    draw: int = 0  # a random number of this request
    ttft: float | None = None  # seconds within which its class is due its first token
    pace: float | None = None  # seconds of a decode step it can bear
    recent_scale: float = 1.0  # WorkerView.recent_tokens times this are tokens

    def num_uncached(self, worker: str) -> int:
        """Prompt tokens the worker has to compute; at least the last one."""
        return max(1, self.num_tokens - self.cached_tokens.get(worker, 0))


def decode_load(view: WorkerView) -> float:
    """Share of the scarcer of rows and pages that is promised."""
    rows = view.num_rows / max(1, view.num_slots)
    pages = view.num_reserved_pages / max(1, view.num_pages)
    return max(rows, pages)


def prefill_load(view: WorkerView) -> float:
    return float(view.num_prefill_tokens)


def capable_decoders(fleet: Fleet, wishes: Wishes) -> list[WorkerView]:
    """Workers that could hold the whole sequence when empty, busy or not."""
    pinned, lost, num_pages = wishes.pinned_decode, wishes.lost, wishes.num_sequence_pages
    there = [
        view
        for view in fleet
        if view.is_available
        and view.role != "prefill"
        and view.num_slots > 0
        and view.num_pages >= num_pages
        and view.name not in lost
        and (pinned is None or view.name == pinned)
    ]
    return _preferred(there, wishes)


def free_decoders(fleet: Fleet, wishes: Wishes) -> list[WorkerView]:
    """Those of them with a row to give, at a pace that the request can bear."""
    capable = capable_decoders(fleet, wishes)
    free = [view for view in capable if view.num_rows < view.num_slots]
    if wishes.pace is None:
        return free
    can_be_kept = _can_be_kept(capable, wishes.pace)
    return [view for view in free if _keeps_pace(view, wishes.pace, can_be_kept)]


def only_ones_that_do(fleet: Fleet, wishes: Wishes) -> Collection[str]:
    """The workers it waits for, when one that is of no use to it has a row free; else none."""
    capable, pace = capable_decoders(fleet, wishes), wishes.pace
    if pace is not None and _can_be_kept(capable, pace):
        capable = [view for view in capable if view.step_line.at(1) <= PACE_FACTOR * pace]
    names = {view.name for view in capable}
    others_have_room = any(
        view.is_available and view.decodes and view.num_rows < view.num_slots
        for view in fleet
        if view.name not in names
    )
    return names if others_have_room else ()


def _can_be_kept(capable: Sequence[WorkerView], pace: float) -> bool:
    return any(view.step_line.at(1) <= pace for view in capable)


def _keeps_pace(view: WorkerView, pace: float, can_be_kept: bool) -> bool:
    """Whether one row more leaves steps short enough.

    An empty batch may be a little slower. Where nobody is fast enough, it is as fast as it gets.
    """
    line = view.step_line
    step, alone = line.at(view.num_rows + 1), line.at(1)
    if can_be_kept:
        return step <= pace or (view.num_rows == 0 and alone <= PACE_FACTOR * pace)
    return view.num_rows == 0 or step <= PACE_FACTOR * alone


def yielding_decoders(fleet: Fleet, wishes: Wishes) -> list[WorkerView]:
    """Those without, where a row of a lower priority would be preempted."""
    full = {view.name for view in fleet if 0 < view.num_slots <= view.num_rows}
    if not full:
        return []
    return [
        view
        for view in capable_decoders(fleet, wishes)
        if view.name in full
        and view.lowest_priority is not None
        and view.lowest_priority < wishes.row.priority
    ]


def has_room(fleet: Fleet, wishes: Wishes) -> bool:
    """Whether by the router's own count somebody has a row and the first pages free.

    As on the workers, one page is left for each row that may still grow.
    """
    return any(
        view.num_pages - view.num_reserved_pages - view.num_growing_rows >= wishes.row.num_pages
        for view in free_decoders(fleet, wishes)
    )


def capable_prefills(fleet: Fleet, decode_worker: str | None, wishes: Wishes) -> list[WorkerView]:
    """Workers that may prefill for this decode worker; colocated ones only when asked for."""
    pinned, lost = wishes.pinned_prefill, wishes.lost
    allow_colocated = wishes.disaggregate is True or pinned is not None
    there = [
        view
        for view in fleet
        if view.is_available
        and (view.role == "prefill" or (allow_colocated and view.role == "colocated"))
        and view.name != decode_worker
        and view.name not in lost
        and (pinned is None or view.name == pinned)
    ]
    return _preferred(there, wishes)


def may_be_local(decoder: WorkerView, num_uncached_tokens: int, limit: int) -> bool:
    """Whether this decode worker may prefill the suffix itself."""
    if not decoder.can_prefill:
        return False
    return decoder.role == "colocated" or num_uncached_tokens <= limit


def forced_path(decoder: WorkerView, wishes: Wishes) -> Path | None:
    """The path that the request or its pins leave no choice about."""
    if wishes.disaggregate is not None:
        return "disaggregated" if wishes.disaggregate else "local"
    if wishes.pinned_prefill is not None:
        return "local" if wishes.pinned_prefill == decoder.name else "disaggregated"
    return None


def _preferred(there: list[WorkerView], wishes: Wishes) -> list[WorkerView]:
    """Without suspended and avoided ones unless nobody else is there."""
    avoided = wishes.avoided
    return [view for view in there if not view.is_suspended and view.name not in avoided] or there
