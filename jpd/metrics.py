"""Every metric jpd exports, by name, on a registry of its own.

Knows what is measured, not when: the router, the workers' hosts and the frontends call in.
`render` gives the Prometheus text of /metrics. No global registry, so several servers can live in
one process.
"""

import re

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jpd.request import Timeline

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_CREATED = re.compile(rb"(# (HELP|TYPE) )?jpd:\w+_created[ {]")

LATENCY_BUCKETS_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
TOKEN_BUCKETS_SECONDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0,
)  # fmt: skip


class Metrics:
    """All metrics of one server. Thread-safe, as prometheus-client is."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._add_latencies()
        self._add_counters()
        self._add_gauges()

    def _add_latencies(self) -> None:
        long, short = LATENCY_BUCKETS_SECONDS, TOKEN_BUCKETS_SECONDS
        where = ("worker", "role")  # who did it, and as what
        self.time_to_first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "arrival to first token handed out", long, *where
        )
        self.inter_token_latency_seconds = self._histogram(
            "inter_token_latency_seconds",
            "gap between two consecutive tokens of a request",
            short,
            *where,
        )
        self.time_per_output_token_seconds = self._histogram(
            "time_per_output_token_seconds",
            "mean gap of a request after its first token",
            short,
            *where,
        )
        self.request_queue_seconds = self._histogram(
            "request_queue_seconds", "arrival to reservation held", long
        )
        self.request_prefill_seconds = self._histogram(
            "request_prefill_seconds", "reservation to first token sampled", long, *where
        )
        self.kv_transfer_seconds = self._histogram(
            "kv_transfer_seconds",
            "first token sampled to last KV page on the decode worker",
            long,
            *where,
        )

    def _add_counters(self) -> None:
        where = ("worker", "role")
        self.kv_transfer_bytes = self._counter(
            "kv_transfer_bytes", "KV moved between meshes, to this one", *where
        )
        self.kv_sent_back = self._counter(
            "kv_sent_back", "prefixes asked back of decode workers: sent, or computed", "outcome"
        )
        self.prefix_cache_hit_tokens = self._counter(
            "prefix_cache_hit_tokens",
            "prompt tokens not computed, thanks to the prefix cache",
            *where,
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens", "prompt tokens of prefilled requests", *where
        )
        self.output_tokens = self._counter("output_tokens", "tokens handed to the frontends")
        self.replayed_tokens = self._counter(
            "replayed_tokens", "tokens prefilled again after a preemption or a lost worker"
        )
        self.requests = self._counter("requests", "ended requests", "outcome")
        self.requests_failed = self._counter("requests_failed", "failed requests", "reason")
        self.router_decisions = self._counter(
            "router_decisions", "paths taken, by the worker that prefills", "path", *where
        )
        self.admissions = self._counter(
            "admissions", "requests admitted at once, queued, or shed at arrival", "slo", "outcome"
        )
        self.placements = self._counter(
            "placements", "attempts placed, by what tipped the scales", "policy", "reason"
        )
        self.retries = self._counter("retries", "attempts begun again", "reason", *where)
        self.preemptions = self._counter(
            "preemptions", "attempts whose room was taken back for others", "worker"
        )
        self.unknown_attempts = self._counter(
            "unknown_attempts", "messages about an attempt that is over"
        )
        self.late_kv_pieces = self._counter(
            "late_kv_pieces", "KV that arrived for an attempt that was over, and was dropped"
        )
        self.spec_decode_num_draft_tokens = self._counter(
            "spec_decode_num_draft_tokens", "drafts of speculative decoding, verified", "worker"
        )
        self.spec_decode_num_accepted_tokens = self._counter(
            "spec_decode_num_accepted_tokens", "drafts that were right", "worker"
        )
        self.compilations_after_ready = self._counter(
            "compilations_after_ready", "compilations after the ready line; each is a fault"
        )

    def _add_gauges(self) -> None:
        self.worker_up = self._gauge("worker_up", "1 while the worker can be given work", "worker")
        self.kv_pages = self._gauge("kv_pages", "pages of the pool", "worker")
        self.kv_pages_in_use = self._gauge("kv_pages_in_use", "pages of live attempts", "worker")
        self.kv_pages_cached = self._gauge(
            "kv_pages_cached", "pages of the prefix cache alone, which can be evicted", "worker"
        )
        self.prefill_is_missing = self._gauge(
            "prefill_is_missing", "1 while the fleet has prefill workers and none is available"
        )
        self.requests_waiting = self._gauge("requests_waiting", "waiting in the router for room")
        self.requests_running = self._gauge(
            "requests_running", "in a phase on a worker", "worker", "role"
        )

    def count_refusal(self) -> None:
        """A request that breaks a rule, ended before it was begun."""
        self.requests.labels("failed").inc()
        self.requests_failed.labels("bad_request").inc()

    def observe_pool(self, worker: str, num_pages: int, num_used: int, num_cached: int) -> None:
        """How full the KV pool of a worker is."""
        self.kv_pages.labels(worker).set(num_pages)
        self.kv_pages_in_use.labels(worker).set(num_used)
        self.kv_pages_cached.labels(worker).set(num_cached)

    def forget_pool(self, worker: str) -> None:
        """Nobody reports it any more: its gauges would stand still for ever."""
        for gauge in (self.kv_pages, self.kv_pages_in_use, self.kv_pages_cached):
            gauge.remove_by_labels({"worker": worker})

    def forget_worker(self, worker: str) -> None:
        """It was removed."""
        self.forget_pool(worker)
        for gauge in (self.worker_up, self.requests_running):
            gauge.remove_by_labels({"worker": worker})

    def observe_phases(self, timeline: Timeline, num_output_tokens: int) -> None:
        """Account for a request that ended; phases it never reached are left out."""
        prefill, decode = (timeline.prefill_worker, "prefill"), (timeline.decode_worker, "decode")
        self.request_queue_seconds.observe(timeline.queue_seconds)
        if num_output_tokens:
            self.request_prefill_seconds.labels(*prefill).observe(timeline.prefill_seconds)
        if timeline.transfer_seconds > 0.0 or timeline.kv_bytes:
            self.kv_transfer_seconds.labels(*decode).observe(timeline.transfer_seconds)
        if num_output_tokens > 1:
            self.time_per_output_token_seconds.labels(*decode).observe(timeline.tpot_seconds)

    def render(self) -> bytes:
        """The Prometheus text format; serve it as CONTENT_TYPE."""
        lines = generate_latest(self.registry).splitlines(keepends=True)
        # Start times of counters: as many lines as the counters themselves, and nothing reads them.
        return b"".join(line for line in lines if not _CREATED.match(line))

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of a full name (`jpd:requests_total`) that have these labels."""
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(f"jpd:{name}", text, labels, registry=self.registry, buckets=buckets)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"jpd:{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"jpd:{name}", text, labels, registry=self.registry)
