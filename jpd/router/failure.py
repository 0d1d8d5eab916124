"""The failure table: what is done about each fault, as one function of the facts.

Knows no workers and keeps no state; `jpd.router.recovery` gathers the facts and does what is
decided.

    prefill lost     another prefill worker, once; else the decode worker if short; else fail
    transfer failed  once more; else recompute on the decode worker if short; else fail
    decode lost      replay prompt and sent tokens elsewhere; else fail
    preempted        replay when there is room; nobody is blamed, only the deadline bounds it
"""

import enum
from dataclasses import dataclass

from jpd.config import FailureConfig
from jpd.errors import PreemptedError, TransferError, WorkerError

MAX_RETRIES_OF_A_KIND = 1
"""For lost prefills and failed transfers. Replays of lost decodes end by themselves: each excludes
a worker."""


FIRST_BACKOFF_SECONDS = 0.02
MAX_BACKOFF_SECONDS = 1.0


class Fault(enum.Enum):
    """What broke an attempt. The value is the label in metrics and in errors."""

    PREFILL_LOST = "prefill_lost"
    TRANSFER_FAILED = "transfer_failed"
    DECODE_LOST = "decode_lost"
    PREEMPTED = "preempted"  # its room was needed for others


class Action(enum.Enum):
    """What is done about it. The value stands in the path of the response."""

    RETRY_OTHER_PREFILL = "retry_other_prefill"
    LOCAL_PREFILL = "local_prefill"
    RETRY_TRANSFER = "retry_transfer"
    RECOMPUTE_ON_DECODE = "recompute_on_decode"
    REPLAY = "replay"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class FaultFacts:
    """What the table asks about the request and the fleet."""

    num_faults: int  # of this kind in this request, this one included
    is_short: bool  # the decode worker can prefill it, and the uncached suffix is within the limit
    other_prefill: bool  # a prefill worker that did not fail this request can take it
    other_decode: bool


class AttemptFailedError(WorkerError):
    """One attempt is over because of a worker; the request may live on."""

    def __init__(self, fault: Fault, error: WorkerError) -> None:
        super().__init__(error.worker, error.reason)
        self.fault, self.error = fault, error


def decide(config: FailureConfig, fault: Fault, facts: FaultFacts) -> Action:
    """The row of the table for this fault."""
    match fault:
        case Fault.PREFILL_LOST:
            return _prefill_lost(config, facts)
        case Fault.TRANSFER_FAILED:
            return _transfer_failed(config, facts)
        case Fault.DECODE_LOST:
            return _decode_lost(config, facts)
        case Fault.PREEMPTED:
            return Action.REPLAY


def _prefill_lost(config: FailureConfig, facts: FaultFacts) -> Action:
    if config.prefill_lost == "fail":
        return Action.FAIL
    if facts.num_faults <= MAX_RETRIES_OF_A_KIND and facts.other_prefill:
        return Action.RETRY_OTHER_PREFILL
    return Action.LOCAL_PREFILL if facts.is_short else Action.FAIL


def _transfer_failed(config: FailureConfig, facts: FaultFacts) -> Action:
    if config.transfer_failed == "fail":
        return Action.FAIL
    if facts.num_faults <= MAX_RETRIES_OF_A_KIND:
        return Action.RETRY_TRANSFER
    if facts.num_faults == MAX_RETRIES_OF_A_KIND + 1 and facts.is_short:
        return Action.RECOMPUTE_ON_DECODE
    return Action.FAIL


def _decode_lost(config: FailureConfig, facts: FaultFacts) -> Action:
    if config.decode_lost == "fail" or not facts.other_decode:
        return Action.FAIL
    return Action.REPLAY


def backoff_seconds(action: Action, num_faults: int, draw: float) -> float:
    """How long to wait before the next attempt; `draw` is between 0 and 1.

    What goes to the same workers again waits longer each time; a replay waits too, by lot, for all
    rows of a lost worker come at once. Another prefill worker is asked right away.
    """
    if action not in (Action.RETRY_TRANSFER, Action.REPLAY):
        return 0.0
    longest = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(num_faults, 10))
    return longest * draw


def classify(error: WorkerError, called: str, decode_worker: str) -> Fault:
    """Which fault an error of a call is. A worker that does both parts is the decode worker."""
    if isinstance(error, PreemptedError):
        return Fault.PREEMPTED
    if isinstance(error, TransferError):
        return Fault.TRANSFER_FAILED
    if decode_worker in (called, error.worker):
        return Fault.DECODE_LOST
    return Fault.PREFILL_LOST
