"""Which worker holds which prompt prefix: sets of page hashes, told by the workers themselves.

1. `match` gives, for the page hashes of a prompt, how many leading pages each worker holds.
2. `apply` takes in what a worker says has changed; a snapshot replaces what was known of it.
3. `expect` counts a prompt just prefilled as held and used; what its worker does not confirm by the
   second report is dropped again.

A prefix is held whole or cut at its end, so its length is found by bisection. Bounded: `_Pages`.
Knows no tokens and no requests. Owned by `jpd.router.fleet`, fed by `jpd.router.prefix_feed`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from jpd.cache.page_hashes import PageHashes
from jpd.cache.prefix_log import PrefixChanges

MAX_INDEX_PAGES = 4_000_000
"""Of all workers together, unless the mesh file says otherwise."""
MIN_WORKER_PAGES = 2
FIRST_BLOCK, BLOCK_GROWTH = 8, 4
"""Pages of a prompt that are looked up at first, and how much further each time."""


@dataclass(slots=True)
class _Pages:
    """Pages of one worker, in two generations: when the young one is full, the old one goes.

    So a worker that holds no more than half the budget is known whole. What requests use is young
    again, so hot prefixes outlive any number of prompts used once.
    """

    budget: int
    incarnation: str = ""
    sequence: int = 0
    young: set[int] = field(default_factory=set)
    old: set[int] = field(default_factory=set)
    expected: set[int] = field(default_factory=set)  # since the last report
    doubtful: set[int] = field(default_factory=set)  # expected before it, not confirmed

    def __len__(self) -> int:
        return len(self.young) + len(self.old)

    def __contains__(self, page_hash: int) -> bool:
        return page_hash in self.young or page_hash in self.old

    def add(self, page_hashes: Iterable[int]) -> None:
        for page_hash in page_hashes:
            self.young.add(page_hash)
            self.old.discard(page_hash)
            if 2 * len(self.young) > self.budget:
                self.old, self.young = self.young, set()

    def remove(self, page_hashes: Iterable[int]) -> None:
        self.young.difference_update(page_hashes)
        self.old.difference_update(page_hashes)

    @property
    def known(self) -> "_Pages | set[int]":
        return self if self.old else self.young


class PrefixIndex:
    """The prefixes of all workers. One event loop only."""

    def __init__(self, workers: Iterable[str], max_pages: int = MAX_INDEX_PAGES) -> None:
        self._max_pages = max_pages
        self._pages: dict[str, _Pages] = {}
        for worker in workers:
            self.add_worker(worker)

    def __len__(self) -> int:
        """Pages known, each counted at every worker that holds it."""
        return sum(len(pages) for pages in self._pages.values())

    def add_worker(self, worker: str) -> None:
        """One more that may tell of prefixes; all have an equal share of the pages."""
        self._pages[worker] = _Pages(0)
        self._share()

    def remove_worker(self, worker: str) -> None:
        del self._pages[worker]
        self._share()

    def _share(self) -> None:
        self._budget = max(MIN_WORKER_PAGES, self._max_pages // max(1, len(self._pages)))
        for pages in self._pages.values():
            pages.budget = self._budget

    def match(self, page_hashes: PageHashes | Sequence[int]) -> Mapping[str, int]:
        """Leading pages held, by worker; workers that hold none are left out.

        Goes on while some worker holds all so far, so that a prompt nobody knows is hardly hashed.
        """
        found: dict[str, int] = {}
        holders = [
            (name, pages.known) for name, pages in self._pages.items() if pages.young or pages.old
        ]
        start, end = 0, FIRST_BLOCK
        while holders:
            hashes = page_hashes.first(end) if isinstance(page_hashes, PageHashes) else page_hashes
            end = min(end, len(hashes))
            if start == end:
                break
            last, still = hashes[end - 1], []
            for name, known in holders:
                if last in known:
                    still.append((name, known))
                    found[name] = end
                elif hashes[start] in known:
                    found[name] = _num_matched(known, hashes, start + 1, end)
            holders, start, end = still, end, BLOCK_GROWTH * end
        return found

    def position(self, worker: str) -> tuple[str, int]:
        """Incarnation and number of the last change heard of."""
        pages = self._pages[worker]
        return pages.incarnation, pages.sequence

    def apply(self, worker: str, changes: PrefixChanges) -> None:
        """Take in what the worker says. Changes that do not follow what is known are left alone."""
        pages = self._pages[worker]
        if changes.is_snapshot:
            self.forget(worker)
            pages = self._pages[worker]
            pages.add(islice(changes.added, self._budget // 2))
        elif changes.incarnation != pages.incarnation or changes.sequence < pages.sequence:
            return
        else:
            pages.remove(changes.removed)
            pages.add(changes.added)
            told = set(changes.added) | set(changes.removed)
            pages.expected -= told
            pages.doubtful -= told
        pages.incarnation, pages.sequence = changes.incarnation, changes.sequence

    def expect(self, worker: str, page_hashes: Sequence[int]) -> None:
        """The worker has just used these: those it had to compute it will tell of.

        They are not the next to be dropped. Nothing for a worker that never tells.
        """
        pages = self._pages[worker]
        if pages.incarnation:
            pages.expected.update(known for known in page_hashes if known not in pages)
            pages.add([known for known in page_hashes if known not in pages.young])

    def settle(self, worker: str) -> None:
        """A report of the worker is in: drop what was expected before the one before it."""
        pages = self._pages[worker]
        if pages.doubtful:
            pages.remove(pages.doubtful)
        pages.doubtful, pages.expected = pages.expected, set()

    def forget(self, worker: str) -> None:
        """Nothing is known of this worker any more."""
        self._pages[worker] = _Pages(self._budget)


def _num_matched(known: _Pages | set[int], hashes: Sequence[int], low: int, high: int) -> int:
    """How many leading pages are known: at least `low`, fewer than `high`."""
    high -= 1
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low
