"""What goes on right now, for those who watch: the workers, what runs on them, what just ended.

A look copies what it shows and changes nothing. Asked by `jpd.router.router`, drawn by the page.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jpd.router.record import RequestRecord
from jpd.router.trace import RequestTrace, trace_of
from jpd.router.worker_entry import WorkerEntry
from jpd.worker.protocol import Role

MAX_RUNNING = 512
"""Requests shown of those that run: the ones that came first."""


@dataclass(frozen=True, slots=True)
class WorkerActivity:
    """One worker: its capacity, and what this router has given to it."""

    name: str
    role: Role
    num_prefills: int
    num_rows: int
    num_slots: int
    num_pages: int
    num_pages_used: int
    num_pages_cached: int


@dataclass(frozen=True, slots=True)
class Activity:
    """One look. Times are seconds of the router's clock; the last span of who runs ends now."""

    now: float
    is_draining: bool
    num_waiting: int
    workers: tuple[WorkerActivity, ...]
    running: tuple[RequestTrace, ...]
    ended: tuple[RequestTrace, ...]


def running_traces(records: Iterable[RequestRecord], now: float) -> tuple[RequestTrace, ...]:
    """Requests under way, in the order in which they came."""
    first = sorted(records, key=lambda record: record.sequence)[:MAX_RUNNING]
    return tuple(trace_of(record, now) for record in first if record.is_live)


def worker_activity(entry: WorkerEntry) -> WorkerActivity:
    """Zero for all that a worker has not told yet."""
    status = entry.status
    return WorkerActivity(
        name=entry.client.name,
        role=entry.role,
        num_prefills=entry.num_prefills,
        num_rows=entry.num_rows,
        num_slots=status.num_slots if status is not None else 0,
        num_pages=status.num_pages if status is not None else 0,
        num_pages_used=status.num_pages_used if status is not None else 0,
        num_pages_cached=status.num_pages_cached if status is not None else 0,
    )
