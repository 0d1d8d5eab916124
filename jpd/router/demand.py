"""What one request asks of the fleet: room, workers, a place in line, and until when.

Reads the record as it is at the moment, so that a retry asks for what is left. Hashes the prompt
once. Called by `jpd.router.journey`.
"""

from collections.abc import Callable

from jpd.cache.page_allocator import num_pages_for
from jpd.cache.page_hashes import PageHashes
from jpd.errors import OverloadedError
from jpd.router import attainment, policy
from jpd.router.admission import Ticket, bounded_retry_after
from jpd.router.lines import PRIORITY_SECONDS
from jpd.router.parts import RouterParts
from jpd.router.record import RequestRecord
from jpd.worker.protocol import reserved_tokens

DRAW_FACTOR, DRAW_RANGE = 2_654_435_761, 1 << 32
"""Spread the numbers of requests evenly, for policies that draw by lot."""


class Demand:
    """The wishes of one record, now."""

    def __init__(self, parts: RouterParts, record: RequestRecord) -> None:
        self._parts, self._record = parts, record

    def wishes(self) -> policy.Wishes:
        """What the request wants, by itself."""
        record, resolved = self._record, self._record.resolved
        request = resolved.request
        num_tokens = request.num_prompt_tokens + resolved.max_tokens
        num_done = num_tokens - record.num_tokens_left
        num_first = reserved_tokens(num_done, record.num_tokens_left, self._parts.reserve_tokens)
        row = policy.Row(self._num_pages(num_first), num_first < num_tokens, record.priority)
        binding = self._parts.sessions.find(request.session_id)
        return policy.Wishes(
            row=row,
            num_sequence_pages=self._num_pages(num_tokens),
            num_tokens=num_done,
            session_id=request.session_id,
            sticky_decode=binding.decode_worker if binding is not None else None,
            sticky_prefill=binding.prefill_worker if binding is not None else None,
            pinned_decode=request.decode_worker,
            pinned_prefill=request.prefill_worker,
            lost=record.lost_workers,
            avoided=record.avoided_workers,
            disaggregate=False if record.must_be_local else request.disaggregate,
            ttft=resolved.slo.ttft_ms / 1e3 if resolved.slo is not None else None,
            pace=attainment.pace_limit(resolved.slo),
            draw=record.sequence * DRAW_FACTOR % DRAW_RANGE,
        )

    def _num_pages(self, num_tokens: int) -> int:
        return num_pages_for(num_tokens, self._parts.page_size)

    def completed(self) -> policy.Wishes:
        """The same in the light of what is known of the fleet."""
        record = self._record
        hashes: PageHashes | tuple[()] = self.page_hashes()
        if record.resolved.sampling.prompt_logprobs is not None:
            hashes = ()  # every position has to be computed
        return self._parts.placement.complete(self.wishes(), hashes, record.num_tokens_left)

    def page_hashes(self) -> PageHashes:
        """Of the prompt; the same for every attempt."""
        record, request = self._record, self._record.request
        if record.page_hashes is None:
            record.page_hashes = PageHashes(
                request.prompt_token_ids, self._parts.page_size, request.cache_salt
            )
            self._parts.placement.note_prompt(request.num_prompt_tokens)
        return record.page_hashes

    def ticket(self, fits: Callable[[], bool]) -> Ticket:
        """A place in the line of the request's class, by the time its first token is due."""
        request, slo = self._record.request, self._record.resolved.slo
        due = request.deadline
        if slo is not None:
            due = min(due, request.arrival_time + slo.ttft_ms / 1e3)
        return Ticket(
            due - PRIORITY_SECONDS * self._record.resolved.priority,
            self._record.sequence,
            fits,
            line="" if slo is None else slo.name,
            weight=1.0 if slo is None else slo.weight,
        )

    def latest_admission(self, ticket: Ticket) -> float:
        """Until when it may wait for room. Raises OverloadedError: it would wait in vain."""
        request, slo, now = self._record.request, self._record.resolved.slo, self._parts.clock()
        if self._record.num_attempts > 1:
            return request.deadline
        found = attainment.Forecast()
        if slo is not None:
            found = attainment.forecast(self._parts.fleet.snapshot(), self.completed())
        wait = self._parts.waiting_room.seconds_of_wait(ticket)
        limit = attainment.ttft_limit(slo, found)
        latest = request.arrival_time + limit if limit is not None else None
        excess = attainment.excess_seconds(
            wait, found, None if latest is None else latest - now, request.deadline - now
        )
        outcome: attainment.Outcome = "shed" if excess else "queued" if wait else "admitted"
        self._parts.metrics.admissions.labels(
            slo.name if slo is not None else "none", outcome
        ).inc()
        if excess:
            reason = f"the first token would come {excess:.1f} s too late"
            raise OverloadedError(reason, bounded_retry_after(excess))
        if latest is None:
            return request.deadline
        return min(request.deadline, latest - found.alone)
