"""What the router knows of its workers: clients, health, and the work it has given to each.

The router's own counts are taken when work is given and returned when its phase ends, so they
never lag behind a status report. Knows no requests. Written by `jpd.router.holding` and
`jpd.router.health`.
"""

import logging
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from jpd.metrics import Metrics
from jpd.router.guard import Watch
from jpd.router.policy import Row, WorkerView
from jpd.router.prefix_index import MAX_INDEX_PAGES, PrefixIndex
from jpd.router.rates import RateBook, RateSeed
from jpd.router.worker_entry import WorkerEntry
from jpd.worker.protocol import Role, WorkerClient, WorkerStatus

RECENT_SECONDS = 600.0
"""Over which work done lately fades."""
STEP_SAMPLE_SECONDS = 0.05
"""Between two looks at the pace of a decode batch."""

_log = logging.getLogger(__name__)


class Fleet:
    """All workers of one router. `on_change` is called whenever there may be more room."""

    def __init__(
        self,
        clients: Iterable[WorkerClient],
        metrics: Metrics,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        max_index_pages: int = MAX_INDEX_PAGES,
        seeds: Mapping[str, RateSeed] | None = None,
    ) -> None:
        self._metrics, self._clock, self._on_change = metrics, clock, on_change
        self._entries: dict[str, WorkerEntry] = {}
        self._num_chosen = 0
        self._snapshot: tuple[WorkerView, ...] | None = None  # None: to be made again
        self._tripped: set[str] = set()  # workers whose breaker is not closed
        self.prefixes = PrefixIndex((), max_index_pages)
        self.rates = RateBook(seeds or {})
        self._recent_epoch = clock()
        self._num_shifts = 0
        self._random = random.Random(0)  # spreads suspensions; need not be secret
        self._prefill_is_missing = False
        for client in clients:
            self.add(client)

    def add(self, client: WorkerClient) -> WorkerEntry:
        """A new worker, down until its first status."""
        name = client.name
        if name in self._entries:
            raise ValueError(f"two workers are named {name!r}")
        watch = Watch(name)
        watch.go_down("its first status is awaited")
        self._metrics.worker_up.labels(name).set(0)
        self._entries[name] = entry = WorkerEntry(client, watch)
        running = self._metrics.requests_running
        running.labels(name, "decode").set_function(lambda: entry.num_rows)
        running.labels(name, "prefill").set_function(lambda: entry.num_prefills)
        self._snapshot = None
        self.prefixes.add_worker(name)
        client.on_room(self._on_change)
        return entry

    def remove(self, worker: str) -> None:
        """Forget a worker that holds nothing any more."""
        entry = self._entries[worker]
        assert not entry.has_work, f"{worker} still has work"
        self._touch(worker)
        self._tripped.discard(worker)
        self._metrics.forget_worker(worker)
        del self._entries[worker]
        self.rates.forget(worker)
        self.prefixes.remove_worker(worker)

    def set_leaving(self, worker: str, is_leaving: bool) -> None:
        """Whether it takes nothing new although it is up."""
        self._touch(worker).is_leaving = is_leaving
        self._note_mode()
        self._on_change()

    @property
    def entries(self) -> Sequence[WorkerEntry]:
        return tuple(self._entries.values())

    def __contains__(self, worker: str) -> bool:
        return worker in self._entries

    def client(self, worker: str) -> WorkerClient:
        return self._entries[worker].client

    def watch(self, worker: str) -> Watch:
        return self._entries[worker].watch

    def view(self, worker: str) -> WorkerView:
        entry = self._entries[worker]
        if entry.view is None:
            entry.view = entry.make_view(self.rates, self._clock())
        return entry.view

    def why_nobody(self, role: Role) -> str:
        """Why no worker of a role can take a request, worker by worker."""
        reasons = [
            f"{entry.client.name}: {entry.watch.down_reason or 'cannot take this request'}"
            for entry in self._entries.values()
            if entry.role in (role, "colocated")
        ]
        return f"no {role} worker is available ({'; '.join(reasons) or 'there is none'})"

    def snapshot(self) -> tuple[WorkerView, ...]:
        """One look at every worker."""
        for name in self._tripped:
            self._touch(name)  # a breaker closes with time alone
        if self._snapshot is None:
            views = [entry.view or self.view(name) for name, entry in self._entries.items()]
            self._snapshot = tuple(views)
        return self._snapshot

    # Work given and returned.

    def take_row(self, worker: str, row: Row) -> None:
        self._touch(worker, chosen=True).count_row(row, 1)

    def give_row(self, worker: str, row: Row, *, was_held: bool = True) -> None:
        """Return a row. One that was refused frees no room: nobody is woken to try again."""
        self._touch(worker).count_row(row, -1)
        if was_held:
            self._on_change()

    def take_prefill(self, worker: str, num_tokens: int) -> None:
        entry = self._touch(worker, chosen=True)
        entry.count_prefill(num_tokens, 1)
        entry.recent_tokens += num_tokens / self.recent_scale()

    def give_prefill(self, worker: str, num_tokens: int) -> None:
        self._touch(worker).count_prefill(num_tokens, -1)

    def recent_scale(self) -> float:
        """WorkerView.recent_tokens times this are tokens: older work has faded by as much."""
        age = (self._clock() - self._recent_epoch) / RECENT_SECONDS
        if age > 50.0:
            for name, entry in self._entries.items():
                entry.recent_tokens *= math.exp(-age)
                self._touch(name)
            self._recent_epoch += age * RECENT_SECONDS
            return 1.0
        return math.exp(-age)

    # What was measured.

    def see_prefill(self, worker: str, num_tokens: int, seconds: float) -> None:
        """A prefill was answered; what it shared the worker with is not counted twice."""
        entry, now = self._touch(worker), self._clock()
        self.rates.see_prefill(worker, num_tokens, min(seconds, now - entry.prefill_end))
        entry.prefill_end = now
        self._follow_rates()

    def see_step(self, worker: str, seconds: float) -> None:
        """A row waited so long for its next token. A look now and then is enough."""
        entry, now = self._entries[worker], self._clock()
        if now - entry.step_seen >= STEP_SAMPLE_SECONDS:
            entry.step_seen = now
            self.rates.see_step(worker, entry.num_rows, seconds)
            self._touch(worker)
            self._follow_rates()

    def see_transfer(
        self, sender: str, receiver: str, num_tokens: int, num_bytes: int, seconds: float
    ) -> None:
        self.rates.see_transfer(sender, receiver, num_tokens, num_bytes, seconds)
        self._touch(sender)
        self._touch(receiver)
        self._follow_rates()

    def _follow_rates(self) -> None:
        """What is known of some workers tells of those that were not measured yet."""
        if self.rates.num_shifts != self._num_shifts:
            self._num_shifts = self.rates.num_shifts
            for name in self._entries:
                self._touch(name)

    # Faults and health.

    def note_success(self, worker: str) -> None:
        """An attempt went well here: earlier faults are forgiven."""
        entry = self._entries[worker]
        if entry.breaker.num_faults:
            if entry.breaker.is_tripped:
                _log.info("worker %s works again", worker)
            entry.breaker.success()
            self._tripped.discard(worker)
            self._touch(worker)

    def note_fault(self, worker: str) -> None:
        """The worker broke an attempt. Never called for what a client did wrong."""
        breaker = self._touch(worker).breaker
        seconds = breaker.fault(self._clock(), self._random.random())
        if seconds:
            self._tripped.add(worker)
            _log.warning(
                "worker %s is suspended for %.1f s: %d faults in a row",
                worker,
                seconds,
                breaker.num_faults,
            )

    def note_status(self, status: WorkerStatus) -> None:
        """Take in a report. Keeps up or down as it is: `set_down` and `set_up` decide that."""
        entry = self._touch(status.name)
        before = entry.status
        if before is None or before.last_step_time != status.last_step_time:
            entry.progress_time = self._clock()
        self._count_events(before, status)
        self._metrics.observe_pool(
            status.name, status.num_pages, status.num_pages_used, status.num_pages_cached
        )
        entry.status = status

    def _count_events(self, before: WorkerStatus | None, status: WorkerStatus) -> None:
        """Workers report totals since their start; a smaller one means that they began again."""

        def increase(name: str) -> int:
            total: int = getattr(status, name)
            earlier: int = 0 if before is None else getattr(before, name)
            return total - earlier if total >= earlier else total

        metrics = self._metrics
        metrics.unknown_attempts.inc(increase("num_unknown_attempts"))
        metrics.late_kv_pieces.inc(increase("num_late_pieces"))
        drafts = metrics.spec_decode_num_draft_tokens.labels(status.name)
        drafts.inc(increase("num_draft_tokens"))
        accepted = metrics.spec_decode_num_accepted_tokens.labels(status.name)
        accepted.inc(increase("num_accepted_tokens"))
        num_compilations = increase("num_compilations_after_ready")
        metrics.compilations_after_ready.inc(num_compilations)
        if num_compilations:
            _log.error("worker %s compiled %d times after ready", status.name, num_compilations)

    def set_down(self, worker: str, reason: str) -> None:
        """No new work goes there, and every wait on it ends."""
        entry = self._touch(worker)
        if entry.watch.down_reason != reason:
            _log.warning("worker %s is down: %s", worker, reason)
            entry.watch.go_down(reason)
            self._metrics.worker_up.labels(worker).set(0)
            self._metrics.forget_pool(worker)  # until its next report
            self._note_mode()
            self._on_change()

    def set_up(self, worker: str) -> None:
        entry = self._touch(worker)
        if entry.watch.is_down:
            _log.info("worker %s is up", worker)
            entry.watch.come_up()
            self._metrics.worker_up.labels(worker).set(1)
            self._note_mode()
            self._on_change()

    def _note_mode(self) -> None:
        """Tell when the last prefill worker goes and when the first one comes back."""
        views = [self.view(name) for name in self._entries]
        is_missing = any(view.decodes and view.is_available for view in views) and not any(
            view.is_available and view.role != "decode" for view in views
        )
        if is_missing == self._prefill_is_missing:
            return
        self._prefill_is_missing = is_missing
        self._metrics.prefill_is_missing.set(is_missing)
        if is_missing:
            _log.warning("no prefill worker is available: short prompts are prefilled on decode")
        else:
            _log.info("a prefill worker is available again")

    def _touch(self, worker: str, chosen: bool = False) -> WorkerEntry:
        """The entry, whose view has to be made again."""
        entry = self._entries[worker]
        entry.view = self._snapshot = None
        if chosen:
            self._num_chosen += 1
            entry.last_chosen = self._num_chosen
        return entry
