"""Who owns which page of one KV pool: reference counts, the free list and the idle cached pages.

A page is free, held (by one or more attempts) or idle (held by nobody, but the prefix cache knows
what is in it). Page 0 is the bin: padded rows write there and nobody owns it. Pure Python: knows no
tokens and no devices. Owned by its worker's thread.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

BIN_PAGE = 0


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens, the last one perhaps in part."""
    return -(-num_tokens // page_size)


class PageAllocator:
    """Pages 1 .. num_pages - 1 of a pool of num_pages."""

    def __init__(self, num_pages: int, clock: Callable[[], float] = time.monotonic) -> None:
        if num_pages < 2:
            raise ValueError(
                f"num_pages = {num_pages}: at least 2, since page {BIN_PAGE} is the bin"
            )
        self.num_pages = num_pages - 1
        self._clock = clock
        self._free = list(range(num_pages - 1, BIN_PAGE, -1))
        self._holders = [0] * num_pages
        self._cached = bytearray(num_pages)
        self._idle: dict[int, float] = {}  # page → since when, longest idle first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Pages held by the prefix cache alone."""
        return len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages held by at least one attempt."""
        return self.num_pages - len(self._free) - len(self._idle)

    def alloc(self, num_pages: int) -> tuple[int, ...] | None:
        """Take free pages, all or none. None: not so many are free."""
        if num_pages > len(self._free):
            return None
        cut = len(self._free) - num_pages
        pages = tuple(reversed(self._free[cut:]))
        del self._free[cut:]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, page_ids: Iterable[int]) -> None:
        """One more holder for each page, which must be held or idle."""
        for page in page_ids:
            if self._holders[page] == 0:
                if page not in self._idle:
                    raise ValueError(f"page {page} is free and cannot be shared")
                del self._idle[page]
            self._holders[page] += 1

    def free(self, page_ids: Sequence[int]) -> None:
        """One holder less for each page of a sequence, given in the sequence's order.

        The last page is let go first, so that a prefix goes idle, and is evicted, from its end.
        """
        for page in reversed(page_ids):
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is not held and cannot be freed")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._let_go(page)

    def _let_go(self, page: int) -> None:
        if self._cached[page]:
            self._idle[page] = self._clock()
        else:
            self._free.append(page)

    def num_holders(self, page: int) -> int:
        return self._holders[page]

    # The prefix cache's side.

    def mark_cached(self, page: int) -> None:
        """The prefix cache now knows this held page, so that it goes idle instead of free."""
        if self._holders[page] == 0:
            raise ValueError(f"page {page} is not held and cannot be cached")
        self._cached[page] = 1

    def unmark_cached(self, page: int) -> None:
        """The prefix cache forgot this page; an idle one becomes free."""
        self._cached[page] = 0
        if self._idle.pop(page, None) is not None:
            self._free.append(page)

    def touch(self, page: int) -> None:
        """An idle page counts as just used."""
        if self._idle.pop(page, None) is not None:
            self._idle[page] = self._clock()

    def longest_idle(self) -> tuple[int, float] | None:
        """The idle page to evict first, and since when it is idle."""
        return next(iter(self._idle.items()), None)

    def cached_pages(self) -> Iterator[int]:
        return (page for page, cached in enumerate(self._cached) if cached)

    def check_integrity(self) -> None:
        """Every page is in exactly one state, and the bin is nobody's."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert BIN_PAGE not in free and self._holders[BIN_PAGE] == 0, "the bin page has an owner"
        for page in range(1, self.num_pages + 1):
            states = (page in free, self._holders[page] > 0, page in self._idle)
            assert sum(states) == 1, f"page {page}: free, held, idle = {states}"
            assert not (page in free and self._cached[page]), f"page {page} is free and cached"
            assert page not in self._idle or self._cached[page], f"page {page} is idle, not cached"
