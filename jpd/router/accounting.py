"""What a request leaves in the metrics. Pure bookkeeping; called by `jpd.router.journey`."""

from jpd.errors import DeadlineError, OverloadedError, RequestError, WorkerError
from jpd.metrics import Metrics
from jpd.request import RequestState
from jpd.router.failure import Fault
from jpd.router.record import RequestRecord


def account_tokens(metrics: Metrics, record: RequestRecord, num_tokens: int, now: float) -> None:
    """Count tokens about to be handed out. Those that come together have no gap between them."""
    if num_tokens == 0:
        return
    metrics.output_tokens.inc(num_tokens)
    timeline = record.timeline
    if record.first_token_time is None:
        first = metrics.time_to_first_token_seconds.labels(timeline.prefill_worker, "prefill")
        first.observe(now - record.request.arrival_time)
        num_tokens -= 1
        gap = 0.0
    else:
        gap = now - record.last_token_time
    if num_tokens:
        gaps = metrics.inter_token_latency_seconds.labels(timeline.decode_worker, "decode")
        gaps.observe(gap)
        for _ in range(num_tokens - 1):
            gaps.observe(0.0)


def account_end(
    metrics: Metrics,
    record: RequestRecord,
    error: Exception | None,
    fault: Fault | None = None,
) -> None:
    """Count how a request ended, once it has."""
    metrics.requests.labels(record.state.value).inc()
    metrics.observe_phases(record.timeline, len(record.sent_token_ids))
    if record.state is RequestState.FAILED:
        metrics.requests_failed.labels(failure_label(error, fault)).inc()


def failure_label(error: Exception | None, fault: Fault | None) -> str:
    """The reason under which a failed request is counted; few and fixed."""
    match error:
        case RequestError():
            return "bad_request"
        case OverloadedError():
            return "overloaded"
        case DeadlineError():
            return "deadline"
        case WorkerError():
            return fault.value if fault is not None else "no_worker"
        case _:
            return "internal"
