"""The placement policies by name: each ranks the workers of one hop over one snapshot.

    cost              least milliseconds, both hops together: see `jpd.router.cost`
    round_robin       whoever was chosen longest ago
    least_load        share of rows and pages; prompt tokens not yet prefilled
    power_of_two      the less loaded of two drawn by lot
    least_kv          fewest pages promised
    least_requests    fewest requests
    prefix_affinity   most of the prompt cached; among equals the least load
    session_affinity  a session's own worker, a new session's by its hash; others by load
    length_aware      long prompts to the workers measured fast, short ones to the others

Chosen by `[router] policy`. Called by `jpd.router.placement`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from jpd.router import cost
from jpd.router.policy import (
    Fleet,
    Wishes,
    WorkerView,
    capable_prefills,
    decode_load,
    free_decoders,
    prefill_load,
)

Hop = Literal["prefill", "decode"]
Ranker = Callable[[Sequence[WorkerView], Wishes, Hop], list[WorkerView]]

EQUAL_PACE = 1.05
"""Times the mean is no slower worker yet, so that noise makes no pools."""
SPILL_FACTOR = 2.0
"""A long prompt leaves the fast workers when they are this much busier than the others."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How both hops are ranked. `keeps_sessions`: a session's worker goes first, within bounds."""

    rank_decoders: Callable[[Fleet, Wishes], list[WorkerView]]
    rank_prefills: Callable[[Fleet, WorkerView, Wishes], list[WorkerView]]
    keeps_sessions: bool = False


def _load(view: WorkerView, hop: Hop) -> float:
    return decode_load(view) if hop == "decode" else prefill_load(view)


def _sorted(views: Sequence[WorkerView], key: Callable[[WorkerView], float]) -> list[WorkerView]:
    return sorted(views, key=lambda view: (key(view), view.last_chosen))


def round_robin(views: Sequence[WorkerView], wishes: Wishes, hop: Hop) -> list[WorkerView]:
    return _sorted(views, lambda view: 0.0)


def least_load(views: Sequence[WorkerView], wishes: Wishes, hop: Hop) -> list[WorkerView]:
    return _sorted(views, lambda view: _load(view, hop))


def power_of_two(views: Sequence[WorkerView], wishes: Wishes, hop: Hop) -> list[WorkerView]:
    """The others follow in the order of the draw, should both refuse."""
    if len(views) < 2:
        return list(views)
    first = wishes.draw % len(views)
    second = (first + 1 + wishes.draw // len(views) % (len(views) - 1)) % len(views)
    drawn = _sorted([views[first], views[second]], lambda view: _load(view, hop))
    return drawn + [view for view in views if view not in drawn]


def least_kv(views: Sequence[WorkerView], wishes: Wishes, hop: Hop) -> list[WorkerView]:
    return _sorted(views, lambda view: view.num_reserved_pages / max(1, view.num_pages))


def least_requests(views: Sequence[WorkerView], wishes: Wishes, hop: Hop) -> list[WorkerView]:
    return _sorted(views, lambda view: view.num_rows + view.num_prefills)


def prefix_affinity(views: Sequence[WorkerView], wishes: Wishes, hop: Hop) -> list[WorkerView]:
    cached = wishes.cached_tokens
    return sorted(
        views,
        key=lambda view: (-cached.get(view.name, 0), _load(view, hop), view.last_chosen),
    )


def session_affinity(views: Sequence[WorkerView], wishes: Wishes, hop: Hop) -> list[WorkerView]:
    """By the highest hash of session and worker, so that a worker less moves only its sessions."""
    session = wishes.session_id
    if session is None:
        return least_load(views, wishes, hop)
    return sorted(views, key=lambda view: crc32(f"{session}/{view.name}".encode()))


def _pace(view: WorkerView, hop: Hop) -> float:
    """Seconds of a typical prompt, or of a typical step."""
    return view.prefill_line.at(1024.0) if hop == "prefill" else view.step_line.at(16.0)


def length_aware(views: Sequence[WorkerView], wishes: Wishes, hop: Hop) -> list[WorkerView]:
    """Strong: at least as fast as the mean, by measured rates, never by product names."""
    seconds = {view.name: _pace(view, hop) for view in views}
    ranked = _sorted(views, lambda view: _load(view, hop) * seconds[view.name])
    if len(ranked) < 2:
        return ranked
    mean = sum(seconds.values()) / len(seconds)
    strong = [view for view in ranked if seconds[view.name] <= EQUAL_PACE * mean]
    weak = [view for view in ranked if seconds[view.name] > EQUAL_PACE * mean]
    if not weak or not strong:
        return ranked
    first, second = (strong, weak) if wishes.is_long else (weak, strong)
    busy, idle = (_load(pool[0], hop) * seconds[pool[0].name] for pool in (first, second))
    must_spill = busy > SPILL_FACTOR * idle and _load(first[0], hop) > 0.0
    return second + first if must_spill else first + second


def _each_hop(rank: Ranker, *, keeps_sessions: bool = False) -> Policy:
    return Policy(
        lambda fleet, wishes: rank(free_decoders(fleet, wishes), wishes, "decode"),
        lambda fleet, decoder, wishes: rank(
            capable_prefills(fleet, decoder.name, wishes), wishes, "prefill"
        ),
        keeps_sessions,
    )


POLICIES: Mapping[str, Policy] = {
    "cost": Policy(cost.rank_decoders, cost.rank_prefills, keeps_sessions=True),
    "round_robin": _each_hop(round_robin),
    "least_load": _each_hop(least_load),
    "power_of_two": _each_hop(power_of_two),
    "least_kv": _each_hop(least_kv),
    "least_requests": _each_hop(least_requests),
    "prefix_affinity": _each_hop(prefix_affinity),
    "session_affinity": _each_hop(session_affinity, keeps_sessions=True),
    "length_aware": _each_hop(length_aware),
}
