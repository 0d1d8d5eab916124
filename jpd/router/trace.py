"""The phases of requests, and of the last ones that ended a trace that Chrome and Perfetto show.

One lane for the queue and one for each worker; phases that overlap in a lane stand in rows of it.
Holds a fixed number of requests. Filled by journeys, on the router's event loop.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jpd.request import RequestState
from jpd.router.record import PhaseSpan, RequestRecord

MAX_REQUESTS = 4096
MAX_SPANS_PER_REQUEST = 32
"""The last ones, of a request that was begun again and again."""

QUEUE_LANE = "queue"


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request. While it runs its last span ends when it was looked at."""

    request_id: str
    state: RequestState
    num_prompt_tokens: int
    num_output_tokens: int
    spans: tuple[PhaseSpan, ...]
    end: float = 0.0  # seconds of the router's clock
    ttft_seconds: float = 0.0
    tpot_seconds: float = 0.0


def trace_of(record: RequestRecord, now: float) -> RequestTrace:
    """What there is to see of a request: also of one that still runs."""
    return RequestTrace(
        record.request.request_id,
        record.state,
        record.request.num_prompt_tokens,
        len(record.sent_token_ids),
        tuple(record.spans_until(now)[-MAX_SPANS_PER_REQUEST:]),
        now if record.is_live else record.phase_started,
        record.timeline.ttft_seconds,
        record.timeline.tpot_seconds,
    )


class TraceLog:
    """The last requests that ended. `listen` hears of each, with its error if it failed."""

    def __init__(
        self,
        max_requests: int = MAX_REQUESTS,
        listen: Callable[[RequestRecord, Exception | None], None] | None = None,
    ) -> None:
        self._requests: deque[RequestTrace] = deque(maxlen=max_requests)
        self._listen = listen

    def note(self, record: RequestRecord, error: Exception | None = None) -> None:
        """Keep the phases of a request that has ended."""
        if self._listen is not None:
            self._listen(record, error)
        self._requests.append(trace_of(record, record.phase_started))

    def requests(self) -> Sequence[RequestTrace]:
        """In the order in which they ended."""
        return tuple(self._requests)

    def ended_after(self, time: float) -> tuple[RequestTrace, ...]:
        """Those that ended later than `time`, in the order in which they did."""
        late = itertools.takewhile(lambda trace: trace.end > time, reversed(self._requests))
        return tuple(late)[::-1]


def chrome_trace(requests: Iterable[RequestTrace]) -> dict[str, object]:
    """The trace event format: a process for each lane, a thread for each row, times in µs."""
    lanes: dict[str, list[tuple[PhaseSpan, RequestTrace]]] = {QUEUE_LANE: []}
    for request in requests:
        for span in request.spans:
            lanes.setdefault(span.worker or QUEUE_LANE, []).append((span, request))
    events: list[dict[str, object]] = []
    names = [QUEUE_LANE, *sorted(lanes.keys() - {QUEUE_LANE})]
    for process, name in enumerate(names, start=1):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        in_order = sorted(lanes[name], key=lambda pair: (pair[0].start, pair[0].end))
        rows = _rows([span for span, _ in in_order])
        for row, (span, request) in zip(rows, in_order, strict=True):
            events.append(_event(process, row, span, request))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _rows(spans: Sequence[PhaseSpan]) -> list[int]:
    """For each span, in order of their starts, the first row that is free by then."""
    rows: list[int] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # until when, which row
    num_rows = 0
    for span in spans:
        while busy and busy[0][0] <= span.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            num_rows += 1
            row = num_rows
        heapq.heappush(busy, (span.end, row))
        rows.append(row)
    return rows


def _event(process: int, row: int, span: PhaseSpan, request: RequestTrace) -> dict[str, object]:
    return {
        "ph": "X",
        "name": span.phase,
        "cat": "request",
        "pid": process,
        "tid": row,
        "ts": round(span.start * 1e6, 1),
        "dur": round((span.end - span.start) * 1e6, 1),
        "args": {
            "request": request.request_id,
            "ended": request.state.value,
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": request.num_output_tokens,
        },
    }
