"""Placement: pure functions over one look at the fleet.

Least load, with session affinity that yields. Load is counted by phase: a decode worker by the
rows and pages promised, a prefill worker by the prompt tokens given to it and not yet answered.
Knows no clients and keeps no state; called by `jpd.router.journey`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from jpd.worker.protocol import Role

Path = Literal["disaggregated", "local"]
Fleet = Sequence["WorkerView"]

AFFINITY_FACTOR = 2.0
"""A session leaves a worker that carries more than this times the least load, plus a slack."""
DECODE_SLACK = 0.25  # of a full batch or pool
PREFILL_SLACK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at one moment. Counts of work are the router's own, taken at once."""

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
    num_prefill_tokens: int = 0  # of prompts that were not answered yet
    num_growing_rows: int = 0  # that may need more pages than were reserved
    lowest_priority: int | None = None  # of the rows; None: there is none
    last_chosen: int = 0  # order of the last assignment: ties go round

    @property
    def decodes(self) -> bool:
        return self.role != "prefill" and self.num_slots > 0


@dataclass(frozen=True, slots=True)
class Row:
    """What one attempt takes of a decode worker before it begins."""

    num_pages: int
    grows: bool = False  # it may need more than these
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one request wants of the fleet."""

    row: Row
    num_sequence_pages: int  # for prompt and output together
    sticky_decode: str | None = None  # where the session's KV lives
    sticky_prefill: str | None = None
    lost: Collection[str] = ()  # never again for this request
    avoided: Collection[str] = ()  # only when there is no other


def decode_load(view: WorkerView) -> float:
    """Share of the scarcer of rows and pages that is promised."""
    rows = view.num_rows / max(1, view.num_slots)
    pages = view.num_reserved_pages / max(1, view.num_pages)
    return max(rows, pages)


def prefill_load(view: WorkerView) -> float:
    return float(view.num_prefill_tokens)


def capable_decoders(fleet: Fleet, wishes: Wishes) -> list[WorkerView]:
    """Workers that could hold the whole sequence when empty, busy or not."""
    num_pages = wishes.num_sequence_pages
    views = [view for view in fleet if view.decodes and view.num_pages >= num_pages]
    return _usable(views, wishes)


def rank_decoders(fleet: Fleet, wishes: Wishes) -> list[WorkerView]:
    """Where to ask for a reservation, best first. Empty: every row is taken, or nobody can.

    Last those without a free row where one of a lower priority would be preempted.
    """
    able = capable_decoders(fleet, wishes)
    free = [view for view in able if view.num_rows < view.num_slots]
    ranked = _rank(free, decode_load, wishes.sticky_decode, DECODE_SLACK)
    return ranked + [view for view in able if view not in free and _yields(view, wishes)]


def _yields(view: WorkerView, wishes: Wishes) -> bool:
    return view.lowest_priority is not None and view.lowest_priority < wishes.row.priority


def has_room(fleet: Fleet, wishes: Wishes) -> bool:
    """Whether by the router's own count somebody has a row and the first pages free.

    As on the workers, one page is left for each row that may still grow.
    """
    return any(
        view.num_rows < view.num_slots
        and view.num_pages - view.num_reserved_pages - view.num_growing_rows >= wishes.row.num_pages
        for view in capable_decoders(fleet, wishes)
    )


def choose_prefill(
    fleet: Fleet, decode_worker: str, wishes: Wishes, *, allow_colocated: bool = False
) -> WorkerView | None:
    """The prefill worker of an attempt, or None. Colocated ones only when asked for."""
    views = [
        view
        for view in fleet
        if view.name != decode_worker
        and (view.role == "prefill" or (allow_colocated and view.role == "colocated"))
    ]
    ranked = _rank(
        _usable(views, wishes), prefill_load, wishes.sticky_prefill, PREFILL_SLACK_TOKENS
    )
    return ranked[0] if ranked else None


def choose_path(
    decoder: WorkerView,
    num_uncached_tokens: int,
    local_prefill_tokens: int,
    disaggregate: bool | None,
) -> Path:
    """Prefill on the decode worker or apart, by the uncached suffix, not the prompt's length."""
    if disaggregate is not None:
        return "disaggregated" if disaggregate else "local"
    if decoder.role == "colocated" or is_short(decoder, num_uncached_tokens, local_prefill_tokens):
        return "local"
    return "disaggregated"


def is_short(decoder: WorkerView, num_uncached_tokens: int, local_prefill_tokens: int) -> bool:
    """Whether this decode worker may prefill the suffix itself."""
    if not decoder.can_prefill:
        return False
    return decoder.role == "colocated" or num_uncached_tokens <= local_prefill_tokens


def _usable(views: Sequence[WorkerView], wishes: Wishes) -> list[WorkerView]:
    """Without the lost ones; without suspended and avoided ones unless nobody else is there."""
    there = [view for view in views if view.is_available and view.name not in wishes.lost]
    good = [view for view in there if not view.is_suspended and view.name not in wishes.avoided]
    return good or there


def _rank(
    views: Sequence[WorkerView],
    load: Callable[[WorkerView], float],
    sticky: str | None,
    slack: float,
) -> list[WorkerView]:
    ranked = sorted(views, key=lambda view: (load(view), view.last_chosen))
    if sticky is None:
        return ranked
    for position, view in enumerate(ranked):
        if view.name == sticky and load(view) <= AFFINITY_FACTOR * load(ranked[0]) + slack:
            ranked.insert(0, ranked.pop(position))
            break
    return ranked
