"""One worker as the router has it in its books: its client, what it reports, what it was given.

Counts change with every piece of work; `make_view` makes of them what decisions are made by. Knows
no other workers. Owned by `jpd.router.fleet`.
"""

from collections import Counter
from dataclasses import dataclass, field

from jpd.router.breaker import Breaker
from jpd.router.guard import Watch
from jpd.router.policy import Row, WorkerView
from jpd.router.rates import RateBook
from jpd.worker.protocol import Role, WorkerClient, WorkerStatus


@dataclass(slots=True)
class WorkerEntry:
    """One worker: what it reports, and what this router has given to it."""

    client: WorkerClient
    watch: Watch
    status: WorkerStatus | None = None
    progress_time: float = 0.0  # when `last_step_time` was last seen to change
    busy_since: float | None = None  # since when it has had work without a break
    stuck_since: float | None = None  # until it makes progress again
    num_rows: int = 0
    num_reserved_pages: int = 0
    num_growing_rows: int = 0
    priorities: Counter[int] = field(default_factory=Counter)  # of the rows
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    last_chosen: int = 0
    recent_tokens: float = 0.0  # prefilled here, later ones counting more: see `recent_scale`
    prefill_end: float = 0.0  # when the last prefill was answered
    step_seen: float = 0.0  # when the pace of the batch was last looked at
    breaker: Breaker = field(default_factory=Breaker)
    is_leaving: bool = False  # takes nothing new: an operator said so
    view: WorkerView | None = field(default=None)  # None: to be made again

    @property
    def role(self) -> Role:
        return self.status.role if self.status is not None else self.client.role

    @property
    def is_suspended(self) -> bool:
        """As of the last look at the fleet."""
        return self.breaker.is_tripped if self.view is None else self.view.is_suspended

    @property
    def has_work(self) -> bool:
        return self.num_rows > 0 or self.num_prefills > 0

    def count_row(self, row: Row, sign: int) -> None:
        """A row was given (1) or returned (-1)."""
        self.num_rows += sign
        self.num_reserved_pages += sign * row.num_pages
        self.num_growing_rows += sign * row.grows
        self.priorities[row.priority] += sign
        if not self.priorities[row.priority]:
            del self.priorities[row.priority]

    def count_prefill(self, num_tokens: int, sign: int) -> None:
        """A prompt of so many uncached tokens was given (1) or returned (-1)."""
        self.num_prefills += sign
        self.num_prefill_tokens += sign * num_tokens

    def make_view(self, rates: RateBook, now: float) -> WorkerView:
        status, name = self.status, self.client.name
        return WorkerView(
            name=name,
            role=self.role,
            is_available=not (
                self.watch.is_down or self.is_leaving or status is None or status.draining
            ),
            is_suspended=self.breaker.keeps_away(now, self.has_work),
            can_prefill=status is not None and status.can_prefill,
            num_slots=status.num_slots if status is not None else 0,
            num_pages=status.num_pages if status is not None else 0,
            num_rows=self.num_rows,
            num_reserved_pages=self.num_reserved_pages,
            num_growing_rows=self.num_growing_rows,
            lowest_priority=min(self.priorities, default=None),
            num_prefills=self.num_prefills,
            num_prefill_tokens=self.num_prefill_tokens,
            last_chosen=self.last_chosen,
            recent_tokens=self.recent_tokens,
            prefill_line=rates.prefill(name),
            step_line=rates.step(name),
            link_line=rates.link(name),
            links=rates.links(name),
            kv_bytes_per_token=rates.kv_bytes_per_token(name),
        )
