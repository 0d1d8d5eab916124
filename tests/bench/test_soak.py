"""The soak finds what is wrong: each invariant is broken on purpose on a server without a model."""

import itertools
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from jpd.bench.soak import Effort, Soak, sum_of
from jpd.bench.soak_requests import Draw, Limits
from jpd.errors import RequestError, WorkerLostError
from jpd.metrics import Metrics
from jpd.request import Timeline
from jpd.router.health import Health

LIMITS = Limits(max_len=64, vocab_size=100, page_size=4, chunk=16, has_text=False)
EFFORT = Effort(num_requests=40, num_alone=8, lull_seconds=0.01)


class Server:
    """Answers with the tokens 1, 2, 3, ..., or as the fault has it."""

    def __init__(self, fault: str = "") -> None:
        self.metrics, self.fault = Metrics(), fault
        self._count = itertools.count()

    async def astream(self, prompt: Any, **options: Any) -> AsyncGenerator[Any, None]:
        bad = options["temperature"] < 0 or options.get("max_tokens", 1) in (0, 1 << 30)
        bad = bad or options.get("top_p", 1.0) > 1.0 or options.get("n", 1) == 0
        if (bad or options.get("logprobs", 0) > 20) and self.fault != "takes bad ones":
            self.metrics.count_refusal()
            raise RequestError("option", options, "is bad")
        number = next(self._count)
        if self.fault == "fails" and number == 5:
            self.metrics.requests.labels("failed").inc()
            raise WorkerLostError("decode-0", "gone")
        for index in range(max(1, options.get("n", 1))):
            self.metrics.requests.labels("finished").inc(2 if self.fault == "ends twice" else 1)
            yield self._delta(index, options, number)

    def _delta(self, index: int, options: dict[str, Any], number: int) -> Any:
        count = min(options.get("max_tokens", 4), 4)
        first = number if self.fault == "answers differ" else 1
        timeline = Timeline(path=[] if self.fault == "no path" else ["disaggregated"])
        timeline.num_retries = int(self.fault == "silent retry")
        logprobs = (SimpleNamespace(logprob=-1.0),) * count
        return SimpleNamespace(
            index=index,
            text="",
            token_ids=tuple(range(first, first + count)),
            finish_reason=None if self.fault == "no end" else "length",
            timeline=timeline,
            logprobs=logprobs if "logprobs" in options else (),
            prompt_logprobs=(),
        )

    def health(self) -> Health:
        if self.fault == "unwell":
            return Health("degraded", ("a worker is down",), (), True)
        return Health("ok", (), (), True)

    def check_integrity(self) -> None:
        assert self.fault != "pages", "page 3 has two owners"


def test_a_counter_is_summed_over_its_labels() -> None:
    metrics = Metrics()
    for labels, count in ((("transfer", "a", "decode"), 2), (("lost", "b", "prefill"), 3)):
        metrics.retries.labels(*labels).inc(count)
    assert sum_of(metrics, "jpd:retries_total") == 5.0
    assert sum_of(metrics, "jpd:nothing_total") == 0.0


def soak(fault: str, memory: list[int] | None = None) -> tuple[list[str], dict[str, bool]]:
    server = Server(fault)
    if fault == "gauge":
        server.metrics.requests_running.labels("decode-0", "decode").set(1)
    if fault == "compiles":
        server.metrics.compilations_after_ready.inc()
    sizes = iter(memory or [100, 100])
    made = Soak(server, Draw(1, LIMITS), EFFORT, lambda: next(sizes))
    results = made.run()
    return made.ledger.words, {result.name: result.ok for result in results}


def test_a_sound_server_breaks_nothing() -> None:
    words, found = soak("")
    assert words == [] and all(found.values())


@pytest.mark.parametrize(
    ("fault", "invariant"),
    [
        ("gauge", "I1"),
        ("answers differ", "I2"),
        ("no end", "I3"),
        ("ends twice", "I3"),
        ("fails", "I3"),
        ("takes bad ones", "I4"),
        ("unwell", "I5"),
        ("silent retry", "I6"),
        ("no path", "I6"),
        ("pages", "I7"),
        ("compiles", "I8"),
    ],
)
def test_each_invariant_is_seen_broken(
    fault: str, invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jpd.bench.soak.REST_SECONDS", 0.1)
    words, found = soak(fault)
    assert any(word.startswith(invariant) for word in words)
    broken = [name for name, ok in found.items() if not ok]
    assert any(name.startswith(invariant) for name in broken)


def test_memory_that_grows_is_seen() -> None:
    words, found = soak("", memory=[100, 120])
    assert words == [] and not found["memory at the end, above that"]
