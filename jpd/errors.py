"""Every exception jpd raises on purpose.

JpdError
├── ConfigError            a model or mesh file is wrong; holds every Problem (command line: exit 2)
├── RequestError           the caller's request is wrong (HTTP 400, gRPC INVALID_ARGUMENT)
│   └── ModelNotFoundError the request names a model this server does not serve (HTTP 404)
├── OverloadedError        no room before the deadline (HTTP 429, gRPC RESOURCE_EXHAUSTED)
├── DeadlineError          the request's deadline passed (HTTP 504, gRPC DEADLINE_EXCEEDED)
├── RequestCancelledError  the client cancelled or went away (gRPC CANCELLED)
└── WorkerError            a worker could not do its part (HTTP 503, gRPC UNAVAILABLE)
    ├── WorkerLostError    the worker is gone or its engine raised
    ├── PreemptedError     the attempt's pages were needed by others; it is replayed
    └── TransferError      KV pages did not arrive whole and in time
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in an input file: where, what was read, and the rule it breaks."""

    file: str
    key: str
    value: object
    rule: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key} = {self.value!r}: {self.rule}"


class JpdError(Exception):
    """Base of all errors raised by jpd."""


class ConfigError(JpdError):
    """A model, checkpoint or mesh file is unusable; `problems` lists every fault found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RequestError(JpdError):
    """A request field breaks a rule. Never counted against a worker."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        self.field, self.value, self.rule = field, value, rule
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        super().__init__(f"{field} = {shown}: {rule}")


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""


class OverloadedError(JpdError):
    """There was no room before the deadline; try again after `retry_after_seconds`."""

    def __init__(self, reason: str, retry_after_seconds: float) -> None:
        self.reason, self.retry_after_seconds = reason, retry_after_seconds
        super().__init__(f"{reason}; retry after {retry_after_seconds:.0f} s")


class DeadlineError(JpdError):
    """The request's deadline passed before it was finished."""


class RequestCancelledError(JpdError):
    """The request was cancelled by its client."""


class WorkerError(JpdError):
    """A worker could not do its part of a request."""

    def __init__(self, worker: str, reason: str) -> None:
        self.worker, self.reason = worker, reason
        super().__init__(f"worker {worker}: {reason}")


class WorkerLostError(WorkerError):
    """The worker is gone, or its engine raised while it held the request."""


class PreemptedError(WorkerError):
    """The worker took the attempt's room back for others. Nobody's fault: it is replayed."""


class TransferError(WorkerError):
    """KV pages on their way to `worker` failed, or did not arrive before the transfer deadline."""
