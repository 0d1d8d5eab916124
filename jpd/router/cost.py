"""What a placement costs, in milliseconds: the prompt on one worker, the answer on another.

    queue      prompts that came before            prefill   the uncached tokens
    duplicate  pages that are stored elsewhere     balance   prefilled more than peers
    send_back  bytes that only the decode worker   transfer  bytes that it lacks
               has, where that beats computing     stall     rows stopped by a local prefill
    decode     the answer at the batch's pace      batch     what it slows the others down
    headroom   rows and pages that are left

Rates are measured: see `jpd.router.rates`. Pure functions over a snapshot; called by
`jpd.router.policies` and, for what is told of a decision, by `jpd.router.placement`.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter, itemgetter
from typing import NamedTuple

from jpd.router.policy import (
    Fleet,
    Wishes,
    WorkerView,
    capable_prefills,
    decode_load,
    forced_path,
    free_decoders,
    may_be_local,
)

DUPLICATE_WEIGHT = 15.0
"""A page computed twice costs its time, and another page its place: counted so many times more."""
MOST_DUPLICATE_SECONDS, MOST_DUPLICATE_SHARE = 8.0, 0.5
"""No cache is worth a longer wait than this, nor than this share of what its class may wait."""
EVEN_SHARE = 0.5
"""Of a prompt's time, for a lead in work of late as large as the mean: decides among workers of
equal pace, so that caches age alike, and never against one much faster."""
FAIR_EXCESS, MOST_EXCESS = 0.05, 0.15
"""Share of work above the mean from which a prefix loses its worth, and at which it has none: so a
popular prefix spreads before its worker is hot."""
FEW_PROMPTS = 8
"""So many prompts more are no excess yet: a fleet that has just begun is never even."""
HEADROOM_WEIGHT = 0.5
NUM_PAIRED = 4
"""Best of each side that are weighed in pairs."""
TIE_SECONDS = 0.001
TIE_SHARE = 0.02
"""Costs that differ by less are equal: work goes round."""

_cost = itemgetter(0)
_last_chosen = attrgetter("last_chosen")


@dataclass(frozen=True, slots=True)
class CostTerms:
    """Milliseconds, by what they are for."""

    queue: float = 0.0
    prefill: float = 0.0
    duplicate: float = 0.0
    balance: float = 0.0
    send_back: float = 0.0
    transfer: float = 0.0
    stall: float = 0.0
    decode: float = 0.0
    batch: float = 0.0
    headroom: float = 0.0

    def rounded(self) -> dict[str, float]:
        """The terms that are there, for people to read."""
        return {name: round(value, 3) for name, value in asdict(self).items() if value >= 0.001}


class Peers(NamedTuple):
    """What a prefill on one worker is compared with; work is seconds of late."""

    most_cached: int = 0  # tokens of the prompt on the worker that holds most
    most_duplicate: float = 0.0  # seconds
    mean_slope: float = 0.0  # seconds a token
    least_work: float = 0.0
    even_price: float = 0.0  # for each second above that
    fair_work: float = 0.0
    excess: float = 1.0  # seconds above it at which a prefix is worth nothing


def peers_of(views: Sequence[WorkerView], wishes: Wishes) -> Peers:
    if not views:
        return Peers()
    cached, scale = wishes.cached_tokens, wishes.recent_scale
    most_cached = max([cached.get(view.name, 0) for view in views]) if cached else 0
    slopes = [view.prefill_line.slope for view in views]
    work = [view.recent_tokens * view.prefill_line.slope for view in views]
    mean_slope, mean_work = sum(slopes) / len(views), scale * sum(work) / len(views)
    whole = mean_slope * wishes.num_tokens
    much = mean_work + FEW_PROMPTS * whole + 1e-9
    may_wait = math.inf if wishes.ttft is None else MOST_DUPLICATE_SHARE * wishes.ttft
    return Peers(
        most_cached,
        min(MOST_DUPLICATE_SECONDS, may_wait),
        mean_slope,
        least_work=scale * min(work),
        even_price=EVEN_SHARE * whole / much,
        fair_work=mean_work + FAIR_EXCESS * much,
        excess=(MOST_EXCESS - FAIR_EXCESS) * much,
    )


def duplicate_seconds(num_cached: int, peers: Peers) -> float:
    """The price of storing once more what another worker holds."""
    again = max(0, peers.most_cached - num_cached)
    return min(peers.most_duplicate, DUPLICATE_WEIGHT * peers.mean_slope * again)


def balance_seconds(view: WorkerView, num_cached: int, wishes: Wishes, peers: Peers) -> float:
    """The price of having done more than the others of late."""
    slope = view.prefill_line.slope
    work = view.recent_tokens * wishes.recent_scale * slope
    price = peers.even_price * (work - peers.least_work)
    if num_cached and work > peers.fair_work:
        worth = slope * num_cached + duplicate_seconds(0, peers)
        worth -= duplicate_seconds(num_cached, peers)
        price += worth * min(1.0, (work - peers.fair_work) / peers.excess)
    return price


def prefill_seconds(view: WorkerView, num_uncached: int) -> float:
    """Until the first token: what is before it, and itself."""
    line = view.prefill_line
    num_tokens = view.num_prefill_tokens + num_uncached
    return line.base * (view.num_prefills + 1) + line.slope * num_tokens


def prefill_costs(views: Sequence[WorkerView], wishes: Wishes, peers: Peers) -> list[float]:
    """Seconds of each: time to the first token, and what it does to the caches of the fleet."""
    cached, num_tokens, costs = wishes.cached_tokens, wishes.num_tokens, []
    for view in views:
        num_cached = cached.get(view.name, 0)
        cost = prefill_seconds(view, max(1, num_tokens - num_cached))
        if num_cached < peers.most_cached:
            cost += duplicate_seconds(num_cached, peers)
        costs.append(cost + balance_seconds(view, num_cached, wishes, peers))
    return costs


def transfer_seconds(sender: WorkerView, receiver: WorkerView, wishes: Wishes) -> float:
    num_bytes = wishes.num_uncached(receiver.name) * receiver.kv_bytes_per_token
    return sender.link_to(receiver.name).at(num_bytes)


def num_sent_back(view: WorkerView, decoder: WorkerView, wishes: Wishes) -> int:
    """Prompt tokens that the decode worker could send to this prefill worker, which lacks them."""
    if wishes.send_back == "never":
        return 0
    cached = wishes.cached_tokens
    return max(0, cached.get(decoder.name, 0) - cached.get(view.name, 0))


def send_back_seconds(view: WorkerView, decoder: WorkerView, wishes: Wishes) -> float:
    num_bytes = num_sent_back(view, decoder, wishes) * decoder.kv_bytes_per_token
    return decoder.link_to(view.name).at(num_bytes)


def send_back_gain(view: WorkerView, decoder: WorkerView, wishes: Wishes) -> float:
    """Seconds that sending back saves against computing the same tokens again.

    Nothing is sent, and 0 saved, where it would cost more; unless it has to be.
    """
    num_tokens = num_sent_back(view, decoder, wishes)
    if not num_tokens:
        return 0.0
    saved = view.prefill_line.slope * num_tokens - send_back_seconds(view, decoder, wishes)
    return saved if wishes.send_back == "always" else max(0.0, saved)


def is_sent_back_to(view: WorkerView, decoder: WorkerView, wishes: Wishes) -> bool:
    """Whether the decode worker shall send what it has to this prefill worker."""
    if wishes.send_back == "always":
        return num_sent_back(view, decoder, wishes) > 0
    return send_back_gain(view, decoder, wishes) > 0.0


def stall_seconds(view: WorkerView, wishes: Wishes, num_rows: int) -> float:
    """What a prefill on the decode worker takes from its rows, all together."""
    line = view.prefill_line
    return num_rows * (line.base + line.slope * wishes.num_uncached(view.name))


def decode_cost(view: WorkerView, wishes: Wishes) -> float:
    """Seconds: the answer's own, what it adds to those of the others, and scarcity."""
    line, num_rows = view.step_line, view.num_rows
    step = line.base + line.slope * (num_rows + 1)
    rows = (num_rows + 1) / (view.num_slots or 1)
    pages = (view.num_reserved_pages + wishes.row.num_pages) / (view.num_pages or 1)
    scarce = HEADROOM_WEIGHT * step * (rows if rows > pages else pages)
    return wishes.num_output_tokens * (step + line.slope * num_rows + scarce)


def local_cost(view: WorkerView, wishes: Wishes, peers: Peers, num_rows: int) -> float:
    """Seconds of a prefill on the decode worker, whose other rows stand still meanwhile."""
    return prefill_costs([view], wishes, peers)[0] + stall_seconds(view, wishes, num_rows)


def rank_decoders(fleet: Fleet, wishes: Wishes) -> list[WorkerView]:
    """Decode workers by the cost of the best pair that each can be part of, best first."""
    decoders = free_decoders(fleet, wishes)
    prefills = capable_prefills(fleet, None, wishes)
    peers = peers_of(prefills or decoders, wishes)
    senders = sorted(zip(prefill_costs(prefills, wishes, peers), prefills, strict=True), key=_cost)
    own, rest = [(decode_cost(view, wishes), view) for view in decoders], []
    if len(own) > 2 * NUM_PAIRED and not any(view.role == "colocated" for view in decoders):
        own.sort(key=_cost)
        own, rest = own[: 2 * NUM_PAIRED], [view for _, view in own[2 * NUM_PAIRED :]]
    best = senders[:NUM_PAIRED]
    pairs = [(cost + _best_prefill(view, best, wishes, peers), view) for cost, view in own]
    return by_cost(pairs) + rest


def _best_prefill(
    decoder: WorkerView,
    senders: Sequence[tuple[float, WorkerView]],
    wishes: Wishes,
    peers: Peers,
) -> float:
    """Seconds of the best way to prefill for this decode worker, itself included if it may."""
    name, num_uncached = decoder.name, wishes.num_uncached(decoder.name)
    num_bytes = num_uncached * decoder.kv_bytes_per_token
    can_return = wishes.send_back != "never" and name in wishes.cached_tokens
    least = math.inf
    for cost, sender in senders:
        if can_return:
            cost -= send_back_gain(sender, decoder, wishes)
        if cost < least and sender.name != name:
            line = sender.links.get(name, sender.link_line)
            least = min(least, cost + line.base + line.slope * num_bytes)
    if may_be_local(decoder, num_uncached, wishes.local_prefill_tokens) or least == math.inf:
        least = min(least, local_cost(decoder, wishes, peers, decoder.num_rows))
    return least


def rank_prefills(fleet: Fleet, decoder: WorkerView, wishes: Wishes) -> list[WorkerView]:
    """Prefill workers for this decode worker, best first."""
    views = capable_prefills(fleet, decoder.name, wishes)
    return by_cost(list(zip(remote_costs(views, decoder, wishes), views, strict=True)))


def remote_costs(views: Sequence[WorkerView], decoder: WorkerView, wishes: Wishes) -> list[float]:
    """Seconds of a prefill on each, and of the way to the decode worker."""
    costs = prefill_costs(views, wishes, peers_of(views, wishes))
    name, num_bytes = decoder.name, wishes.num_uncached(decoder.name) * decoder.kv_bytes_per_token
    lines = [view.links.get(name, view.link_line) for view in views]
    if wishes.send_back != "never" and name in wishes.cached_tokens:
        gains = (send_back_gain(view, decoder, wishes) for view in views)
        costs = [cost - gain for cost, gain in zip(costs, gains, strict=True)]
    return [
        cost + line.base + line.slope * num_bytes for cost, line in zip(costs, lines, strict=True)
    ]


def by_cost(costs: list[tuple[float, WorkerView]]) -> list[WorkerView]:
    """Cheapest first; as good as the cheapest: who was chosen least lately."""
    if not costs:
        return []
    least = min(costs, key=_cost)[0]
    tie = least + TIE_SECONDS + TIE_SHARE * least
    equal = [view for cost, view in costs if cost <= tie]
    equal.sort(key=_last_chosen)
    dearer = [pair for pair in costs if pair[0] > tie]
    dearer.sort(key=_cost)
    return equal + [view for _, view in dearer]


def is_local_cheaper(decoder: WorkerView, prefill: WorkerView | None, wishes: Wishes) -> bool:
    """Whether the suffix should be prefilled where it is decoded. Its own row is not stalled."""
    choice = forced_path(decoder, wishes)
    if choice is not None:
        return choice == "local"
    num_uncached = wishes.num_uncached(decoder.name)
    if decoder.role == "colocated":
        return True
    if not may_be_local(decoder, num_uncached, wishes.local_prefill_tokens):
        return False
    if prefill is None:
        return True
    there = prefill_seconds(prefill, wishes.num_uncached(prefill.name))
    there += transfer_seconds(prefill, decoder, wishes) - send_back_gain(prefill, decoder, wishes)
    here = prefill_seconds(decoder, num_uncached)
    here += stall_seconds(decoder, wishes, max(0, decoder.num_rows - 1))
    return here <= there + TIE_SECONDS


def explain(decoder: WorkerView, prefill: WorkerView, wishes: Wishes, fleet: Fleet) -> CostTerms:
    """The terms of a placement that was chosen, the request itself not counted in the views."""
    is_local = decoder.name == prefill.name
    views = [decoder] if is_local else capable_prefills(fleet, decoder.name, wishes)
    peers = peers_of(views, wishes)
    line, step = prefill.prefill_line, decoder.step_line
    cached = wishes.cached_tokens.get(prefill.name, 0)
    num_rows, length = max(0, decoder.num_rows - 1), 1e3 * wishes.num_output_tokens
    pace = step.at(num_rows + 1)
    share = decode_load(decoder)
    is_sent_back = not is_local and is_sent_back_to(prefill, decoder, wishes)
    return CostTerms(
        queue=1e3 * (line.base * prefill.num_prefills + line.slope * prefill.num_prefill_tokens),
        prefill=1e3 * line.at(wishes.num_uncached(decoder.name if is_sent_back else prefill.name)),
        duplicate=1e3 * duplicate_seconds(cached, peers),
        balance=1e3 * balance_seconds(prefill, cached, wishes, peers),
        send_back=1e3 * send_back_seconds(prefill, decoder, wishes) if is_sent_back else 0.0,
        transfer=0.0 if is_local else 1e3 * transfer_seconds(prefill, decoder, wishes),
        stall=1e3 * stall_seconds(decoder, wishes, num_rows) if is_local else 0.0,
        decode=length * pace,
        batch=length * step.slope * num_rows,
        headroom=length * HEADROOM_WEIGHT * pace * share,
    )
