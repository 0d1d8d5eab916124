"""The life of one request, from waiting to its one terminal event, in a task of its own.

1. wait for room and reserve on a decode worker
2. choose where to prefill; prefill; the first token goes out at once
3. wait for the KV on the decode worker, then hand on its tokens
4. when a worker breaks the attempt, do what the failure table says, with a new attempt id

Every way out of an attempt releases what it holds. Called by `jpd.router.router`.
"""

import asyncio
import logging
from dataclasses import replace
from typing import NamedTuple

from jpd.errors import (
    JpdError,
    RequestCancelledError,
    WorkerError,
    WorkerLostError,
)
from jpd.request import RequestState, TokenOutput
from jpd.router import policy
from jpd.router.accounting import account_end, account_tokens
from jpd.router.admission import Ticket
from jpd.router.demand import Demand
from jpd.router.failure import AttemptFailedError, Fault
from jpd.router.holding import Holding
from jpd.router.parts import RouterParts
from jpd.router.placement import Choice
from jpd.router.record import RequestRecord
from jpd.router.recovery import Recovery, Tried
from jpd.router.stream import Mailbox
from jpd.worker.protocol import (
    Attempt,
    DecodeEvent,
    PrefillResult,
    Reservation,
    SentBack,
)

_log = logging.getLogger(__name__)


class Reserved(NamedTuple):
    """Room on a decode worker, and what it was asked for with."""

    holding: Holding
    reservation: Reservation
    wishes: policy.Wishes


class Journey:
    """Drives one record through its states. Made and run on the router's event loop."""

    def __init__(self, parts: RouterParts, record: RequestRecord, mailbox: Mailbox) -> None:
        self._parts, self._fleet, self._metrics = parts, parts.fleet, parts.metrics
        self._clock = parts.clock
        self.record, self._mailbox = record, mailbox
        self._timeline = record.timeline
        self._demand = Demand(parts, record)
        self._recovery = Recovery(parts, record, self._demand)
        self.holding: Holding | None = None  # of the present attempt
        self._stopped_by_client = False
        # Of the last attempt:
        self._decode_worker = ""
        self._prefill_worker = ""
        self._num_uncached_tokens = 0
        self._step_start = 0.0  # since when the next token is awaited

    async def run(self) -> None:
        """Serve until the terminal event. Raises nothing but CancelledError."""
        try:
            await self._serve()
        except asyncio.CancelledError:
            self.end_cancelled()
            raise
        except JpdError as error:
            self._end(RequestState.FAILED, error)
        except Exception as error:
            _log.exception("request %s broke the router", self.record.request.request_id)
            self._end(RequestState.FAILED, error)

    def stop(self) -> None:
        """The client has all it wants: a cancel that follows counts as a success."""
        self._stopped_by_client = bool(self.record.sent_token_ids)

    def end_cancelled(self) -> None:
        """The terminal event of a request whose task was cancelled."""
        if self._stopped_by_client:
            self._end(RequestState.FINISHED, None)
        else:
            self._end(RequestState.CANCELLED, RequestCancelledError("the request was cancelled"))

    async def _serve(self) -> None:
        while True:
            try:
                return await self._attempt()
            except AttemptFailedError as failed:
                tried = Tried(self._decode_worker, self._prefill_worker, self._num_uncached_tokens)
                await asyncio.sleep(self._recovery.begin_again(failed, tried))

    async def _attempt(self) -> None:
        """One try. Returns after the last token. Raises AttemptFailedError: a worker broke it."""
        attempt = self.record.next_attempt()
        holding, reservation, wishes = await self._reserve(attempt)
        try:
            choice = self._choose(attempt, reservation, wishes)
            reservation = replace(reservation, is_sent_back=choice.is_sent_back)
            result = await self._prefill(holding, reservation, choice)
            first = TokenOutput(
                (result.token_id,),
                result.finish_reason,
                logprobs=result.logprobs,
                prompt_logprobs=result.prompt_logprobs,
            )
            if not self._send(first):
                await self._decode(holding, result)
        finally:
            holding.release()
            self.holding = None

    async def _reserve(self, attempt: Attempt) -> Reserved:
        """Wait for room. Raises OverloadedError, RequestError, WorkerError: nobody left to ask."""
        record, demand = self.record, self._demand
        wishes = demand.wishes()
        ticket = demand.ticket(lambda: policy.has_room(self._fleet.snapshot(), wishes))
        until = demand.latest_admission(ticket)
        reserved = await self._parts.waiting_room.admit(
            ticket,
            lambda: self._try_to_reserve(attempt, ticket),
            lambda: until - self._clock(),
            is_retry=record.num_attempts > 1,
        )
        record.advance(RequestState.RESERVED, self._clock())
        return reserved

    async def _try_to_reserve(self, attempt: Attempt, ticket: Ticket) -> Reserved | None:
        """Ask the decode workers in turn, best first; one that fails is not asked again."""
        wishes = self._demand.completed()
        self._check_somebody_decodes(wishes)
        kept = self._parts.waiting_room.kept_before(ticket)
        for view in self._parts.placement.rank_decoders(wishes):
            if view.name in kept:
                continue
            self.holding = holding = Holding(self._parts, attempt, wishes.row)
            try:
                reservation = await holding.reserve(view.name)
            except WorkerError as error:
                self._recovery.note_unreachable(view.name)
                name = self.record.request.request_id
                _log.warning("request %s: %s: reserve failed: %s", name, attempt.attempt_id, error)
                continue
            if reservation is not None:
                return Reserved(holding, reservation, wishes)
        wishes = self._demand.wishes()
        self._check_somebody_decodes(wishes)
        ticket.waits_for = policy.only_ones_that_do(self._fleet.snapshot(), wishes)
        return None

    def _choose(self, attempt: Attempt, reservation: Reservation, wishes: policy.Wishes) -> Choice:
        """Path and worker of the prefill. Raises AttemptFailedError when no worker is there."""
        decode = reservation.worker
        self._decode_worker, self._prefill_worker = decode, ""
        self._num_uncached_tokens = len(attempt.token_ids) - reservation.num_cached_tokens
        choice = self._parts.placement.choose(decode, reservation.num_cached_tokens, wishes)
        if choice is None:
            error = WorkerError("prefill", self._fleet.why_nobody("prefill"))
            raise AttemptFailedError(Fault.PREFILL_LOST, error)
        self._prefill_worker = worker = choice.prefill.name
        self._metrics.router_decisions.labels(choice.path, worker, choice.prefill.role).inc()
        policy_name = self._parts.placement.policy_name
        self._metrics.placements.labels(policy_name, choice.reason).inc()
        if self.record.num_attempts == 1:
            self.record.note(choice.path)
        timeline = self._timeline
        timeline.prefill_worker, timeline.decode_worker = worker, decode
        timeline.session_kv = self._session_kv(reservation)
        bound = worker if choice.path == "disaggregated" else None
        self._parts.sessions.bind(self.record.request.session_id, decode, bound)
        return choice

    def _session_kv(self, reservation: Reservation) -> str:
        """What has become of the KV of the session's last turn."""
        session_id = self.record.request.session_id
        if session_id is None:
            return ""
        binding = self._parts.sessions.find(session_id)
        if binding is None:
            return "new"
        if reservation.num_cached_tokens:
            return "kept" if binding.decode_worker == reservation.worker else "moved"
        return "dropped"

    async def _prefill(
        self, holding: Holding, reservation: Reservation, choice: Choice
    ) -> PrefillResult:
        record, worker = self.record, choice.prefill.name
        record.advance(RequestState.PREFILLING, self._clock())
        result = await holding.prefill(worker, reservation, choice.num_uncached_tokens)
        terms = self._timeline.cost_ms = choice.explain().rounded()
        _log.debug("%s: %s on %s: %s", holding.attempt.attempt_id, choice.path, worker, terms)
        self._fleet.see_prefill(worker, result.num_computed_tokens, result.prefill_seconds)
        self._fleet.prefixes.expect(worker, self._demand.page_hashes().all())
        if result.sent_back is not None:
            self._see_sent_back(reservation, result.sent_back)
        if record.sent_token_ids:
            self._timeline.num_replayed_tokens += result.num_computed_tokens
            self._metrics.replayed_tokens.inc(result.num_computed_tokens)
        else:
            self._timeline.num_cached_tokens = result.num_cached_tokens
            hits = self._metrics.prefix_cache_hit_tokens.labels(worker, "prefill")
            hits.inc(result.num_cached_tokens)
            prompts = self._metrics.prompt_tokens.labels(worker, "prefill")
            prompts.inc(record.request.num_prompt_tokens)
            if self._timeline.session_kv == "dropped" and result.num_cached_tokens:
                self._timeline.session_kv = "moved"  # sent again by the worker that prefilled it
        return result

    def _see_sent_back(self, reservation: Reservation, sent_back: SentBack) -> None:
        """What the decode worker held has gone to the prefill worker, or was computed again."""
        self._timeline.sent_back_kv_bytes += sent_back.num_bytes
        moved = self._metrics.kv_transfer_bytes.labels(self._prefill_worker, "prefill")
        moved.inc(sent_back.num_bytes)
        outcome = "sent" if sent_back.num_tokens else "computed"
        self._metrics.kv_sent_back.labels(outcome).inc()
        if sent_back.num_tokens:
            self.record.note("send_back")
            self._fleet.see_transfer(
                reservation.worker,
                self._prefill_worker,
                sent_back.num_tokens,
                sent_back.num_bytes,
                sent_back.seconds,
            )
        else:
            self.record.note("send_back_failed")

    async def _decode(self, holding: Holding, result: PrefillResult) -> None:
        is_local = self._prefill_worker == self._decode_worker
        state = RequestState.DECODING if is_local else RequestState.TRANSFERRING
        self.record.advance(state, self._clock())
        await holding.decode(
            result.token_id,
            self._parts.config.transfer_timeout_seconds,
            self._take_kv,
            self._take_event,
        )

    def _take_kv(self, event: DecodeEvent) -> None:
        """The KV is whole on the decode worker."""
        now, is_local = self._clock(), self._prefill_worker == self._decode_worker
        self._step_start = now
        if self.record.state is RequestState.TRANSFERRING:
            kv_time = now if event.kv_complete_time is None else event.kv_complete_time
            self.record.advance(RequestState.DECODING, min(kv_time, now))
        if not is_local:
            self._see_transfer(event)
        self._timeline.kv_bytes += event.kv_bytes
        self._metrics.kv_transfer_bytes.labels(self._decode_worker, "decode").inc(event.kv_bytes)
        for worker in {self._prefill_worker, self._decode_worker}:
            self._fleet.note_success(worker)

    def _see_transfer(self, event: DecodeEvent) -> None:
        sent_time = self.record.last_token_time  # of the first token: the prefill was over then
        kv_time = self._clock() if event.kv_complete_time is None else event.kv_complete_time
        self._fleet.see_transfer(
            self._prefill_worker,
            self._decode_worker,
            self._num_uncached_tokens,
            event.kv_bytes,
            kv_time - sent_time,
        )

    def _take_event(self, event: DecodeEvent) -> bool:
        """Hand tokens on. True after the last one; more than was asked for are never handed on."""
        if event.token_ids and event.kv_complete_time is None:
            now = self._clock()
            gap, self._step_start = now - self._step_start, now
            self._fleet.see_step(self._decode_worker, gap / len(event.token_ids))
        if event.num_draft_tokens:
            self._timeline.num_draft_tokens += event.num_draft_tokens
            self._timeline.num_accepted_tokens += len(event.token_ids) - 1
        num_left = self.record.num_tokens_left
        token_ids, logprobs = event.token_ids[:num_left], event.logprobs[:num_left]
        return self._send(TokenOutput(token_ids, event.finish_reason, logprobs=logprobs))

    def _send(self, output: TokenOutput) -> bool:
        """Give tokens to the client; with the last ones the request is finished."""
        record, now = self.record, self._clock()
        token_ids, finish_reason = output.token_ids, output.finish_reason
        account_tokens(self._metrics, record, len(token_ids), now)
        record.take_tokens(token_ids, now)
        if finish_reason is None and record.num_tokens_left == 0:
            finish_reason = "length"
        if finish_reason is None:
            if token_ids:
                self._mailbox.put(output)
            return False
        record.advance(RequestState.FINISHED, now)
        self._parts.placement.note_output(len(record.sent_token_ids))
        self._mailbox.put(replace(output, finish_reason=finish_reason, timeline=self._timeline))
        account_end(self._metrics, record, None)
        self._parts.trace.note(record)
        self._mailbox.end(None)
        return True

    def _check_somebody_decodes(self, wishes: policy.Wishes) -> None:
        if not policy.capable_decoders(self._fleet.snapshot(), wishes):
            raise WorkerLostError("decode", self._fleet.why_nobody("decode"))

    def _end(self, state: RequestState, error: Exception | None) -> None:
        """The terminal event of a request that did not reach its last token."""
        record = self.record
        if record.is_live:
            record.advance(state, self._clock())
            account_end(self._metrics, record, error, self._recovery.fatal_fault)
            self._parts.trace.note(record, error)
        self._mailbox.end(error)
