"""Requests as OpenTelemetry spans: the router's, and below it queue, prefill, transfer and decode.

Spans are written when a request has ended, from the phases that its record has, and are children of
the caller's span where a W3C trace context came with the request. Needs the extra `otel`; made by
`jpd.api`, called by the router's trace log.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from jpd.request import RequestState
from jpd.router.record import PhaseSpan, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import TracerProvider
    from opentelemetry.util.types import AttributeValue

Attributes = dict[str, "AttributeValue"]

TRACE_FIELDS = {"traceparent": 55, "tracestate": 512}
"""Of a W3C trace context, with the most characters that are read of each."""


def read_trace_context(get: Callable[[str], str | None]) -> Mapping[str, str]:
    """The trace context among headers or metadata; fields that are too long count as absent."""
    found = {name: get(name) for name in TRACE_FIELDS}
    return {
        name: value for name, value in found.items() if value and len(value) <= TRACE_FIELDS[name]
    }


class SpanWriter:
    """Writes the spans of one server's requests to an OpenTelemetry tracer provider."""

    def __init__(self, provider: "TracerProvider", model: str) -> None:
        """Raises ImportError without the extra."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._tracer = provider.get_tracer("jpd")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def current_context(self) -> Mapping[str, str]:
        """The trace context of the calling code, as headers would carry it."""
        carrier = dict[str, str]()
        self._propagator.inject(carrier)
        return carrier

    def write(self, record: RequestRecord, error: Exception | None) -> None:
        """The spans of a request that has ended. Milliseconds of the past, nothing waits."""
        parent = self._propagator.extract(record.request.trace_context)
        offset = time.time_ns() - time.monotonic_ns()  # of the router's clock
        end = max((span.end for span in record.spans), default=record.request.arrival_time)
        root = self._tracer.start_span(
            "router",
            context=parent,
            kind=self._api.SpanKind.SERVER,
            attributes=self._of_request(record),
            start_time=_wall(record.request.arrival_time, offset),
        )
        if record.state is RequestState.FAILED:
            root.set_status(self._api.StatusCode.ERROR, str(error))
            root.set_attribute("error.type", type(error).__name__)
        below = self._api.set_span_in_context(root, parent)
        if root.is_recording():
            self._write_phases(record, below, offset)
        root.end(_wall(end, offset))

    def _write_phases(self, record: RequestRecord, below: "Context", offset: int) -> None:
        last = {span.phase: span for span in record.spans}
        for span in record.spans:
            written = self._tracer.start_span(
                span.phase,
                context=below,
                attributes=_of_phase(record, span, span is last[span.phase]),
                start_time=_wall(span.start, offset),
            )
            written.end(_wall(span.end, offset))

    def _of_request(self, record: RequestRecord) -> Attributes:
        timeline = record.timeline
        return {
            "gen_ai.request.id": record.request.request_id,
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": record.request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": len(record.sent_token_ids),
            "jpd.state": record.state.value,
            "jpd.cached_tokens": timeline.num_cached_tokens,
            "jpd.kv_bytes": timeline.kv_bytes,
            "jpd.retries": timeline.num_retries,
            "jpd.path": tuple(timeline.path),
            "jpd.prefill_worker": timeline.prefill_worker,
            "jpd.decode_worker": timeline.decode_worker,
        }


def _of_phase(record: RequestRecord, span: PhaseSpan, is_last: bool) -> Attributes:
    """Totals stand in the last span of their phase: earlier ones are of attempts that failed."""
    timeline = record.timeline
    found: Attributes = {"jpd.worker": span.worker} if span.worker else {}
    if not is_last:
        return found
    match span.phase:
        case "prefill":
            found["jpd.prompt_tokens"] = record.request.num_prompt_tokens
            found["jpd.cached_tokens"] = timeline.num_cached_tokens
        case "transfer":
            found["jpd.from_worker"] = timeline.prefill_worker
            found["jpd.kv_bytes"] = timeline.kv_bytes
        case "decode":
            found["jpd.output_tokens"] = len(record.sent_token_ids)
    return found


def _wall(seconds: float, offset: int) -> int:
    """Nanoseconds since 1970 of a time of the router's clock."""
    return round(seconds * 1e9) + offset
