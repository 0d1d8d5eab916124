"""The record of one request: its state, what was sent, what was tried, and where its time went.

    WAITING ── RESERVED ── PREFILLING ── TRANSFERRING ── DECODING ── FINISHED
       ^          |            |              |             |
       └──────────┴── retry ───┴──────────────┴─────────────┘

CANCELLED, FAILED: from any live state. Knows no workers and does no I/O. Driven by
`jpd.router.journey`; every transition is checked.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jpd.cache.page_hashes import PageHashes
from jpd.config import SloConfig
from jpd.request import Request, RequestState, SamplingParams, Timeline
from jpd.router.failure import Fault
from jpd.worker.protocol import Attempt

MAX_PREEMPTIONS = 3
"""After so many a request has the highest priority: no flood of another class starves it."""

_S = RequestState
TERMINAL_STATES = frozenset({_S.FINISHED, _S.CANCELLED, _S.FAILED})
_ALWAYS = frozenset({_S.CANCELLED, _S.FAILED, _S.FINISHED})
"""FINISHED needs a token sent: its last one, or a stop string that the frontend saw in the text."""

TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {
    _S.WAITING: _ALWAYS | {_S.RESERVED},
    _S.RESERVED: _ALWAYS | {_S.PREFILLING, _S.WAITING},
    _S.PREFILLING: _ALWAYS | {_S.TRANSFERRING, _S.DECODING, _S.WAITING},
    _S.TRANSFERRING: _ALWAYS | {_S.DECODING, _S.WAITING},
    _S.DECODING: _ALWAYS | {_S.WAITING},
    _S.FINISHED: frozenset(),
    _S.CANCELLED: frozenset(),
    _S.FAILED: frozenset(),
}


class IllegalTransitionError(AssertionError):
    """A bug of ours: a request went from one state to another that does not follow it."""


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request with every open choice made: length, seed, stop ids, priority."""

    request: Request
    sampling: SamplingParams  # max_tokens and seed are set
    stop_token_ids: tuple[int, ...]
    priority: int
    highest_priority: int  # of all classes and its own
    slo: SloConfig | None = None

    @property
    def max_tokens(self) -> int:
        assert self.sampling.max_tokens is not None, "sampling was not resolved"
        return self.sampling.max_tokens


_PHASES: Mapping[RequestState, str] = {
    _S.WAITING: "queue",
    _S.RESERVED: "prefill",
    _S.PREFILLING: "prefill",
    _S.TRANSFERRING: "transfer",
    _S.DECODING: "decode",
}


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One phase of one attempt, in seconds of the router's clock."""

    phase: str  # queue, prefill, transfer or decode
    worker: str  # "" while none has it
    start: float
    end: float


@dataclass(slots=True)
class RequestRecord:
    """One live request. Mutated on the router's event loop only."""

    resolved: ResolvedRequest
    internal_id: str  # never the client's: two live requests may carry the same id of theirs
    sequence: int  # order of arrival
    phase_started: float  # when the present state's time began to count
    state: RequestState = RequestState.WAITING
    timeline: Timeline = field(default_factory=Timeline)
    sent_token_ids: list[int] = field(default_factory=list)
    first_token_time: float | None = None
    last_token_time: float = 0.0
    num_attempts: int = 0
    num_faults: Counter[Fault] = field(default_factory=Counter)
    lost_workers: set[str] = field(default_factory=set)  # never again for this request
    avoided_workers: set[str] = field(default_factory=set)  # only when there is no other
    must_be_local: bool = False  # the failure table decided so
    page_hashes: PageHashes | None = None  # of the prompt, once asked for
    spans: list[PhaseSpan] = field(default_factory=list)  # those of its phases that took time

    @property
    def request(self) -> Request:
        return self.resolved.request

    @property
    def is_live(self) -> bool:
        return self.state not in TERMINAL_STATES

    @property
    def num_tokens_left(self) -> int:
        return self.resolved.max_tokens - len(self.sent_token_ids)

    @property
    def priority(self) -> int:
        """Its own; the highest there is once it has yielded often enough."""
        resolved = self.resolved
        has_yielded = self.num_faults[Fault.PREEMPTED] >= MAX_PREEMPTIONS
        return resolved.highest_priority if has_yielded else resolved.priority

    def advance(self, state: RequestState, now: float) -> None:
        """Enter `state`; the time since the last transition goes to the state that is left."""
        is_empty = state is RequestState.FINISHED and not self.sent_token_ids
        if is_empty or state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"{self.internal_id}: {self.state} -> {state}")
        self._charge(max(0.0, now - self.phase_started))
        self.spans = self.spans_until(now)
        self.phase_started = max(now, self.phase_started)
        self.state = state

    def _charge(self, seconds: float) -> None:
        match self.state:
            case RequestState.WAITING:
                self.timeline.queue_seconds += seconds
            case RequestState.RESERVED | RequestState.PREFILLING:
                self.timeline.prefill_seconds += seconds
            case RequestState.TRANSFERRING:
                self.timeline.transfer_seconds += seconds
            case _:
                self.timeline.decode_seconds += seconds

    def spans_until(self, now: float) -> list[PhaseSpan]:
        """All spans; of a live request the present phase until `now` is the last."""
        start = self.phase_started
        if not self.is_live or now <= start:
            return list(self.spans)
        phase = _PHASES[self.state]
        timeline = self.timeline
        names = {"queue": "", "prefill": timeline.prefill_worker}
        worker = names.get(phase, timeline.decode_worker)
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.phase, last.worker, last.end) == (phase, worker, start):
            return [*self.spans[:-1], PhaseSpan(phase, worker, last.start, now)]
        return [*self.spans, PhaseSpan(phase, worker, start, now)]

    def next_attempt(self) -> Attempt:
        """The prompt and all tokens sent so far, what is left to ask for, and a new id."""
        self.num_attempts += 1
        num_sent = len(self.sent_token_ids)
        sampling = replace(
            self.resolved.sampling,
            max_tokens=self.num_tokens_left,
            min_tokens=max(0, self.resolved.sampling.min_tokens - num_sent),
            prompt_logprobs=None if num_sent else self.resolved.sampling.prompt_logprobs,
        )
        return Attempt(
            attempt_id=f"{self.internal_id}.{self.num_attempts}",
            token_ids=self.request.prompt_token_ids + tuple(self.sent_token_ids),
            sampling=sampling,
            stop_token_ids=self.resolved.stop_token_ids,
            priority=self.priority,
            deadline=self.request.deadline,
            num_output_tokens=num_sent,
            sequence=self.sequence,
            cache_salt=self.request.cache_salt,
        )

    def take_tokens(self, token_ids: Sequence[int], now: float) -> None:
        """Count tokens as sent to the client."""
        if not token_ids:
            return
        if self.first_token_time is None:
            self.first_token_time = now
            self.timeline.ttft_seconds = now - self.request.arrival_time
        self.last_token_time = now
        self.sent_token_ids.extend(token_ids)
        if len(self.sent_token_ids) > 1:
            elapsed = now - self.first_token_time
            self.timeline.tpot_seconds = elapsed / (len(self.sent_token_ids) - 1)

    def note(self, step: str) -> None:
        """Add a step to the path the client may ask to see."""
        self.timeline.path.append(step)
