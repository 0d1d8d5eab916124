"""What is done when a worker breaks an attempt: facts for the failure table, and what it decides.

Who failed is excluded and blamed, the table decides, the record goes back to WAITING. Knows no
streams and holds nothing. One for each `jpd.router.journey`.
"""

import logging
from dataclasses import dataclass

from jpd.request import RequestState
from jpd.router import policy
from jpd.router.demand import DRAW_FACTOR, DRAW_RANGE, Demand
from jpd.router.failure import (
    Action,
    AttemptFailedError,
    Fault,
    FaultFacts,
    backoff_seconds,
    decide,
)
from jpd.router.parts import RouterParts
from jpd.router.record import RequestRecord

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tried:
    """Who an attempt went to."""

    decode_worker: str
    prefill_worker: str  # "": none was there
    num_uncached_tokens: int  # that the decode worker lacked


class Recovery:
    """The faults of one request, and how it goes on."""

    def __init__(self, parts: RouterParts, record: RequestRecord, demand: Demand) -> None:
        self._parts, self._record, self._demand = parts, record, demand
        self.fatal_fault: Fault | None = None  # the one after which the table said fail

    def begin_again(self, failed: AttemptFailedError, tried: Tried) -> float:
        """Back to WAITING by the failure table; the seconds until then. Raises: it says fail."""
        record, fault, clock = self._record, failed.fault, self._parts.clock
        record.num_faults[fault] += 1
        self._blame(fault, tried)
        action = decide(self._parts.config.failure, fault, self._facts(fault, tried))
        _log.warning(
            "request %s: attempt %s.%d: %s: %s: %s",
            record.request.request_id,
            record.internal_id,
            record.num_attempts,
            fault.value,
            failed.error,
            action.value,
            extra={"fields": {"request_id": record.request.request_id}},
        )
        if action is Action.FAIL:
            self.fatal_fault = fault
            raise failed.error
        self._count(fault, tried)
        record.note(action.value)
        record.must_be_local = action in (Action.LOCAL_PREFILL, Action.RECOMPUTE_ON_DECODE)
        record.advance(RequestState.WAITING, clock())
        draw = record.sequence * DRAW_FACTOR % DRAW_RANGE / DRAW_RANGE
        seconds = backoff_seconds(action, record.num_faults[fault], draw)
        return min(seconds, max(0.0, record.request.deadline - clock()))

    def note_unreachable(self, worker: str) -> None:
        """A decode worker could not be asked for room: it is not asked again."""
        self._record.lost_workers.add(worker)
        self._parts.fleet.note_fault(worker)
        self._parts.metrics.retries.labels("reserve_failed", worker, "decode").inc()
        self._record.timeline.num_retries += 1

    def _blame(self, fault: Fault, tried: Tried) -> None:
        """Exclude who failed: for good when lost; after a transfer only if there is another."""
        record, prefill, decode = self._record, tried.prefill_worker, tried.decode_worker
        if fault is Fault.PREEMPTED:
            self._parts.metrics.preemptions.labels(decode).inc()
            record.note(fault.value)
            return
        excluded, workers = {
            Fault.PREFILL_LOST: (record.lost_workers, {prefill}),
            Fault.DECODE_LOST: (record.lost_workers, {decode}),
            Fault.TRANSFER_FAILED: (record.avoided_workers, {prefill, decode}),
        }[fault]
        for worker in workers:
            if worker:
                excluded.add(worker)
                self._parts.fleet.note_fault(worker)

    def _facts(self, fault: Fault, tried: Tried) -> FaultFacts:
        fleet = self._parts.fleet
        decoder, wishes = fleet.view(tried.decode_worker), self._demand.wishes()
        limit = self._parts.config.local_prefill_tokens
        prefill = self._parts.placement.choose_prefill(decoder.name, wishes)
        return FaultFacts(
            num_faults=self._record.num_faults[fault],
            is_short=policy.may_be_local(decoder, tried.num_uncached_tokens, limit),
            other_prefill=prefill is not None,
            other_decode=bool(policy.capable_decoders(fleet.snapshot(), wishes)),
        )

    def _count(self, fault: Fault, tried: Tried) -> None:
        """A retry; a preempted request has lost nothing but its place."""
        if fault is Fault.PREEMPTED:
            return
        is_prefill = fault is Fault.PREFILL_LOST
        worker = tried.prefill_worker if is_prefill else tried.decode_worker
        role = "prefill" if is_prefill else "decode"
        self._parts.metrics.retries.labels(fault.value, worker, role).inc()
        self._record.timeline.num_retries += 1
