"""Who gets a request: the configured policy, a session's own workers, and the path of the prompt.

1. `wishes` says what a request wants: pages, cached prefixes, session, pins.
2. `rank_decoders`: whom to ask for a reservation, best first.
3. `choose`: once the reservation tells what the decode worker holds, path and prefill worker.

A session is a hint, never a pin: it yields when its worker is gone, full, much more loaded, or when
another holds far more of the prompt. Called by `jpd.router.journey` and by `jpd bench router`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from jpd.cache.page_hashes import PageHashes
from jpd.config import RouterConfig
from jpd.router.cost import CostTerms, explain, is_local_cheaper, is_sent_back_to
from jpd.router.fleet import Fleet
from jpd.router.policies import POLICIES
from jpd.router.policy import Path, Wishes, WorkerView, decode_load, prefill_load, yielding_decoders

AFFINITY_FACTOR = 2.0
"""A session leaves a worker that carries more than this times the least load, plus a slack."""
DECODE_SLACK = 0.25  # of a full batch or pool
PREFILL_SLACK_TOKENS = 1024
LENGTH_DECAY = 0.98  # of what is known of prompt and output lengths, at each request
LONG_FACTOR = 1.5  # times the mean is a long prompt
FIRST_OUTPUT_TOKENS = 128.0  # expected before any answer has ended


Reason = Literal["pinned", "session", "prefix", "load"]
"""What tipped the scales; the first of these that holds."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Path and workers of one attempt, and what they were expected to cost."""

    path: Path
    prefill: WorkerView
    decode: WorkerView
    num_uncached_tokens: int  # to be computed on the prefill worker, as far as is known
    is_sent_back: bool  # what the decode worker holds goes to the prefill worker first
    reason: Reason
    wishes: Wishes
    fleet: Sequence[WorkerView]

    def explain(self) -> CostTerms:
        """The terms of its cost; off the way of the decision, which did not need them by name."""
        return explain(self.decode, self.prefill, self.wishes, self.fleet)


class Placement:
    """The decisions of one router over its fleet."""

    def __init__(self, fleet: Fleet, config: RouterConfig, page_size: int) -> None:
        self._fleet, self._page_size = fleet, page_size
        self.policy_name, self._policy = config.policy, POLICIES[config.policy]
        self._limit = config.local_prefill_tokens
        self._send_back = config.send_back
        self._mean_prompt = 0.0
        self._mean_output = FIRST_OUTPUT_TOKENS

    def note_prompt(self, num_tokens: int) -> None:
        """A request has come, so many tokens long."""
        known = self._mean_prompt or float(num_tokens)
        self._mean_prompt = known + (1.0 - LENGTH_DECAY) * (num_tokens - known)

    def note_output(self, num_tokens: int) -> None:
        """An answer has ended with so many tokens."""
        self._mean_output += (1.0 - LENGTH_DECAY) * (num_tokens - self._mean_output)

    def complete(
        self, wishes: Wishes, page_hashes: PageHashes | Sequence[int], max_output_tokens: int
    ) -> Wishes:
        """The wishes of a request with what is known here: cached prefixes, expected lengths."""
        matched = self._fleet.prefixes.match(page_hashes)
        return wishes._replace(
            cached_tokens={name: pages * self._page_size for name, pages in matched.items()},
            num_output_tokens=min(self._mean_output, float(max_output_tokens)),
            local_prefill_tokens=self._limit,
            send_back=self._send_back,
            is_long=wishes.num_tokens > LONG_FACTOR * self._mean_prompt,
            recent_scale=self._fleet.recent_scale(),
        )

    def rank_decoders(self, wishes: Wishes) -> list[WorkerView]:
        """Where to ask for a reservation, best first. Empty: every row is taken, or nobody can.

        Last those without a free row where one of a lower priority would be preempted.
        """
        ranked = self._policy.rank_decoders(self._fleet.snapshot(), wishes)
        if self._policy.keeps_sessions:
            _stick(ranked, wishes.sticky_decode, decode_load, DECODE_SLACK)
        return ranked + yielding_decoders(self._fleet.snapshot(), wishes)

    def choose_prefill(self, decode_worker: str, wishes: Wishes) -> WorkerView | None:
        """The best prefill worker for this decode worker; None when nobody is there."""
        decoder = self._fleet.view(decode_worker)
        ranked = self._policy.rank_prefills(self._fleet.snapshot(), decoder, wishes)
        if not ranked:
            return None
        sticky = wishes.sticky_prefill
        if self._policy.keeps_sessions and sticky is not None:
            least = wishes.num_uncached(ranked[0].name)
            if wishes.num_uncached(sticky) <= AFFINITY_FACTOR * least + self._page_size:
                _stick(ranked, sticky, prefill_load, PREFILL_SLACK_TOKENS)
        return ranked[0]

    def choose(self, decode_worker: str, num_cached_tokens: int, wishes: Wishes) -> Choice | None:
        """Path and prefill worker, the decode worker's own word on its cache in hand.

        None: the prompt has to be prefilled apart, and nobody is there to do it.
        """
        if wishes.cached_tokens.get(decode_worker, 0) != num_cached_tokens:
            cached = {**wishes.cached_tokens, decode_worker: num_cached_tokens}
            wishes = wishes._replace(cached_tokens=cached)
        decoder = self._fleet.view(decode_worker)
        prefill = self.choose_prefill(decode_worker, wishes)
        path: Path = "local" if is_local_cheaper(decoder, prefill, wishes) else "disaggregated"
        chosen = decoder if path == "local" else prefill
        if chosen is None:
            return None
        reason = _reason(chosen.name, decode_worker, wishes, self._policy.keeps_sessions)
        num_uncached = wishes.num_uncached(chosen.name)
        goes_back = path == "disaggregated" and is_sent_back_to(chosen, decoder, wishes)
        if goes_back:
            num_uncached = wishes.num_uncached(decode_worker)
        return Choice(
            path,
            chosen,
            decoder,
            num_uncached,
            goes_back,
            reason,
            wishes,
            self._fleet.snapshot(),
        )


def _reason(prefill: str, decode: str, wishes: Wishes, keeps_sessions: bool) -> Reason:
    if wishes.pinned_decode is not None or wishes.pinned_prefill is not None:
        return "pinned"
    if keeps_sessions and decode == wishes.sticky_decode:
        return "session"
    return "prefix" if wishes.cached_tokens.get(prefill) else "load"


def _stick(
    ranked: list[WorkerView],
    sticky: str | None,
    load: Callable[[WorkerView], float],
    slack: float,
) -> None:
    """Put a session's worker first, unless it is much more loaded than the least loaded one."""
    if sticky is None:
        return
    for position, view in enumerate(ranked):
        if view.name == sticky:
            least = min(load(other) for other in ranked)
            if load(view) <= AFFINITY_FACTOR * least + slack:
                ranked.insert(0, ranked.pop(position))
            return
