"""Request traces: read from a file, or made up, in several shapes.

A trace is a list of requests, each with the ids of the pages its prompt is made of: two requests
share KV as far as their first pages have the same ids. Called by `jpd.bench.router_replay`.
"""

import contextlib
import csv
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from jpd.errors import ConfigError, Problem

TRACE_PAGE_SIZE = 512
JSON_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
CSV_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MICROSECOND_DIGITS = len("2000-01-01 00:00:00.000000")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_seconds: float
    num_tokens: int
    num_output_tokens: int
    page_ids: tuple[int, ...]  # the last page may be partly filled
    session_id: str | None = None


Trace = Sequence[TraceRequest]


def read_trace(path: Path) -> list[TraceRequest]:
    """Lines of JSON (JSON_FIELDS: ms, tokens, ids of 512-token pages), or a .csv (CSV_FIELDS).

    Requests of one timestamp are spread until the next. Raises ConfigError.
    """
    read = _read_csv if path.suffix == ".csv" else _read_json
    try:
        with path.open(newline="") as lines:
            requests = list(read(lines, path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("jpd bench", "--trace", str(path), str(error))]) from error
    if not requests:
        raise ConfigError([Problem("jpd bench", "--trace", str(path), "holds no requests")])
    return _spread(sorted(requests, key=lambda request: request.arrival_seconds))


def _read_json(lines: Iterable[str], path: Path) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, 1):
        with _told_by_line(path, number, line, f"a JSON object with {', '.join(JSON_FIELDS)}"):
            row = json.loads(line)
            milliseconds, num_tokens, num_output_tokens, page_ids = (
                row[name] for name in JSON_FIELDS
            )
            yield TraceRequest(
                float(milliseconds) / 1e3,
                int(num_tokens),
                max(1, int(num_output_tokens)),
                tuple(int(page_id) for page_id in page_ids),
            )


def _read_csv(lines: Iterable[str], path: Path) -> Iterator[TraceRequest]:
    """Says nothing of contents, so nothing is shared."""
    next_page = itertools.count()
    for number, row in enumerate(csv.DictReader(lines), 2):
        with _told_by_line(path, number, str(row), f"{', '.join(CSV_FIELDS)}"):
            time, num_tokens, num_output_tokens = (row[name] for name in CSV_FIELDS)
            num_pages = -(-int(num_tokens) // TRACE_PAGE_SIZE)
            yield TraceRequest(
                datetime.fromisoformat(time[:MICROSECOND_DIGITS]).timestamp(),
                int(num_tokens),
                max(1, int(num_output_tokens)),
                tuple(itertools.islice(next_page, num_pages)),
            )


@contextlib.contextmanager
def _told_by_line(path: Path, number: int, line: str, what: str) -> Iterator[None]:
    """Raises ConfigError for what cannot be read."""
    try:
        yield
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        rule = f"must hold {what}: {error!r}"
        raise ConfigError([Problem(str(path), f"line {number}", line[:80], rule)]) from error


def _spread(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    ticks = [
        list(group)
        for _, group in itertools.groupby(requests, key=lambda request: request.arrival_seconds)
    ]
    spread = []
    for tick, following in itertools.zip_longest(ticks, ticks[1:]):
        start = tick[0].arrival_seconds
        gap = following[0].arrival_seconds - start if following else 0.0
        for place, request in enumerate(tick):
            arrival = start + gap * place / len(tick)
            spread.append(replace(request, arrival_seconds=arrival))
    return spread


class _Author:
    """Writes requests with new page ids where nothing is shared."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self._page_ids = itertools.count(1)

    def pages(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._page_ids, count))

    def arrivals(self, count: int, per_second: float) -> Iterator[float]:
        times = (self.draw.expovariate(per_second) for _ in range(count))
        return itertools.accumulate(times)

    def request(
        self, arrival: float, page_ids: tuple[int, ...], session_id: str | None = None
    ) -> TraceRequest:
        num_tokens = TRACE_PAGE_SIZE * len(page_ids) - self.draw.randrange(TRACE_PAGE_SIZE)
        return TraceRequest(arrival, num_tokens, self.draw.randint(50, 500), page_ids, session_id)


def uniform(num_requests: int, seed: int = 0) -> list[TraceRequest]:
    """Nothing is shared."""
    author = _Author(seed)
    return [
        author.request(arrival, author.pages(author.draw.randint(1, 40)))
        for arrival in author.arrivals(num_requests, 4.0)
    ]


def sessions(num_requests: int, seed: int = 0) -> list[TraceRequest]:
    """Conversations of some ten turns, each a few pages longer; one page is everybody's."""
    author = _Author(seed)
    common = author.pages(1)
    live = [common + author.pages(4) for _ in range(max(4, num_requests // 40))]
    requests, names = [], itertools.count(len(live))
    sessions = list(range(len(live)))
    for arrival in author.arrivals(num_requests, 4.0):
        place = author.draw.randrange(len(live))
        if author.draw.random() < 0.1:
            live[place] = common + author.pages(author.draw.randint(1, 20))
            sessions[place] = next(names)
        live[place] += author.pages(author.draw.randint(1, 4))
        requests.append(author.request(arrival, live[place], str(sessions[place])))
    return requests


def shared_prompts(num_requests: int, seed: int = 0) -> list[TraceRequest]:
    """System prompts of several sizes, a few of them popular, and a question of one's own."""
    author = _Author(seed)
    prompts = [author.pages(size) for size in (1, 2, 4, 8, 16, 32, 64) for _ in range(3)]
    weights = [1.0 / (place + 1) for place in range(len(prompts))]
    author.draw.shuffle(prompts)
    return [
        author.request(arrival, prompt + author.pages(author.draw.randint(1, 8)))
        for arrival, prompt in zip(
            author.arrivals(num_requests, 4.0),
            author.draw.choices(prompts, weights, k=num_requests),
            strict=True,
        )
    ]


def bursts(num_requests: int, seed: int = 0) -> list[TraceRequest]:
    """Nothing for a while, then forty at once about the same document."""
    author = _Author(seed)
    requests = []
    for number in range(-(-num_requests // 40)):
        document = author.pages(author.draw.randint(4, 40))
        requests += [
            author.request(10.0 * number + place * 0.01, document + author.pages(1))
            for place in range(40)
        ]
    return requests[:num_requests]


SYNTHETIC: Mapping[str, Callable[[int], list[TraceRequest]]] = {
    "uniform": uniform,
    "sessions": sessions,
    "shared prompts": shared_prompts,
    "bursts": bursts,
}
